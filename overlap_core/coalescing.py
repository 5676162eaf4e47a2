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
    peak_bytes,
    rebuild_order,
    refine,
    stand_still,
)
from .views import coalesced, propose_plan

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
    if isinstance(wish, int):
        labels = _labels(view, keep_alone, min(wish, most_bytes), 0)
        return Choice(labels=labels, region_bytes=wish)
    partitions = {single: 0}
    for region_bytes, head_bytes in _trials(len(view.graph.nodes)):
        if region_bytes <= most_bytes:
            labels = _labels(view, keep_alone, region_bytes, head_bytes)
            partitions.setdefault(labels, region_bytes)
    memory = build_memory(view.graph) if view.peak is None else view.peak.memory
    free = _best(evolve(view, peak=None), partitions, memory)
    if view.peak is None or free.peak_bytes <= view.peak.nbytes:
        return Choice(labels=free.labels, region_bytes=partitions[free.labels])
    best = _best(view, partitions, memory)
    grown, note = bytes_in_words(view.peak.growth_bytes), ""
    if best.labels != free.labels:
        note = (
            f"memory: the step is predicted to take {max(0, best.ns - free.ns) / 1000:.0f} µs less "
            f"with other calls, but the peak would grow by more than {grown} (max_peak_growth)"
        )
    return Choice(labels=best.labels, region_bytes=partitions[best.labels], note=note)


@frozen(kw_only=True, order=True)
class _Trial:
    """What a partition is predicted to come to; of those that take as long the least is best."""

    peak_bytes: int
    ns: int
    labels: tuple[int, ...]


def _best(view: RankView, partitions: Mapping[tuple[int, ...], int], memory: Memory) -> _Trial:
    """The partition that is predicted to take the shortest, among those whose peak fits.

    The first one, in which each gather is alone, counts as fitting.
    """
    trials: list[_Trial] = []
    for labels, region_bytes in partitions.items():
        ns, order = _predict(coalesced(view, labels, region_bytes) if region_bytes else view)
        peak = peak_bytes(view.graph, order, memory)
        if not trials or view.peak is None or peak <= view.peak.nbytes:
            trials.append(_Trial(peak_bytes=peak, ns=ns, labels=labels))
    least_ns = min(trial.ns for trial in trials)
    return min(trial for trial in trials if trial.ns <= _ALIKE * least_ns)


def _trials(nodes: int) -> Iterator[tuple[int, int]]:
    left = max(2, _NODES_TO_REPLAY // max(1, nodes))
    for region_bytes in _REGION_BYTES:
        for part in _HEAD_PARTS:
            if left:
                left -= 1
                yield region_bytes, region_bytes // part


def _labels(
    view: RankView, keep_alone: frozenset[int], region_bytes: int, head_bytes: int
) -> tuple[int, ...]:
    assert view.skeleton is not None
    assert view.frame is not None
    labels = form_units(view.graph, view.skeleton.gathers, region_bytes, head_bytes)
    return cut_illegal(labels, view.frame, keep_alone)


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


def _predict(view: RankView) -> tuple[int, tuple[int, ...]]:
    """Predicted time of a step with the gathers where this rank wants them, and its order."""
    assert view.frame is not None
    assert view.model is not None
    plan = propose_plan(view, pinned=False)
    order = rebuild_order(view.frame, [placement.boundary for placement in plan.placements])
    return view.model.run(order).total_ns, order


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
