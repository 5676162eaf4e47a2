"""One skeleton out of those of several ranks, or where they begin to differ."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from .skeleton import SYMBOLIC, describe_entry
from .uneven import conflicts, may_differ

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .entries import SkeletonEntry

    Entries = Sequence[SkeletonEntry]

__all__ = ["Merged", "describe_uneven", "find_reordered", "merge", "merge_skeletons"]


@frozen(kw_only=True)
class Merged:
    """What several skeletons have in common."""

    entries: tuple[SkeletonEntry, ...] | None
    """A dimension in which ranks may differ is symbolic here; None: the skeletons differ."""
    difference: str = ""
    """The first one, in words."""
    uneven: tuple[int, ...] = ()
    """Ordinals of the entries whose static sizes are each rank's own."""


def merge_skeletons(
    skeletons: Sequence[Entries], ranks: Sequence[int] = ()
) -> tuple[tuple[SkeletonEntry, ...] | None, str]:
    """One skeleton that all the given ones agree with, or None and the first difference.

    `merge`, and `find_reordered` where sizes are each rank's own.

    Args:
        skeletons: in an order that is the same on all ranks.
        ranks: one for each, to name in the difference.
    """
    merged = merge(skeletons, ranks)
    difference = merged.difference or find_reordered(skeletons, merged.uneven, ranks)
    return (None, difference) if difference else (merged.entries, "")


def merge(skeletons: Sequence[Entries], ranks: Sequence[int] = ()) -> Merged:
    """What all skeletons agree with, place by place.

    Ranks may disagree on whether a dimension is static (a local length of 1 is specialized on
    one rank only). A dimension that is symbolic anywhere is not compared; the static values of
    one dimension must be equal wherever it is static, unless `may_differ` takes them for the ranks'
    own shares.

    Args:
        skeletons: in an order that is the same on all ranks.
        ranks: one for each, to name in the difference.
    """
    first = list(skeletons[0])
    sides = _sides(skeletons, ranks)
    for which, other in enumerate(skeletons[1:], start=1):
        for ordinal in range(max(len(first), len(other))):
            if ordinal >= len(first) or ordinal >= len(other):
                is_more = ordinal >= len(first)
                longer, side = (other, sides[which]) if is_more else (first, sides[0])
                text = f"entry {ordinal}: {describe_entry(longer[ordinal])}{side}, on one side only"
                return Merged(entries=None, difference=text)
            merged = _merge_entries(first[ordinal], other[ordinal])
            if merged is None:
                text = (
                    f"entry {ordinal}: {describe_entry(skeletons[0][ordinal])}{sides[0]} beside "
                    f"{describe_entry(skeletons[which][ordinal])}{sides[which]}"
                )
                return Merged(entries=None, difference=text)
            first[ordinal] = merged
    # A dimension found symbolic late may have hidden two static values from each other.
    uneven = []
    for ordinal, entry in enumerate(first):
        if not any(SYMBOLIC in sizes for sizes in entry.sizes):
            continue
        outputs = [
            [[s[ordinal].sizes[output][dim] for s in skeletons] for dim in range(len(sizes))]
            for output, sizes in enumerate(entry.sizes)
        ]
        if not _may_differ(entry, outputs):
            found = [(values[dim], dim) for values in outputs for dim in conflicts(values)]
            static, dim = sorted({*found[0][0]} - {SYMBOLIC}, key=str), found[0][1]
            text = f"entry {ordinal}: {entry.op} with {static} in dimension {dim}"
            return Merged(entries=None, difference=text)
        if any(map(conflicts, outputs)):
            uneven.append(ordinal)
    return Merged(entries=tuple(first), uneven=tuple(uneven))


def find_reordered(
    skeletons: Sequence[Entries],
    uneven: Collection[int],
    ranks: Sequence[int] = (),
    matched: Collection[int] = (),
    *,
    captured: bool = False,
) -> str:
    """Where another order of the entries would explain the ranks' sizes better, in words.

    Two operations that are swapped on one rank look like uneven shares of two operations. What
    tells them apart is that sizes are there in the other place, so that more of them were equal in
    another order. And, where nothing else tells operations apart, that what is the larger on one
    rank is the smaller on another one. Only entries that are alike but for their sizes and groups
    can be taken for each other.

    Args:
        skeletons: that merge, in an order that is the same on all ranks.
        uneven: ordinals of the entries whose sizes would be each rank's own.
        ranks: one for each skeleton, to name in the text.
        matched: ordinals of entries that are known to be the same operation everywhere.
        captured: whether all ranks know the captured order, and compare it as well.

    Returns:
        Empty if the order of the entries explains their sizes best.
    """
    if not uneven:
        return ""
    sides = _sides(skeletons, ranks)

    def describe(which: int, ordinal: int) -> str:
        return f"{describe_entry(skeletons[which][ordinal])}{sides[which]}"

    alike: dict[SkeletonEntry, list[int]] = {}
    for ordinal, entry in enumerate(skeletons[0]):
        if ordinal not in matched:
            key = evolve(entry, ordinal=0, sizes=(), groups=(), node="")
            alike.setdefault(key, []).append(ordinal)
    for ordinals in alike.values():
        if set(ordinals).isdisjoint(uneven):
            continue
        found, why = _find_swapped(skeletons, ordinals), "the former is entry {} of the latter rank"
        if found is None and not captured:
            found = _find_inverted(skeletons, ordinals)
            why = "the former is larger than entry {} of its rank, and the latter smaller"
        if found is not None:
            one, other, here, there = found
            # The same can be said of the other place, the other way round.
            one, other, here, there = min(found, (other, one, there, here))
            sizes = f"{describe(one, here)} beside {describe(other, here)}"
            return f"entry {here}: {sizes}; {why.format(there)}"
    return ""


