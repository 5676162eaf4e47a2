"""Which gathers one rank would coalesce, and what the ranks make of it together."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ._words import bytes_in_words
from .placement import (
    Plan,
    align,
    alone,
    build_memory,
    cut_illegal,
    form_units,
    memory_floors,
    peak_bytes,
    rebuild_order,
    refine,
    stand_still,
    units_of,
)
from .views import coalesced, propose_plan, with_late_waits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .placement import Memory
    from .views import RankView

__all__ = ["Choice", "choose_labels", "decode_labels", "encode_labels", "held_back"]

logger = logging.getLogger(__name__)

_REGION_BYTES = tuple(size << 20 for size in (64, 96, 128, 48, 192, 32, 16, 256, 8))
"""Sizes of regions to try, those first that pay most often."""
_HEAD_PARTS = (8, 2)
"""The head of the graph starts with regions of this part of the others."""
_NODES_TO_REPLAY = 100_000
"""How many nodes all trials together may replay: a long graph gets fewer of them."""
_ALIKE = 1.01
"""Steps that are predicted to take at most this many times the fastest are as good: among them
memory decides."""


@frozen(kw_only=True)
class Choice:
    """The partition that a rank would choose."""

    labels: tuple[int, ...]
    """One a gather; those of one call share one."""
    region_bytes: int = 0
    """The size of its regions; 0: nothing is coalesced."""
    note: str = ""
    """What the bound on the peak of memory costs, if another partition would be faster."""


def choose_labels(view: RankView) -> Choice:
    """The partition that this rank would choose.

    With `coalesce="auto"` the predicted step decides between sizes whose peak of memory is within
    its bound, the host's time included, and between those that take as long the peak; where the
    host costs nothing there is nothing to win.

    Args:
        view: in which each gather is alone.

    Raises:
        PluginError: from a policy.
    """
    assert view.skeleton is not None
    wish = view.config.coalesce
    single = alone(len(view.skeleton.gathers))
    if wish == "off" or len(single) < 2 or (wish == "auto" and not view.machine.collective_host_ns):
        return Choice(labels=single)
    keep_alone = held_back(view)
    # A region that is in flight as a whole must fit.
    most_bytes = view.config.max_in_flight_bytes or sys.maxsize
    memory = build_memory(view.graph) if view.peak is None else view.peak.memory
    if isinstance(wish, int):
        return _fixed(view, keep_alone, min(wish, most_bytes), memory)
    partitions: dict[tuple[int, ...], RankView] = {single: view}
    for region_bytes, head_bytes in _trials(len(view.graph.nodes)):
        if region_bytes <= most_bytes:
            labels, seen = _regions(view, keep_alone, region_bytes, head_bytes)
            partitions.setdefault(labels, seen)
    free = _best({labels: evolve(seen, peak=None) for labels, seen in partitions.items()}, memory)
    if view.peak is None or free.peak_bytes <= view.peak.nbytes:
        return Choice(labels=free.labels, region_bytes=partitions[free.labels].region_bytes)
    best = _best(partitions, memory)
    grown, note = bytes_in_words(view.peak.growth_bytes), ""
    if best.labels != free.labels:
        note = (
            f"memory: the step is predicted to take {max(0, best.ns - free.ns) / 1000:.0f} µs less "
            f"with other calls, but the peak would grow by more than {grown} (max_peak_growth)"
        )
    region_bytes = partitions[best.labels].region_bytes
    return Choice(labels=best.labels, region_bytes=region_bytes, note=note)


def _fixed(view: RankView, keep_alone: frozenset[int], region_bytes: int, memory: Memory) -> Choice:
    """Regions of a size that was asked for; smaller ones where the peak would break its bound."""
    assert view.skeleton is not None
    single = alone(len(view.skeleton.gathers))
    size = region_bytes
    while size:
        labels, seen = _regions(view, keep_alone, size)
        if view.peak is None or _predict(seen, memory).peak_bytes <= view.peak.nbytes:
            note = "" if size == region_bytes else _smaller(view, size, region_bytes)
            return Choice(labels=labels, region_bytes=size, note=note)
        size = 0 if labels == single else size // 2
    return Choice(labels=single, note=_smaller(view, 0, region_bytes))


def _smaller(view: RankView, size: int, wish: int) -> str:
    assert view.peak is not None
    found = f"regions of {bytes_in_words(size)}" if size else "no regions"
    return (
        f"memory: {found} instead of {bytes_in_words(wish)}, or the peak would grow by more than "
        f"{bytes_in_words(view.peak.growth_bytes)} (max_peak_growth)"
    )


@frozen(kw_only=True, order=True)
class _Trial:
    """What a partition is predicted to come to; of those that take as long the least is best."""

    peak_bytes: int
    ns: int
    labels: tuple[int, ...] = ()


def _best(partitions: Mapping[tuple[int, ...], RankView], memory: Memory) -> _Trial:
    """The partition that is predicted to take the shortest, among those whose peak fits.

    The first one, in which each gather is alone, counts as fitting.

    Args:
        partitions: by labels, the graph as it is seen with them.
        memory: of the graph.
    """
    trials: list[_Trial] = []
    for labels, view in partitions.items():
        trial = evolve(_predict(view, memory), labels=labels)
        if not trials or view.peak is None or trial.peak_bytes <= view.peak.nbytes:
            trials.append(trial)
    least_ns = min(trial.ns for trial in trials)
    return min(trial for trial in trials if trial.ns <= _ALIKE * least_ns)


def _trials(nodes: int) -> Iterator[tuple[int, int]]:
    left = max(2, _NODES_TO_REPLAY // max(1, nodes))
    for region_bytes in _REGION_BYTES:
        for part in _HEAD_PARTS:
            if left:
                left -= 1
                yield region_bytes, region_bytes // part


def _regions(
    view: RankView, keep_alone: frozenset[int], region_bytes: int, head_bytes: int = 0
) -> tuple[tuple[int, ...], RankView]:
    """Regions without what is illegal or breaks the bound on bytes in flight, and their view."""
    assert view.skeleton is not None
    assert view.frame is not None
    labels = form_units(view.graph, view.skeleton.gathers, region_bytes, head_bytes)
    labels = cut_illegal(labels, view.frame, keep_alone)
    while True:
        if labels == alone(len(labels)):
            return labels, view
        seen = coalesced(view, labels, region_bytes)
        assert seen.frame is not None
        wide = _too_wide(seen, units_of(labels))
        if not wide:
            return labels, seen
        apart = {number for unit in wide for number in unit}
        labels = tuple(n if n in apart else label for n, label in enumerate(labels))


def _too_wide(view: RankView, units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Calls that break the bound on bytes in flight even where program order launches them.

    A call is launched where its first gather was, with the bytes of all; so it, or one that is
    still in flight there, has more than program order would have.
    """
    assert view.frame is not None
    floors = memory_floors(view.graph, view.frame, view.bound_bytes)
    originals, released = view.frame.originals, view.frame.released
    over = [number for number, floor in enumerate(floors) if floor > originals[number]]
    wide = [units[number] for number in over if len(units[number]) > 1]
    return wide or [
        unit
        for other, unit in enumerate(units)
        if len(unit) > 1
        and any(other < number and released[other] >= originals[number] for number in over)
    ]


