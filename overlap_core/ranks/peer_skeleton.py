"""A skeleton as peers can notice it, and how two of them align."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict

from attrs import frozen

_Group = tuple[tuple[int, ...], int | str]
_ByGroup = dict[_Group, list[int]]

__all__ = ["Alignment", "PeerEntry", "PeerSkeleton", "align"]


@frozen(kw_only=True)
class PeerEntry:
    """What peers can notice of one launch of communication.

    No sizes, which may be each rank's own, and not whether it is a weight gather, which is what
    one rank makes of its graph.
    """

    op: str
    dtypes: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    """Which of the skeleton's groups."""
    comparable: tuple[str, ...] = ()

    def noticed(self) -> tuple[object, ...]:
        """What must be equal; which groups, is compared by whoever compares groups one by one."""
        return self.op, self.dtypes, self.comparable, len(self.groups)

    def __str__(self) -> str:
        return f"{self.op} {', '.join(self.dtypes)}".rstrip()


@frozen(kw_only=True)
class PeerSkeleton:
    """All launches but those on groups of one rank, in an order that graphs of one code share."""

    entries: tuple[PeerEntry, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks of each group, by first appearance; empty: unknown."""
    names: tuple[str, ...] = ()
    """Of the groups, on this rank and in the run of the job that it comes from; empty: unknown."""

    def digest(self) -> str:
        """Hex digest of what is the same on all ranks: of groups, their sizes.

        What is on groups of fewer ranks than others is left out, since there a rank may be alone
        where another is not.
        """
        widest = max(map(len, self.groups), default=0)
        shared = [len(ranks) in (0, widest) for ranks in self.groups]
        entries = [entry for entry in self.entries if any(shared[group] for group in entry.groups)]
        groups = {group: None for entry in entries for group in entry.groups}
        numbers = {group: number for number, group in enumerate(groups)}
        rows = [[e.op, e.dtypes, [numbers[g] for g in e.groups], e.comparable] for e in entries]
        data = json.dumps([rows, [len(self.groups[group]) for group in groups]])
        return hashlib.sha256(data.encode()).hexdigest()

    def by_group(self, named: bool = False) -> _ByGroup:
        """Ordinals of the entries on each group, by its ranks and which group of these it is.

        Args:
            named: whether its name tells that, or its place among the groups of these ranks.
        """
        numbers: dict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)
        names: list[_Group] = [(ranks, next(numbers[ranks])) for ranks in self.groups]
        if named:
            names = list(zip(self.groups, self.names, strict=True))
        found: _ByGroup = {name: [] for name in names}
        for ordinal, entry in enumerate(self.entries):
            for group in entry.groups:
                found[names[group]].append(ordinal)
        return found


@frozen(kw_only=True)
class Alignment:
    """How the entries of a graph stand to those of an agreement."""

    places: tuple[int | None, ...] = ()
    """For each entry its counterpart; None: it is on groups whose ranks all run this graph."""
    difference: str = ""
    """The first entry that has none, if no peer can run a graph of the agreement beside this one;
    empty: some may."""


def align(mine: PeerSkeleton, agreed: PeerSkeleton, rank: int) -> Alignment:
    """Find what a rank that compiles alone shares with an agreement that its peers may run.

    On a group whose launches differ no rank can run a graph of the agreement beside this rank's:
    operations would meet that don't fit, in program order too. So its ranks run what this rank
    runs. Other ranks, that share a group on which nothing differs, may run either.

    Args:
        mine, agreed: of two graphs that `rank` compiled from one function.
        rank: whose they are.
    """
    # Another run of the job may name its groups otherwise.
    named = not {*zip(mine.groups, mine.names, strict=False)}.isdisjoint(
        zip(agreed.groups, agreed.names, strict=False)
    )
    own, other = mine.by_group(named), agreed.by_group(named)
    differing = [
        group
        for group in {**own, **other}
        if [mine.entries[o].noticed() for o in own.get(group, ())]
        != [agreed.entries[o].noticed() for o in other.get(group, ())]
    ]
    alike = [group for group in own if group not in differing]
    groups = [{rank, *ranks} for ranks, _ in differing]
    # One group must tell, so that all of its ranks find the same. Nobody knows the ranks of a group
    # that is unknown.
    if any(all(ranks and alone.issuperset(ranks) for ranks, _ in alike) for alone in groups):
        return Alignment(difference=_describe(mine, agreed, own, other, differing))
    places: list[int | None] = [None] * len(mine.entries)
    for group in alike:
        for ordinal, counterpart in zip(own[group], other[group], strict=True):
            places[ordinal] = counterpart
    return Alignment(places=tuple(places))


def _describe(
    mine: PeerSkeleton, agreed: PeerSkeleton, own: _ByGroup, other: _ByGroup, groups: list[_Group]
) -> str:
    """The first entry without counterpart, in words."""
    found = []
    for group in groups:
        left, right = own.get(group, []), other.get(group, [])
        for which in range(max(len(left), len(right))):
            here = mine.entries[left[which]] if which < len(left) else None
            there = agreed.entries[right[which]] if which < len(right) else None
            if here is None or there is None or here.noticed() != there.noticed():
                # What is missing here is told by the place where it would be.
                place = left[which] if here is not None else len(mine.entries)
                found.append((place, here, there, group[0]))
                break
    place, here, there, ranks = min(found, key=lambda row: row[0])
    where = f"on a group of {len(ranks)} ranks" if ranks else "on an unknown group"
    if here is None:
        return f"{there} {where} is missing at the end"
    beside = f"where {there} was agreed on" if there is not None else "is one too many"
    return f"entry {place}: {here} {where} {beside}"