def describe_uneven(
    ordinals: Sequence[int], skeletons: Sequence[Entries], ranks: Sequence[int]
) -> str:
    """In words, with two ranks' sizes of the first one; empty if there are none."""
    if not ordinals:
        return ""
    first = ordinals[0]
    other = next(i for i, entries in enumerate(skeletons) if entries[first] != skeletons[0][first])
    count = "one operation" if len(ordinals) == 1 else f"{len(ordinals)} operations"
    return (
        f"the static sizes of {count} are not compared, since each rank's own share of the rows "
        f"decides them: entry {first} is {describe_entry(skeletons[0][first])} on rank {ranks[0]} "
        f"and {describe_entry(skeletons[other][first])} on rank {ranks[other]}"
    )


def _find_swapped(
    skeletons: Sequence[Entries], ordinals: Sequence[int]
) -> tuple[int, int, int, int] | None:
    """Two skeletons that have the same sizes at two entries, at both of which they differ.

    So it is if and only if neither's places of these sizes are among the other's. If no two are
    so, the places of all skeletons form a chain, in which each holds the one before.
    """
    places: dict[tuple[object, ...], dict[tuple[int, ...], int]] = {}
    for which, entries in enumerate(skeletons):
        mine: dict[tuple[object, ...], list[int]] = {}
        for ordinal in ordinals:
            mine.setdefault(entries[ordinal].sizes, []).append(ordinal)
        for sizes, found in mine.items():
            places.setdefault(sizes, {}).setdefault(tuple(found), which)
    for by_places in places.values():
        for fewer, more in pairwise(sorted(by_places, key=lambda found: (len(found), found))):
            here, there = sorted({*fewer} - {*more}), sorted({*more} - {*fewer})
            if here and there:
                return by_places[fewer], by_places[more], here[0], there[0]
    return None


def _find_inverted(
    skeletons: Sequence[Entries], ordinals: Sequence[int]
) -> tuple[int, int, int, int] | None:
    """Two skeletons that differ at two entries, of which one has more on one side only.

    Neighbours are compared, by their sizes: of ranks some of which have two operations swapped, two
    that don't go together are next to each other.
    """
    distinct: dict[tuple[int, ...], int] = {}
    for which, entries in enumerate(skeletons):
        counts = tuple(_count_elements(entries[ordinal]) for ordinal in ordinals)
        distinct.setdefault(counts, which)
    for ours, theirs in pairwise(sorted(distinct)):
        rows = zip(ours, theirs, ordinals, strict=True)
        differing = sorted(row for row in rows if row[0] != row[1] and -1 not in row)
        most, place = -1, -1
        for _, other, at in differing:
            if other < most:
                return distinct[ours], distinct[theirs], at, place
            if other > most:
                most, place = other, at
    return None


def _count_elements(entry: SkeletonEntry) -> int:
    """Of all outputs; -1 if any dimension is symbolic."""
    if any(SYMBOLIC in sizes for sizes in entry.sizes):
        return -1
    return sum(math.prod(size for size in sizes if isinstance(size, int)) for sizes in entry.sizes)


def _sides(skeletons: Sequence[Entries], ranks: Sequence[int]) -> list[str]:
    return [f" (rank {rank})" for rank in ranks] or [""] * len(skeletons)


def _merge_entries(a: SkeletonEntry, b: SkeletonEntry) -> SkeletonEntry | None:
    if a == b:
        return a
    if evolve(a, sizes=()) != evolve(b, sizes=()) or list(map(len, a.sizes)) != list(
        map(len, b.sizes)
    ):
        return None
    outputs = [list(zip(*sizes, strict=True)) for sizes in zip(a.sizes, b.sizes, strict=True)]
    if not _may_differ(a, outputs):
        return None
    merged = (tuple(x if x == y else SYMBOLIC for x, y in values) for values in outputs)
    return evolve(a, sizes=tuple(merged))


def _may_differ(entry: SkeletonEntry, outputs: Sequence[Sequence[Sequence[int | str]]]) -> bool:
    if entry.weight_gather:
        return not any(map(conflicts, outputs))
    return may_differ(entry.op, outputs)
