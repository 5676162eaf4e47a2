"""Latest safe launch: each gather as late as its time is still covered, on the time axis.

The axis of a group is the time in which its gathers can run beside compute: prefix sums of
compute cost, without the parts in which opaque ops load the network. Gathers of one group run
one after another, so the walk goes from the last gather to the first, and each must be done
before its successor is due to start. The idea of scheduling on a time axis, and not by counting
nodes, is shared with Inductor's overlap scheduling; the rules here are this project's own.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from overlap_core.costs import IDEAL
from overlap_core.graph import NodeKind, find_waits

from .memory import memory_floors, peak_room
from .plan import GatherPlacement, Plan, Verdict
from .timeline import network_share_ns

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from overlap_core.config import OverlapConfig
    from overlap_core.costs import Cost, Machine
    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton

    from .frame import Frame
    from .memory import PeakBound, PeakRoom
    from .timeline import Coalesced

__all__ = ["align", "contention_of", "propose"]

_CONTENTION = 1.5
"""A gather beside compute takes this many times its time alone, where nobody has measured it."""

_REGIONS_TO_TRY = 8
"""How many stretches between uses of its own group a gather looks back through, from its wait."""


@frozen(kw_only=True)
class _Axis:
    """Time on which the gathers of one group can hide."""

    at: tuple[int, ...]
    """Available nanoseconds before each boundary, non-decreasing."""
    room: tuple[int, ...]
    """As `at`, but before the earliest place at which a gather that is launched at a boundary
    finds room on the device: behind the kernel that follows, on machines that say so."""
    barriers: tuple[int, ...]
    """Base indices of opaque ops that use this group: a gather must end before, or start after."""
    jobs: tuple[tuple[int, int], ...]
    """(base index, time on the axis at which it ends) of other collectives on this group."""


def propose(
    graph: OverlapGraph,
    skeleton: Skeleton,
    frame: Frame,
    costs: Sequence[Cost],
    config: OverlapConfig,
    *,
    pinned: bool = False,
    calls: Sequence[Coalesced] = (),
    machine: Machine = IDEAL,
    bound_bytes: int | None = None,
    peak: PeakBound | None = None,
) -> Plan:
    """The placements that this rank would choose alone.

    Args:
        graph, skeleton, frame, costs: of one rank.
        config: contention and slack.
        pinned: keep every gather behind the skeleton entry that it follows.
        calls: the coalesced calls of the frame.
        machine: what the host costs, and how much compute slows gathers.
        bound_bytes: most bytes of gathered weights in flight; None: as configured, if at all.
        peak: most bytes allocated at once; None: not bounded.

    Returns:
        A plan with `floor <= boundary <= original` for each gather and boundaries that never
        decrease. It launches no gather later than program order does.
    """
    axes: dict[tuple[str, ...], _Axis] = {}
    together = {call.launches[0]: call.ns for call in calls}
    contention = contention_of(config, machine)
    starved = _starved_ns(graph, skeleton, frame, costs, machine)
    used = _first_uses(graph, skeleton, frame)
    if bound_bytes is None:
        bound_bytes = config.max_in_flight_bytes
    memory = memory_floors(graph, frame, bound_bytes)
    room = peak_room(graph, frame, peak)
    boundary_after = len(frame.base)
    start = sys.maxsize
    """When the gather behind is due: all share the network, so two at once gain nothing."""
    chosen: list[GatherPlacement] = []
    for ordinal in range(len(frame.gathers) - 1, -1, -1):
        group = frame.gathers[ordinal]
        original = frame.originals[ordinal]
        key = _queue_names(graph, skeleton, group.launch)
        axis = axes.get(key)
        if axis is None:
            axis = axes[key] = _build_axis(
                graph, skeleton, frame, costs, key, starved, used, machine
            )
        floor = frame.floors[ordinal]
        limit = Verdict.COMPUTE_LIMITED
        if pinned and (pin := frame.slot_start(frame.slot(original))) > floor:
            floor, limit = pin, Verdict.PINNED
        if memory[ordinal] > floor:
            floor, limit = min(memory[ordinal], original), Verdict.MEMORY_LIMITED
        ceiling = min(original, boundary_after)
        alone_ns = together.get(group.launch, costs[group.launch].ns or 0)
        need_ns = round(alone_ns * contention) + config.slack_ns
        end = min(axis.at[frame.needed[ordinal]], start)
        oldest = bisect_left(axis.barriers, frame.needed[ordinal]) - _REGIONS_TO_TRY
        by_peak = False
        while True:
            start, boundary = _latest_start(axis, end, need_ns, floor, ceiling, oldest)
            boundary = max(min(boundary, ceiling), min(floor, original))
            fits = boundary if room is None else room.floor(ordinal, boundary, original)
            if fits == boundary:
                break
            by_peak, floor, limit = True, fits, Verdict.MEMORY_LIMITED
        if room is not None:
            room.take(ordinal, boundary, original)
            _raise_overtaken(chosen, boundary, room)
        is_hidden = start >= axis.room[boundary]
        start = max(start, axis.room[boundary])
        boundary_after = boundary
        chosen.append(
            GatherPlacement(
                gather=graph.nodes[group.launch].name,
                ordinal=ordinal,
                floor=frame.floors[ordinal],
                original=original,
                boundary=boundary,
                slot=frame.slot(boundary),
                verdict=Verdict.HIDDEN if is_hidden else limit,
                why="",
                by_peak=by_peak,
                coalesced=tuple(graph.nodes[launch].name for launch in group.coalesced),
            )
        )
    return align(Plan(placements=tuple(reversed(chosen))), frame)


def _raise_overtaken(chosen: list[GatherPlacement], boundary: int, room: PeakRoom) -> None:
    """Raise gathers that would be launched before one that must stay before them.

    Args:
        chosen: the last gather first; changed in place.
        boundary: of the gather before them all.
        room: gets back what they no longer need.
    """
    for index in range(len(chosen) - 1, -1, -1):
        placed = chosen[index]
        if placed.boundary >= boundary:
            return
        room.give_back(placed.ordinal, placed.boundary, boundary)
        chosen[index] = evolve(
            placed, boundary=boundary, verdict=Verdict.MEMORY_LIMITED, by_peak=True
        )


def align(plan: Plan, frame: Frame) -> Plan:
    """Raise placements that a predecessor has overtaken, and set the slots to the boundaries."""
    result: list[GatherPlacement] = []
    reached = 0
    for placement in plan.placements:
        reached = max(reached, placement.boundary)
        slot = frame.slot(reached)
        if (reached, slot) != (placement.boundary, placement.slot):
            placement = evolve(placement, boundary=reached, slot=slot)
        result.append(placement)
    return Plan(placements=tuple(result))


def _latest_start(
    axis: _Axis, end: int, need_ns: int, floor: int, ceiling: int, oldest: int
) -> tuple[int, int]:
    """Latest start on the axis, and its boundary, for a gather that must be done by `end`.

    If no stretch between two uses of the group is long enough, the longest one tried is taken
    from its beginning. Past the first one, none before number `oldest` is tried: counted from
    the wait, so that a gather that was placed once finds no further ones the next time.
    """
    at, room, barriers = axis.at, axis.room, axis.barriers
    index = bisect_left(barriers, ceiling)
    while index > 0 and at[barriers[index - 1]] > end:
        index -= 1
    longest: int | None = None
    fallback = (end - need_ns, floor)
    while True:
        first = barriers[index - 1] + 1 if index > 0 else 0
        begin, last = max(first, floor), ceiling
        if index < len(barriers):
            last = min(last, barriers[index])
            end = min(end, at[barriers[index]])
        start, last = _before_jobs(axis, end - need_ns, begin, last)
        if start >= room[begin] and last >= begin:
            return start, min(last, bisect_right(room, start) - 1)
        length = end - at[begin]
        if longest is None or length > longest:
            longest, fallback = length, (start, begin)
        if first <= floor or index <= oldest:
            return fallback
        index -= 1


def _before_jobs(axis: _Axis, start: int, begin: int, last: int) -> tuple[int, int]:
    """Move a start that would queue behind another collective to before that one's launch."""
    at, room, jobs = axis.at, axis.room, axis.jobs
    index = bisect_left(jobs, (min(last, bisect_right(room, start) - 1), 0)) - 1
    while index >= 0 and jobs[index][0] >= begin and jobs[index][1] > start:
        last = jobs[index][0]
        start = min(start, at[last])
        index -= 1
    return start, last


