"""Timelines in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from overlap_core.graph import find_waits

from .lanes import BlockKind, LaneKind
from .words import BLOCK_WORDS, IN_FLIGHT, ORDER_WORDS, describe_node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .lanes import Block, Lane, OrderTimeline, RankTimeline

__all__ = ["to_chrome_trace"]

_COLOURS = {BlockKind.EXPOSED: "terrible", BlockKind.IDLE: "grey"}
"""Names from chrome://tracing's palette; Perfetto picks its own colours."""
_ON_HOST = (BlockKind.LAUNCH, BlockKind.WAIT, BlockKind.ISSUE)


def to_chrome_trace(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    """The trace as JSON data: a process for each order of each rank, a thread for each lane.

    Times are microseconds. Arrows lead from a weight gather to the first node that reads it. A
    counter has the bytes of gathered weights in flight.
    """
    events: list[dict[str, Any]] = []
    flows = count(1)
    pid = 0
    for timeline in timelines:
        for name, order in timeline.orders:
            pid += 1
            title = f"{timeline.label} {ORDER_WORDS[name]}"
            events += _names(pid, title, order.lanes)
            for tid, lane in enumerate(order.lanes):
                events += (_event(timeline, block, pid, tid) for block in lane.blocks)
            events += _arrows(timeline, order, pid, flows)
            events += _counter(order, pid)
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _names(pid: int, title: str, lanes: Iterable[Lane]) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, {"name": title})
    yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
    for tid, lane in enumerate(lanes):
        yield _meta("thread_name", pid, tid, {"name": lane.label})
        yield _meta("thread_sort_index", pid, tid, {"sort_index": tid})


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _event(timeline: RankTimeline, block: Block, pid: int, tid: int) -> dict[str, Any]:
    name = timeline.graph.nodes[block.position].name
    place = {"pid": pid, "tid": tid, "ts": block.start_ns / 1000, "cat": str(block.kind)}
    args = describe_node(timeline, block.position)
    shown = name
    if block.kind in _ON_HOST:
        shown = f"{block.kind} {name}"
        if block.end_ns == block.start_ns:
            return {"ph": "i", "s": "t", "name": shown, **place, "args": args}
    if block.kind in (BlockKind.EXPOSED, BlockKind.IDLE):
        shown = f"{BLOCK_WORDS[block.kind]}: {name}"
    event = {"ph": "X", "name": shown, **place, "dur": (block.end_ns - block.start_ns) / 1000}
    if block.kind in _COLOURS:
        event["cname"] = _COLOURS[block.kind]
    return {**event, "args": args}


def _counter(order: OrderTimeline, pid: int) -> Iterator[dict[str, Any]]:
    common = {"ph": "C", "name": IN_FLIGHT, "cat": "memory", "pid": pid, "tid": 0}
    for ns, nbytes in dict([(0, 0), *order.in_flight]).items():
        yield {**common, "ts": ns / 1000, "args": {"bytes": nbytes}}


def _arrows(
    timeline: RankTimeline, order: OrderTimeline, pid: int, flows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    starts: dict[int, tuple[int, int]] = {}
    for tid, lane in enumerate(order.lanes):
        if lane.kind is LaneKind.GROUP:
            for block in lane.blocks:
                starts.setdefault(block.position, (tid, block.start_ns))
    running = {
        block.position: block.start_ns
        for block in order.lanes[1].blocks
        if block.kind in (BlockKind.COMPUTE, BlockKind.OPAQUE) and block.end_ns > block.start_ns
    }
    graph = timeline.graph
    communicates = {graph.index[name] for name in timeline.report.collectives}
    for launch in timeline.gathers:
        _, waits = find_waits(graph, launch, communicates)
        readers = {reader for wait in waits for reader in graph.successors[wait]}
        needed = [running[reader] for reader in readers if reader in running]
        issuer = order.issuers.get(launch, launch)
        if issuer in starts and needed:
            tid, start_ns = starts[issuer]
            common = {"name": "gather", "cat": "flow", "pid": pid, "id": next(flows)}
            yield {"ph": "s", "tid": tid, "ts": start_ns / 1000, **common}
            yield {"ph": "f", "bp": "e", "tid": 1, "ts": min(needed) / 1000, **common}