def held_back(view: RankView) -> frozenset[int]:
    """Gathers that stay calls of their own: no call can be made, or a policy holds them back.

    Policies are asked about a plan in which each gather is launched as early as is legal.
    """
    assert view.skeleton is not None
    assert view.frame is not None
    names = [view.graph.nodes[group.launch].name for group in view.skeleton.gathers]
    found = {number for number, name in enumerate(names) if name in view.keep_alone}
    earliest = Plan(
        placements=tuple(
            evolve(placement, boundary=placement.floor)
            for placement in stand_still(view.graph, view.frame).placements
        )
    )
    plan = align(earliest, view.frame)
    adjusted = view.host.adjust_plan(plan, view.graph)
    if adjusted != plan:
        found |= {
            number
            for number, (old, new) in enumerate(
                zip(plan.placements, adjusted.placements, strict=True)
            )
            if old.boundary != new.boundary
        }
    return frozenset(found)


def _predict(view: RankView, memory: Memory) -> _Trial:
    """A step with gathers, and waits of reductions, where this rank wants them."""
    assert view.frame is not None
    assert view.model is not None
    plan = propose_plan(view, pinned=False)
    order = rebuild_order(view.frame, [placement.boundary for placement in plan.placements])
    if view.is_backward:
        order = with_late_waits(view, order)
    peak = peak_bytes(view.graph, order, memory)
    return _Trial(peak_bytes=peak, ns=view.model.run(order).total_ns)


def encode_labels(labels: Sequence[int]) -> bytes:
    """As a message to other ranks."""
    return json.dumps(list(labels), separators=(",", ":")).encode()


def decode_labels(payloads: Sequence[bytes], gathers: int) -> tuple[int, ...]:
    """What all ranks can do together: the coarsest partition finer than all of theirs.

    The same on every rank, since all see the same payloads; one that makes no sense leaves every
    gather alone.
    """
    distinct = dict.fromkeys(payloads)
    try:
        partitions = [tuple(map(int, json.loads(payload))) for payload in distinct]
        if any(len(partition) != gathers for partition in partitions):
            raise ValueError("ranks see different numbers of gathers")
        return refine(partitions)
    except (ValueError, TypeError) as error:
        logger.warning("gathers are not coalesced: %s", error)
        return alone(gathers)