def _queue_names(graph: OverlapGraph, skeleton: Skeleton, position: int) -> tuple[str, ...]:
    """The queues of communication that a node uses, the same for all nodes of one group."""
    groups = skeleton.communication[position].groups
    return groups or ((graph.nodes[position].group or "?"),)


def contention_of(config: OverlapConfig, machine: Machine) -> float:
    """How many times longer a gather takes beside compute: as configured, measured or guessed."""
    if config.contention is not None:
        return config.contention
    return machine.gather_slowdown if machine.measured else _CONTENTION


def _starved_ns(
    graph: OverlapGraph,
    skeleton: Skeleton,
    frame: Frame,
    costs: Sequence[Cost],
    machine: Machine,
) -> list[int]:
    """For each base node the time in which the compute stream has nothing to do before it.

    The host is late then, and a gather may run in that time as it may beside compute.
    """
    members = {launch: group for group in frame.gathers for launch in group.launches}
    starved = [0] * len(frame.base)
    host = device = 0
    for position, node in enumerate(graph.nodes):
        ns = costs[position].ns or 0
        if (group := members.get(position)) is not None:
            if position == group.launch:
                host += machine.call_host_ns(len(group.launches))
            continue
        host += machine.host_ns(node.kind, ns)
        index = frame.boundary_of[position]
        on_stream = ns and node.kind not in (NodeKind.COLLECTIVE, NodeKind.WAIT)
        if on_stream and index < len(frame.base) and frame.base[index] == position:
            starved[index] = max(0, host - device)
            device = max(device, host) + ns
    return starved


