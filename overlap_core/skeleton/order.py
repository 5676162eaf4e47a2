"""Orders of a skeleton's entries other than program order.

An order is a permutation: ordinals of entries in program order, in the order meant.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from attrs import evolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.graph import OverlapGraph

    from .entries import SkeletonEntry
    from .skeleton import Skeleton

__all__ = ["arrange", "captured_order", "match_order", "occurrences", "order_digest"]


def captured_order(graph: OverlapGraph, skeleton: Skeleton) -> tuple[int, ...] | None:
    """The entries as the captured graph has them; None if that is not known of every one."""
    captured = [graph.nodes[position].captured for position in skeleton.positions]
    known = [place for place in captured if place is not None]
    if len(set(known)) < len(captured):
        return None
    return tuple(sorted(range(len(known)), key=known.__getitem__))


def order_digest(order: Sequence[int] | None) -> str:
    """Hex digest of an order; empty for an unknown one."""
    if order is None:
        return ""
    return hashlib.sha256(json.dumps(list(order)).encode()).hexdigest()


def arrange(entries: Sequence[SkeletonEntry], order: Sequence[int]) -> tuple[SkeletonEntry, ...]:
    """The entries in another order, with ordinals and groups numbered anew."""
    groups: dict[int, int] = {}
    arranged = []
    for ordinal, which in enumerate(order):
        entry = entries[which]
        renamed = tuple(groups.setdefault(group, len(groups)) for group in entry.groups)
        arranged.append(evolve(entry, ordinal=ordinal, groups=renamed))
    return tuple(arranged)


def _key(entry: SkeletonEntry) -> SkeletonEntry:
    """What of an entry does not depend on its place among the others."""
    return evolve(entry, ordinal=0, groups=(), node="")


def occurrences(
    entries: Sequence[SkeletonEntry],
    order: Sequence[int],
    ranks: Sequence[tuple[int, ...] | None],
) -> tuple[int, ...]:
    """For each entry, in program order, how many equal ones come before it in `order`.

    Ranks whose entries match place by place still mix up equal ones where these numbers differ:
    two gathers of one shape, swapped on one rank, look alike and carry other weights. That they
    are on two groups of the same ranks doesn't tell them apart, since a swap renumbers the groups
    too.

    Args:
        entries: in program order, merged over the ranks.
        order: their captured order on this rank.
        ranks: of each entry's group on this rank; None: unknown, or several groups.
    """
    seen: dict[tuple[SkeletonEntry, tuple[int, ...] | None], int] = {}
    found = [0] * len(entries)
    for which in order:
        entry, group = entries[which], ranks[which]
        key = _key(entry) if group else evolve(_key(entry), groups=entry.groups)
        found[which] = seen[key, group] = seen.get((key, group), -1) + 1
    return tuple(found)


def match_order(
    entries: Sequence[SkeletonEntry], reference: Sequence[SkeletonEntry]
) -> tuple[int, ...] | None:
    """The order of `entries` that gives `reference`; None unless exactly one could.

    Groups are compared by their sizes only, since their numbers follow from the order.
    """
    places = {_key(entry): which for which, entry in enumerate(entries)}
    wanted = [_key(entry) for entry in reference]
    alike = len(places) == len(entries) == len(wanted) == len(set(wanted))
    if not alike or places.keys() != set(wanted):
        return None
    return tuple(places[key] for key in wanted)
