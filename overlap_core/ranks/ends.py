"""Whether both ends of each exchange agree: what one rank sends is what the other expects."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attrs import frozen

from overlap_core.skeleton import comparable_size, describe_entry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton, SkeletonEntry

__all__ = ["Exchanged", "compare_ends", "decode_exchanged", "encode_exchanged", "list_exchanged"]

Sizes = tuple[int | str, ...]


@frozen(kw_only=True)
class Exchanged:
    """What one rank exchanges with each rank of a group, in rows of the first dimension."""

    node: str
    ranks: tuple[int, ...]
    """Of the group, in its order."""
    sent: Sizes
    received: Sizes

    def expected_from(self, rank: int) -> int | str:
        """Rows that come from a rank; none if it is not in the group."""
        return self.received[self.ranks.index(rank)] if rank in self.ranks else 0


def list_exchanged(
    graph: OverlapGraph, skeleton: Skeleton, order: Sequence[int], ordinals: Sequence[int]
) -> dict[int, Exchanged]:
    """Those of some entries of which the rows are known.

    Args:
        graph, skeleton: of one rank.
        order: entries in program order, in the order that ordinals are about.
        ordinals: of the entries to look at.

    Returns:
        By ordinal.
    """
    found = {}
    for ordinal in ordinals:
        node = graph.nodes[skeleton.positions[order[ordinal]]]
        ranks = node.group_ranks or ()
        if graph.rank in ranks and len(node.sent) == len(node.received) == len(ranks):
            found[ordinal] = Exchanged(
                node=node.name,
                ranks=ranks,
                sent=tuple(map(comparable_size, node.sent)),
                received=tuple(map(comparable_size, node.received)),
            )
    return found


def encode_exchanged(exchanged: Mapping[int, Exchanged]) -> bytes:
    """As JSON, for the other ranks; rows that come again, as in every layer, once."""
    distinct = {(e.ranks, e.sent, e.received): None for e in exchanged.values()}
    places = {rows: place for place, rows in enumerate(distinct)}
    entries = [
        [ordinal, e.node, places[e.ranks, e.sent, e.received]] for ordinal, e in exchanged.items()
    ]
    data = {"rows": list(distinct), "entries": entries}
    return json.dumps(data, separators=(",", ":")).encode()


def decode_exchanged(payload: bytes) -> dict[int, Exchanged]:
    """What `encode_exchanged` wrote."""
    data: dict[str, Any] = json.loads(payload)
    rows = [tuple(map(tuple, row)) for row in data["rows"]]
    return {
        ordinal: Exchanged(
            node=node, ranks=rows[place][0], sent=rows[place][1], received=rows[place][2]
        )
        for ordinal, node, place in data["entries"]
    }


def compare_ends(
    exchanged: Mapping[int, Mapping[int, Exchanged]], entries: Sequence[SkeletonEntry]
) -> tuple[str, frozenset[int]]:
    """Compare what each rank sends with what its peer expects.

    Args:
        exchanged: by rank and ordinal; what is missing is not known.
        entries: to compare, in words of one rank.

    Returns:
        Where two ends contradict each other, with both in words, or empty. And the ordinals of the
        entries of which all ends are known and agree.
    """
    matched: set[int] = set()
    for entry in entries:
        by_rank = {rank: mine.get(entry.ordinal) for rank, mine in exchanged.items()}
        contradiction, known = _compare(by_rank)
        if contradiction:
            return f"entry {entry.ordinal}: {describe_entry(entry)}, {contradiction}", frozenset()
        if known:
            matched.add(entry.ordinal)
    return "", frozenset(matched)


def _compare(by_rank: Mapping[int, Exchanged | None]) -> tuple[str, bool]:
    """The first contradiction about one entry, and whether all ends are known."""
    known = True
    for rank, mine in sorted(by_rank.items()):
        if mine is None:
            known = False
            continue
        for peer, rows in zip(mine.ranks, mine.sent, strict=True):
            theirs = by_rank.get(peer)
            expected = None if theirs is None else theirs.expected_from(rank)
            if theirs is None or isinstance(rows, str) or not isinstance(expected, int):
                known = False
            elif rows != expected:
                return (
                    f"of which rank {rank} ({mine.node}) sends {rows} rows to rank {peer} "
                    f"({theirs.node}), and that one expects {expected}"
                ), False
    return "", known
