"""Two operations that will meet in the wrong order, found from what ranks say of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton

__all__ = ["Crossing", "Issued", "decode_issued", "encode_issued", "find_crossing", "list_issued"]

_MOST_RANKS = 8
"""Ranks of a group that a message names."""


@frozen(kw_only=True)
class Issued:
    """One operation of one rank's skeleton, with the ranks that it really meets."""

    node: str
    text: str
    """The op, sizes and dtypes; equal on all ranks unless a dimension is static on some only."""
    ranks: tuple[int, ...]
    """Of its group; empty: unknown."""
    captured: int | None
    """Place among the entries in the captured order."""


@frozen(kw_only=True)
class Crossing:
    """Two operations that two ranks issue in opposite orders."""

    low: int
    high: int
    """The ranks; `low < high`."""
    on_low: tuple[Issued, Issued]
    """As rank `low` issues them, first the one that comes first there."""
    on_high: tuple[Issued, Issued]
    """The same operations on rank `high`, in the same order of listing."""

    def __str__(self) -> str:
        words = [
            f"{mine.text} on the group of {_ranks(mine.ranks)} (node {mine.node!r} on rank "
            f"{self.low}, {other.node!r} on rank {self.high})"
            for mine, other in zip(self.on_low, self.on_high, strict=True)
        ]
        return (
            f"two operations will meet in the wrong order: {words[0]} comes before {words[1]} on "
            f"rank {self.low}, and behind it on rank {self.high}"
        )


def list_issued(
    graph: OverlapGraph, skeleton: Skeleton, captured: Sequence[int] | None
) -> tuple[Issued, ...]:
    """A rank's operations in program order; `captured` is their order in the captured graph."""
    places = {} if captured is None else {which: place for place, which in enumerate(captured)}
    found = []
    for entry, position in zip(skeleton.entries, skeleton.positions, strict=True):
        sizes = ", ".join("x".join(map(str, s)) or "scalar" for s in entry.sizes)
        found.append(
            Issued(
                node=entry.node,
                text=f"{entry.op} [{sizes}] {', '.join(entry.dtypes)}".rstrip(),
                ranks=graph.nodes[position].group_ranks or (),
                captured=places.get(entry.ordinal),
            )
        )
    return tuple(found)


def encode_issued(issued: Sequence[Issued]) -> bytes:
    """As JSON, for the other ranks; texts and groups, of which there are few, once each."""
    texts = {text: i for i, text in enumerate(dict.fromkeys(one.text for one in issued))}
    groups = {ranks: i for i, ranks in enumerate(dict.fromkeys(one.ranks for one in issued))}
    rows = [[one.node, texts[one.text], groups[one.ranks], one.captured] for one in issued]
    data = {"texts": list(texts), "groups": list(groups), "rows": rows}
    return json.dumps(data, separators=(",", ":")).encode()


def decode_issued(payload: bytes) -> tuple[Issued, ...]:
    """What `encode_issued` wrote."""
    data: dict[str, Any] = json.loads(payload)
    texts, groups = data["texts"], [tuple(ranks) for ranks in data["groups"]]
    return tuple(
        Issued(node=node, text=texts[text], ranks=groups[group], captured=captured)
        for node, text, group, captured in data["rows"]
    )


def find_crossing(issued: Mapping[int, Sequence[Issued]]) -> Crossing | None:
    """The first two operations that two ranks share and issue in opposite orders.

    Operations of different groups count too, if both groups hold both ranks. Each rank is compared
    with the first rank of each of its groups, so the work grows with ranks, not with pairs.

    Args:
        issued: by rank, in program order; a rank that said nothing is left out of account.
    """
    said = {rank: operations for rank, operations in issued.items() if operations}
    groups = _Groups()
    # Ranks that said the same share one object, see `decode_each`.
    used = {
        id(operations): {groups.number(one.ranks): one.ranks for one in operations}
        for operations in {id(each): each for each in said.values()}.values()
    }
    first = {
        number: min((rank for rank in ranks if rank in said), default=-1)
        for numbers in used.values()
        for number, ranks in numbers.items()
    }
    pairs = {
        (first[number], rank)
        for rank, operations in said.items()
        for number in used[id(operations)]
        if first[number] not in (rank, -1)
    }
    for low, high in sorted((min(pair), max(pair)) for pair in pairs):
        if said[low] is said[high]:
            continue
        crossing = _compare(low, said[low], high, said[high], groups)
        if crossing is not None:
            return crossing
    return None


class _Groups:
    """Numbers for groups, so that their ranks, thousands at times, are looked at once."""

    def __init__(self) -> None:
        self._objects: dict[int, tuple[tuple[int, ...], int]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}

    def number(self, ranks: tuple[int, ...]) -> int:
        known = self._objects.get(id(ranks))
        if known is None:
            number = self._numbers.setdefault(ranks, len(self._numbers))
            # Keeping the object keeps its id from being used again.
            known = self._objects[id(ranks)] = (ranks, number)
        return known[1]

    def look(self, one: Issued) -> tuple[str, int]:
        """What an operation looks like to all ranks."""
        return one.text, self.number(one.ranks)

    def holding(self, *ranks: int) -> set[int]:
        """Numbers of the groups that hold all these ranks."""
        return {number for group, number in self._numbers.items() if set(ranks).issubset(group)}


def _compare(
    low: int,
    low_issued: Sequence[Issued],
    high: int,
    high_issued: Sequence[Issued],
    groups: _Groups,
) -> Crossing | None:
    both = groups.holding(low, high)
    left = [one for one in low_issued if groups.number(one.ranks) in both]
    right = [one for one in high_issued if groups.number(one.ranks) in both]
    on_low, on_high = _identify(left, right, groups)
    shared = on_low.keys() & on_high.keys()
    first = [name for name in on_low if name in shared]
    second = [name for name in on_high if name in shared]
    for mine, other in zip(first, second, strict=True):
        if mine != other:
            return Crossing(
                low=low,
                high=high,
                on_low=(on_low[mine], on_low[other]),
                on_high=(on_high[mine], on_high[other]),
            )
    return None


def _identify(
    left: Sequence[Issued], right: Sequence[Issued], groups: _Groups
) -> tuple[dict[Hashable, Issued], dict[Hashable, Issued]]:
    """Names under which both ranks know the same operation, in each rank's own order.

    Where both know the captured order and it is one, that tells equal operations apart; else the
    first of several equal ones is taken for the first on the other rank.
    """
    known = all(one.captured is not None for one in (*left, *right))
    captured = [sorted(side, key=lambda one: one.captured or 0) for side in (left, right)]
    if known and list(map(groups.look, captured[0])) == list(map(groups.look, captured[1])):
        places = [{one.node: place for place, one in enumerate(side)} for side in captured]
        return (
            {places[0][one.node]: one for one in left},
            {places[1][one.node]: one for one in right},
        )
    return _count(left, groups), _count(right, groups)


def _count(side: Sequence[Issued], groups: _Groups) -> dict[Hashable, Issued]:
    seen: dict[Hashable, int] = {}
    named: dict[Hashable, Issued] = {}
    for one in side:
        look = groups.look(one)
        seen[look] = seen.get(look, 0) + 1
        named[look, seen[look]] = one
    return named


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"ranks {shown}" + (", ..." if len(ranks) > _MOST_RANKS else "")
