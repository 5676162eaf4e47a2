"""One order of communication for ranks whose program orders had parted before the pass came.

Inductor's own passes order each rank's nodes by itself: by size hints, by memory, and blind to
what opaque ops communicate. Two ranks may come with the same operations in different orders, and
would hang or mix up equal ones with or without any gather moved. Where one order is legal on all
ranks, they agree on it here, before anything is placed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from overlap_core.graph import restore_order
from overlap_core.skeleton import (
    arrange,
    captured_order,
    describe_uneven,
    entry_from_json,
    entry_to_json,
    find_reordered,
    is_exchange,
    match_order,
    merge,
    merge_skeletons,
    occurrences,
    skeleton_digest,
    structure,
)

from .crossings import decode_issued, encode_issued, find_crossing, list_issued
from .differences import describe_more
from .ends import compare_ends, decode_exchanged, encode_exchanged, list_exchanged
from .messages import decode_each
from .negotiation import first_places, share_distinct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol as Interface

    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton, SkeletonEntry

    from .crossings import Crossing
    from .negotiation import Protocol
    from .votes import Vote

    class FingerprintOf(Interface):
        """Fingerprint of this rank's graph in another order of its positions."""

        def __call__(self, order: tuple[int, ...], *, static: bool) -> str: ...


__all__ = ["CommonOrder"]

logger = logging.getLogger(__name__)

_MOST_CANDIDATES = 8
"""Orders that are tried where nobody knows the captured one."""

_MOST_SPEAKERS = 8
"""Ranks of one kind among which two crossing operations are looked for."""

Entries = tuple["SkeletonEntry", ...]

_RESTORE = b"restore "
_REMEDY = (
    "the job will hang or mix up data, with and without overlap_core. Inductor's own passes give "
    "each rank an order of its own; take them out on all ranks with the options "
    "reorder_for_locality=False and reorder_for_peak_memory=False"
)
_RESTORED = (
    "the same communication had come in different orders on the ranks, which can hang them or mix "
    "up their data; one order was restored on all of them"
)
_NOTHING_ELSE = (
    ", and nothing was moved beyond it: the mode is pinned and not abort, because the order that "
    "is committed is not program order"
)
_STILL_APART = "the same communication comes in different orders on the ranks, and stays so"


