"""Collectives that block: what ranks issue runs to its end, mixes up operations, or hangs.

The strictest reading of an order: no rank goes on before its peers have entered the operation that
it is in. What ends here ends with any streams and any buffering. Nothing of the pass is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Chain", "Free", "Issue", "can_end", "join", "orders", "reordered", "run_blocking"]


@frozen(kw_only=True, cache_hash=True)
class Issue:
    """One operation that a rank enters, or several in one coalesced call."""

    group: str
    """Equal on all ranks of the process group."""
    ranks: tuple[int, ...]
    tags: tuple[int, ...]
    """Which operations of the group: their places among all that the program has on it."""
    what: str
    of: str = ""
    """Whose data, as far as ranks would mix it up without noticing."""
    alone: bool = field(default=False, eq=False)
    """It can't be part of a coalesced call."""

    def __str__(self) -> str:
        return f"{self.what} {'+'.join(map(str, self.tags))} on {self.group}"

    def unnamed(self) -> Issue:
        """As peers see it, who cannot tell whose data it is."""
        return evolve(self, of="")


def join(issues: Sequence[Issue]) -> Issue:
    """One call instead of several."""
    if len(issues) == 1:
        return issues[0]
    return evolve(
        issues[0],
        tags=tuple(tag for issue in issues for tag in issue.tags),
        of="+".join(issue.of for issue in issues if issue.of),
    )


def run_blocking(sequences: Sequence[Sequence[Issue]]) -> str:
    """What is wrong with sequences, one a rank, in words; empty if all ranks come to their end."""
    places = [0] * len(sequences)
    while True:
        heads = {
            rank: issues[place]
            for rank, (issues, place) in enumerate(zip(sequences, places, strict=True))
            if place < len(issues)
        }
        if not heads:
            return ""
        for head in heads.values():
            met = [heads.get(other) for other in head.ranks]
            if any(other is None or other.group != head.group for other in met):
                continue
            if any(other != head for other in met):
                words = "; ".join(f"rank {r} is in {heads[r]}" for r in head.ranks)
                return f"diverges: {words}"
            for other_rank in head.ranks:
                places[other_rank] += 1
            break
        else:
            return "hangs: " + "; ".join(f"rank {r} is in {head}" for r, head in heads.items())


@frozen
class Chain:
    """A rank whose order is fixed; it may make calls of what comes one after the other."""

    issues: tuple[Issue, ...]
    needs: tuple[frozenset[int], ...] = ()
    """For each the ones that it depends on, by place; empty: only what is listed is issued."""

    def offers(self, done: frozenset[int]) -> Iterator[Issue]:
        yield from self.issues[len(done) : len(done) + 1]

    def enter(self, done: frozenset[int], issue: Issue) -> frozenset[int] | None:
        """What is done after an issue; None: it can't come now."""
        first = len(done)
        count = len(issue.tags) if self.needs else 1
        coming = self.issues[first : first + count]
        places = frozenset(range(first, first + len(coming)))
        if not _are_one(coming, issue):
            return None
        if self.needs and any(self.needs[place] & places for place in places):
            return None
        return done | places


@frozen
class Free:
    """A rank that may take any order that its dependencies allow."""

    issues: tuple[Issue, ...]
    needs: tuple[frozenset[int], ...]
    _place: dict[tuple[str, int], int] = field(init=False, eq=False, repr=False)

    def unnamed(self) -> Free:
        return Free(tuple(issue.unnamed() for issue in self.issues), self.needs)

    def __attrs_post_init__(self) -> None:
        found = {(issue.group, issue.tags[0]): place for place, issue in enumerate(self.issues)}
        object.__setattr__(self, "_place", found)

    def offers(self, done: frozenset[int]) -> Iterator[Issue]:
        for place, issue in enumerate(self.issues):
            if place not in done and self.needs[place] <= done:
                yield issue

    def enter(self, done: frozenset[int], issue: Issue) -> frozenset[int] | None:
        """What is done after an issue; None: it can't come now."""
        places = [self._place.get((issue.group, tag)) for tag in issue.tags]
        if any(place is None or place in done for place in places):
            return None
        known = [place for place in places if place is not None]
        if not _are_one([self.issues[place] for place in known], issue):
            return None
        if any(not self.needs[place] <= done for place in known):
            return None
        return done.union(known)


def _are_one(issues: Sequence[Issue], whole: Issue) -> bool:
    """Whether a rank that issues these together issues `whole`."""
    if len(issues) > 1:
        alike = {(issue.group, issue.what) for issue in issues}
        if len(alike) > 1 or any(issue.alone for issue in issues):
            return False
    return bool(issues) and join(issues) == whole


def can_end(sides: Sequence[Chain | Free]) -> bool:
    """Whether ranks, of which some have a choice, can all come to their end."""
    start = (frozenset[int](),) * len(sides)
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        if all(len(done) == len(side.issues) for side, done in zip(sides, state, strict=True)):
            return True
        for side, done in zip(sides, state, strict=True):
            for issue in side.offers(done):
                after = _enter_all(sides, state, issue)
                if after is not None and after not in seen:
                    seen.add(after)
                    stack.append(after)
    return False


def _enter_all(
    sides: Sequence[Chain | Free], state: tuple[frozenset[int], ...], issue: Issue
) -> tuple[frozenset[int], ...] | None:
    after = list(state)
    for rank in issue.ranks:
        done = sides[rank].enter(state[rank], issue)
        if done is None:
            return None
        after[rank] = done
    return tuple(after)


def orders(needs: Sequence[frozenset[int]]) -> Iterator[tuple[int, ...]]:
    """All orders that dependencies allow."""

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(needs):
            yield order
        for place, before in enumerate(needs):
            if place not in order and before.issubset(order):
                yield from extend((*order, place))

    return extend(())


def reordered(free: Free, order: Sequence[int]) -> Chain:
    """A rank that was free, in one of its orders."""
    at = {place: spot for spot, place in enumerate(order)}
    return Chain(
        tuple(free.issues[place] for place in order),
        tuple(frozenset(at[before] for before in free.needs[place]) for place in order),
    )
