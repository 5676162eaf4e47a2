"""Memory on the axis of time: bytes of gathered weights in flight while the stream runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.graph import NodeKind, find_waits
from overlap_core.placement import SpanKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.graph import OverlapGraph
    from overlap_core.placement import Span
    from overlap_core.report import Report

__all__ = ["bytes_over_time"]


def bytes_over_time(
    report: Report,
    graph: OverlapGraph,
    order: Sequence[int],
    steps: Sequence[tuple[int, int]],
    spans: Sequence[Span],
) -> tuple[tuple[int, int], ...]:
    """The steps of an order as (nanoseconds, bytes), one a moment at which the bytes change.

    A launch counts from the moment at which the compute stream gets to it, which is the earliest
    at which its gather can run; a wait, from the moment at which the stream is past it.

    Args:
        report, graph: whose order it is.
        order: positions of all nodes.
        steps: as (place in the order, bytes), from the report.
        spans: of the same order.
    """
    reached = _reached(report, graph, spans)
    moments: dict[int, int] = {}
    for place, nbytes in steps:
        moments[reached[order[place]]] = nbytes
    found: list[tuple[int, int]] = []
    for moment, nbytes in sorted(moments.items()):
        if not found or found[-1][1] != nbytes:
            found.append((moment, nbytes))
    return tuple(found)


def _reached(report: Report, graph: OverlapGraph, spans: Sequence[Span]) -> dict[int, int]:
    """When the compute stream gets to each launch, and when it is past each wait."""
    communicates = {graph.index[name] for name in report.collectives}
    launches = (graph.index[gather.name] for gather in report.gathers)
    waits = {launch: find_waits(graph, launch, communicates)[1] for launch in launches}
    reached: dict[int, int] = {}
    clock, last = 0, -1
    for span in spans:
        if span.kind is SpanKind.ISSUED:
            if graph.nodes[span.position].kind is not NodeKind.COMPUTE:
                last = span.position
                # The host never lets the stream get ahead of it.
                reached[last] = clock = max(clock, span.end_ns)
        elif span.kind is not SpanKind.NETWORK:
            clock = max(clock, span.end_ns)
            if span.kind is SpanKind.IDLE and last in waits.get(span.position, ()):
                reached[last] = clock
    return reached