@define(kw_only=True)
class CommonOrder:
    """One rank's part in comparing skeletons and, where they are only reordered, restoring them."""

    graph: OverlapGraph
    skeleton: Skeleton
    scope: tuple[int, ...]
    index: int
    """Place of this rank in the scope."""
    votes: tuple[Vote, ...]
    """After `compare`: as a mode ladder is to see them."""
    fingerprint_of: FingerprintOf
    restored: tuple[tuple[int, ...], ...] = ()
    """The orders that were asked about; empty ones are not legal here."""
    chosen: int | None = None
    """Which of `restored` is legal on all ranks; None: program order stands."""
    crossing: Crossing | None = None
    """Two operations that will meet in the wrong order, since no common order was found."""
    uneven: str = ""
    """Which static sizes are each rank's own and were not compared, in words."""
    _captured: tuple[int, ...] | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._captured = captured_order(self.graph, self.skeleton)

    def compare(self) -> Protocol[str]:
        """Give compatible skeletons one digest in the votes; else say where they differ.

        If all ranks know a common order that is legal on all of them, `chosen` says which, and
        the votes are those of the graphs in that order.
        """
        skeletons, merged, difference = yield from self._exchange("skeleton", None)
        if merged is not None:
            digest = skeleton_digest(merged)
            self.votes = tuple(evolve(vote, skeleton=digest) for vote in self.votes)
            swapped = yield from self._mixes_up_equals(merged)
            if not swapped:
                yield from self._leave_out_sizes()
                return ""
            difference = "equal operations come in different orders"
        yield from self._restore(skeletons)
        if self.chosen is not None:
            return ""
        if merged is not None:
            self._tell_votes_apart()
        yield from self._find_crossing()
        if self.crossing is None:
            return difference
        if self.crossing.low == self.graph.rank:
            logger.warning("%s; %s", self.crossing, _REMEDY)
        return f"{difference}; {self.crossing}"

    @property
    def order(self) -> tuple[int, ...]:
        """The common order, as positions of this rank's graph; empty: program order stands."""
        return () if self.chosen is None else self.restored[self.chosen]

    def wish(self, why: str) -> bytes:
        """What to wish for if no plan is committed; empty: program order, which did not part.

        Every rank can follow from the moment that it said which orders it can take, whether or
        not it has heard of the others.
        """
        if self.chosen is None:
            return b""
        return b"%s%d %s" % (_RESTORE, self.chosen, why.encode(errors="replace"))

    def read(self, verdict: bytes) -> tuple[tuple[int, ...], str]:
        """The order that a verdict asks for, and why no plan came of it; empty: another verdict."""
        if not verdict.startswith(_RESTORE):
            return (), ""
        which, why = verdict.removeprefix(_RESTORE).split(b" ", 1)
        return self.restored[int(which)], why.decode(errors="replace")

    def notes(self, *, committed: bool, planned: bool = True) -> tuple[str, ...]:
        """What a reader must know of orders that had parted; `planned`: beyond the common one."""
        if self.crossing is not None:
            return (f"{self.crossing}; {_REMEDY}",)
        uneven = (self.uneven,) if self.uneven and committed else ()
        if self.chosen is None:
            return uneven
        if committed:
            return (_RESTORED if planned else _RESTORED + _NOTHING_ELSE, *uneven)
        if self.index == 0:
            logger.warning("%s; %s", _STILL_APART, _REMEDY)
        return (f"{_STILL_APART}; {_REMEDY}",)

    def _exchange(
        self, step: str, order: tuple[int, ...] | None
    ) -> Protocol[tuple[list[Entries], Entries | None, str]]:
        """The distinct skeletons of the scope in program order, or each rank's in `order`."""
        self.uneven = ""
        mine = self.skeleton.entries if order is None else arrange(self.skeleton.entries, order)
        if order is None and len({vote.skeleton for vote in self.votes}) == 1:
            return [mine], mine, ""
        payload = json.dumps([entry_to_json(entry) for entry in mine]).encode()
        payloads = yield from share_distinct(step, payload, self.index)
        speakers = first_places(payloads)
        skeletons = [
            tuple(entry_from_json(i, data) for i, data in enumerate(json.loads(distinct)))
            for distinct in speakers
        ]
        ranks = [self.scope[place] for place in speakers.values()]
        merged = merge(skeletons, ranks)
        difference, matched = merged.difference, frozenset[int]()
        exchanges = [o for o in merged.uneven if is_exchange(mine[o].op)]
        if exchanges:
            difference, matched = yield from self._compare_ends(step, order, exchanges, skeletons)
        captured = all(vote.order for vote in self.votes)
        difference = difference or find_reordered(
            skeletons, merged.uneven, ranks, matched, captured=captured
        )
        if difference:
            more = describe_more(ranks, skeletons)
            difference = f"skeletons differ at {difference}" + (f"; {more}" if more else "")
            return skeletons, None, difference
        self.uneven = describe_uneven(merged.uneven, skeletons, ranks)
        return skeletons, merged.entries, ""

    def _compare_ends(
        self,
        step: str,
        order: tuple[int, ...] | None,
        ordinals: Sequence[int],
        skeletons: Sequence[Entries],
    ) -> Protocol[tuple[str, frozenset[int]]]:
        """Where two ends of an all-to-all contradict each other, and which ones fit."""
        order = tuple(range(len(self.skeleton.entries))) if order is None else order
        mine = list_exchanged(self.graph, self.skeleton, order, ordinals)
        payloads = yield from share_distinct(f"{step}/ends", encode_exchanged(mine), self.index)
        known = dict(zip(self.scope, decode_each(payloads, decode_exchanged), strict=True))
        return compare_ends(known, [skeletons[0][ordinal] for ordinal in ordinals])

    def _leave_out_sizes(self) -> Protocol[None]:
        """Where sizes are each rank's own, let graphs that differ in sizes only be one graph."""
        if self.uneven:
            print_ = structure(self.graph).encode()
            prints = yield from share_distinct("structure", print_, self.index)
            self.votes = tuple(
                evolve(vote, fingerprint=one.decode())
                for vote, one in zip(self.votes, prints, strict=True)
            )

    def _mixes_up_equals(self, merged: Entries) -> Protocol[bool]:
        """Whether skeletons that match hide equal operations which ranks have in other orders."""
        orders = {vote.order for vote in self.votes}
        if len(orders) == 1 or "" in orders:
            return False
        assert self._captured is not None
        nodes = [self.graph.nodes[position] for position in self.skeleton.positions]
        ranks = [node.group_ranks for node in nodes]
        payload = json.dumps([occurrences(merged, self._captured, ranks), ranks]).encode()
        payloads = yield from share_distinct("order/occurrences", payload, self.index)
        found = [json.loads(payload) for payload in payloads]
        if any(numbers != found[0][0] for numbers, _ in found):
            return True
        groups = dict(zip(self.scope, (ranks for _, ranks in found), strict=True))
        return any(_part(groups, ordinal) for ordinal in range(len(merged)))

    def _restore(self, skeletons: list[Entries]) -> Protocol[None]:
        """Find the first order that all ranks can take; every rank comes to the same result."""
        if all(vote.order for vote in self.votes):
            assert self._captured is not None
            _, merged, _ = yield from self._exchange("order/captured", self._captured)
            candidates = [] if merged is None else [(self._captured, merged)]
        else:
            candidates = _match_all(self.skeleton.entries, skeletons)
        if not candidates:
            return
        positions = self.skeleton.positions
        self.restored = tuple(
            restore_order(self.graph.predecessors, [positions[which] for which in order]) or ()
            for order, _ in candidates
        )
        static = not self.uneven
        prints = [
            self.fingerprint_of(order, static=static) if order else "" for order in self.restored
        ]
        payload = json.dumps(prints).encode()
        payloads = yield from share_distinct("order/restored", payload, self.index)
        answers = [json.loads(answer) for answer in payloads]
        for which, (_, merged) in enumerate(candidates):
            if all(answer[which] for answer in answers):
                self.chosen = which
                digest = skeleton_digest(merged)
                self.votes = tuple(
                    evolve(vote, fingerprint=answer[which], skeleton=digest)
                    for vote, answer in zip(self.votes, answers, strict=True)
                )
                return

    def _tell_votes_apart(self) -> None:
        """Keep a ladder from taking ranks for alike that have equal operations in other orders."""
        self.votes = tuple(
            evolve(
                vote,
                fingerprint=_join(vote.fingerprint, vote.order),
                skeleton=_join(vote.skeleton, vote.order),
            )
            for vote in self.votes
        )

    def _find_crossing(self) -> Protocol[None]:
        issued = list_issued(self.graph, self.skeleton, self._captured)
        if self.index not in _speakers(self.votes):
            issued = ()
        payloads = yield from share_distinct("order/issued", encode_issued(issued), self.index)
        ranks = dict(zip(self.scope, decode_each(payloads, decode_issued), strict=True))
        self.crossing = find_crossing(ranks)