def _build_axis(
    graph: OverlapGraph,
    skeleton: Skeleton,
    frame: Frame,
    costs: Sequence[Cost],
    key: tuple[str, ...],
    starved: Sequence[int],
    used: Mapping[int, int],
    machine: Machine,
) -> _Axis:
    free: list[int] = []
    barriers: list[int] = []
    queued: list[tuple[int, int]] = []
    unknown = ("?",)
    for index, position in enumerate(frame.base):
        ns = (costs[position].ns or 0) + starved[index]
        communication = skeleton.communication.get(position)
        if communication is None:
            free.append(ns)
            continue
        names = _queue_names(graph, skeleton, position)
        shared = names == unknown or key == unknown or not set(names).isdisjoint(key)
        if graph.nodes[position].kind is NodeKind.COLLECTIVE:
            free.append(0)
            if shared:
                queued.append((index, costs[position].ns or 0))
        else:
            free.append(max(0, ns - network_share_ns(costs[position])))
            if shared:
                barriers.append(index)
    at = (0, *accumulate(free))
    jobs: list[tuple[int, int]] = []
    done = 0
    for index, ns in queued:
        done = max(done, at[index]) + ns
        if index in used:
            done = min(done, at[used[index]])  # the stream has waited for it there
        jobs.append((index, done))
    room = at
    if machine.waits_for_kernel:
        idle = {
            boundary
            for index, use in used.items()
            if at[use] - at[index] < (costs[frame.base[index]].ns or 0)
            for boundary in range(bisect_left(at, at[use], index + 1), use + 1)
        }
        room = _find_room(at, [graph.nodes[p].kind for p in frame.base], idle)
    return _Axis(at=at, room=room, barriers=tuple(barriers), jobs=tuple(jobs))


def _first_uses(graph: OverlapGraph, skeleton: Skeleton, frame: Frame) -> dict[int, int]:
    """For each collective of the base whose result is used, both by base index, its first use.

    The stream blocks there at the latest: waits may sink, but not behind who needs them.
    """
    found = {}
    for index, position in enumerate(frame.base):
        if position in skeleton.communication and graph.nodes[position].kind is NodeKind.COLLECTIVE:
            _, waits = find_waits(graph, position, skeleton.communication)
            uses = {use for wait in waits for use in graph.successors[wait]}.difference(waits)
            if uses:
                found[index] = frame.boundary_of[min(uses)]
    return found


def _find_room(
    at: tuple[int, ...], kinds: Sequence[NodeKind], idle: Collection[int]
) -> tuple[int, ...]:
    """For each boundary the time behind the compute node that is next on the stream.

    An opaque op is many kernels, between which there is room; and where the stream waits for
    another collective (`idle`), no kernel is in the way.
    """
    room = list(at)
    for boundary in range(len(kinds) - 1, -1, -1):
        if kinds[boundary] is NodeKind.OPAQUE or boundary in idle:
            continue
        takes_time = at[boundary + 1] > at[boundary] and kinds[boundary] is NodeKind.COMPUTE
        room[boundary] = at[boundary + 1] if takes_time else room[boundary + 1]
    return tuple(room)