def _speakers(votes: Sequence[Vote]) -> set[int]:
    """Places of the ranks that say what they issue: some of each kind, however many there are."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for place, vote in enumerate(votes):
        kinds.setdefault((vote.skeleton, vote.order), []).append(place)
    return {place for places in kinds.values() for place in places[:_MOST_SPEAKERS]}


def _part(groups: Mapping[int, Sequence[Sequence[int] | None]], ordinal: int) -> bool:
    """Whether ranks of one group have another group at the same place.

    Args:
        groups: by rank, for each entry the ranks of its group; None: unknown, or several groups.
        ordinal: of the place.
    """
    for mine in (row[ordinal] for row in groups.values()):
        theirs = [groups[rank][ordinal] for rank in mine or () if rank in groups]
        if any(other is not None and other != mine for other in theirs):
            return True
    return False


def _match_all(
    mine: Entries, skeletons: Sequence[Entries]
) -> list[tuple[tuple[int, ...], Entries]]:
    """This rank's order for each rank's program order, where entries tell themselves apart.

    The same list on all ranks, but for the orders: those of the lowest rank come first.
    """
    found = []
    for reference in skeletons[:_MOST_CANDIDATES]:
        orders = [match_order(other, reference) for other in skeletons]
        own = match_order(mine, reference)
        known = [order for order in orders if order is not None]
        if own is None or len(known) < len(orders):
            continue
        arranged = [arrange(other, o) for other, o in zip(skeletons, known, strict=True)]
        merged, _ = merge_skeletons(arranged)
        if merged is not None:
            found.append((own, merged))
    return found


def _join(digest: str, order: str) -> str:
    return hashlib.sha256(f"{digest}\0{order}".encode()).hexdigest()
