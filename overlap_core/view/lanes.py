"""The lanes of a timeline: what the host issues, what runs on the compute stream and each group."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core.graph import NodeKind
from overlap_core.placement import SpanKind

from .memory import bytes_over_time
from .rebuilt import queue_labels, rebuild_models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlap_core.graph import OverlapGraph
    from overlap_core.outcome import GatherOutcome
    from overlap_core.placement import Span
    from overlap_core.report import Report

__all__ = [
    "Block",
    "BlockKind",
    "Lane",
    "LaneKind",
    "OrderTimeline",
    "RankTimeline",
    "build_timelines",
]


class BlockKind(StrEnum):
    """What a block on a lane stands for."""

    COMPUTE = "compute"
    OPAQUE = "opaque"
    """An op that communicates inside, on the compute stream and on its group."""
    EXPOSED = "exposed"
    """The compute stream waits for a weight gather; on the gather's group, that part of it."""
    IDLE = "idle"
    """The compute stream waits for other communication."""
    GATHER = "gather"
    """A weight gather runs beside compute."""
    COLLECTIVE = "collective"
    LAUNCH = "launch"
    WAIT = "wait"
    ISSUE = "issue"
    """The host issues compute; it does so only where that takes time."""


_ON_HOST = {NodeKind.WAIT: BlockKind.WAIT, NodeKind.COLLECTIVE: BlockKind.LAUNCH}


class LaneKind(StrEnum):
    """What a lane shows."""

    HOST = "host"
    COMPUTE = "compute"
    GROUP = "group"


@frozen(kw_only=True)
class Block:
    """A stretch of time on a lane, in nanoseconds; none where the host is not timed."""

    kind: BlockKind
    position: int
    """Of the node, in program order."""
    start_ns: int
    end_ns: int


@frozen(kw_only=True)
class Lane:
    """Blocks that don't overlap, by start."""

    kind: LaneKind
    label: str
    blocks: tuple[Block, ...]


@frozen(kw_only=True)
class OrderTimeline:
    """The prediction for one order. Lanes: host, compute, then the groups as first used."""

    lanes: tuple[Lane, ...]
    total_ns: int
    exposed_ns: int
    """Time in which the compute stream waits for weight gathers."""
    issuers: Mapping[int, int]
    """For each launch the one that stands for it on its group: that which issues its call."""
    in_flight: tuple[tuple[int, int], ...] = ()
    """Bytes of weight gathers between launch and wait, as (ns from the start, bytes from then)."""

    @property
    def most_bytes(self) -> int:
        """The most bytes in flight for any time at all."""
        return max((nbytes for _, nbytes in self.in_flight), default=0)


@frozen(kw_only=True)
class RankTimeline:
    """One report's timelines."""

    label: str
    report: Report
    graph: OverlapGraph
    before: OrderTimeline
    """In program order."""
    after: OrderTimeline
    """In the final order."""
    gathers: Mapping[int, GatherOutcome]
    """The weight gathers by position of their launch in program order."""

    @property
    def orders(self) -> tuple[tuple[str, OrderTimeline], ...]:
        """Both timelines and what to call them, before above after."""
        return ("before", self.before), ("after", self.after)


def build_timelines(reports: Sequence[tuple[str, Report]]) -> tuple[RankTimeline, ...]:
    """The timelines of reports, in the order given.

    Args:
        reports: each with a name, such as its file's, which tells reports of one rank apart.

    Raises:
        ReportFileError: a report lacks its graph or its costs.
    """
    ranks = Counter(report.rank for _, report in reports)
    built = []
    for name, report in reports:
        graph, model, coalescing = rebuild_models(report)
        labels = queue_labels(report, graph)
        calls = {p: call.launches for call in report.coalesced for p in call.launches}
        program, final = range(len(graph.nodes)), report.positions
        spans = model.spans(program)
        in_flight = bytes_over_time(report, graph, program, report.in_flight_before, spans)
        before = _timeline(report, graph, labels, spans, {}, in_flight)
        spans = coalescing.spans(final)
        in_flight = bytes_over_time(report, graph, final, report.in_flight_after, spans)
        after = _timeline(report, graph, labels, spans, calls, in_flight)
        label = f"rank {report.rank}"
        built.append(
            RankTimeline(
                label=f"{label}, {name}" if ranks[report.rank] > 1 else label,
                report=report,
                graph=graph,
                before=before,
                after=after,
                gathers={graph.index[gather.name]: gather for gather in report.gathers},
            )
        )
    return tuple(built)


def _timeline(
    report: Report,
    graph: OverlapGraph,
    labels: dict[str, str],
    spans: tuple[Span, ...],
    calls: dict[int, tuple[int, ...]],
    in_flight: tuple[tuple[int, int], ...],
) -> OrderTimeline:
    gathers = {graph.index[gather.name] for gather in report.gathers}
    issuers = {
        launch: span.position
        for span in spans
        if span.kind is SpanKind.NETWORK
        for launch in calls.get(span.position, (span.position,))
    }
    waited: dict[int, int] = {}
    """By the launch that issued a call, when the stream began to wait for it."""
    host: list[Block] = []
    compute: list[Block] = []
    groups: dict[str, list[Block]] = {queue: [] for queue in labels}
    for span in spans:
        if span.kind is SpanKind.IDLE:
            waited.setdefault(issuers[span.position], span.start_ns)
    for span in spans:
        node = graph.nodes[span.position]
        is_gather = span.position in gathers
        match span.kind:
            case SpanKind.ISSUED:
                host.append(_block(span, _ON_HOST.get(node.kind, BlockKind.ISSUE)))
            case SpanKind.IDLE:
                compute.append(_block(span, BlockKind.EXPOSED if is_gather else BlockKind.IDLE))
            case SpanKind.COMPUTE:
                is_opaque = node.kind is NodeKind.OPAQUE
                compute.append(_block(span, BlockKind.OPAQUE if is_opaque else BlockKind.COMPUTE))
            case SpanKind.NETWORK:
                lane = groups.setdefault(span.queue or "?", [])
                if is_gather:
                    lane += _split(span, waited.get(span.position))
                elif node.kind is NodeKind.OPAQUE:
                    lane.append(_block(span, BlockKind.OPAQUE))
                else:
                    lane.append(_block(span, BlockKind.COLLECTIVE))
    lanes = [
        Lane(kind=LaneKind.HOST, label="host", blocks=tuple(host)),
        Lane(kind=LaneKind.COMPUTE, label="compute", blocks=tuple(compute)),
    ]
    lanes += [
        Lane(kind=LaneKind.GROUP, label=labels.get(queue, queue), blocks=tuple(blocks))
        for queue, blocks in groups.items()
    ]
    return OrderTimeline(
        lanes=tuple(lanes),
        total_ns=max((span.end_ns for span in spans), default=0),
        exposed_ns=sum(
            block.end_ns - block.start_ns for block in compute if block.kind is BlockKind.EXPOSED
        ),
        issuers=issuers,
        in_flight=in_flight,
    )


def _block(span: Span, kind: BlockKind) -> Block:
    return Block(kind=kind, position=span.position, start_ns=span.start_ns, end_ns=span.end_ns)


def _split(span: Span, waited: int | None) -> list[Block]:
    """A gather as the part that compute hides and the part for which compute waits."""
    cut = span.end_ns if waited is None else max(span.start_ns, min(waited, span.end_ns))
    parts = (
        (BlockKind.GATHER, span.start_ns, cut),
        (BlockKind.EXPOSED, cut, span.end_ns),
    )
    return [
        Block(kind=kind, position=span.position, start_ns=start, end_ns=end)
        for kind, start, end in parts
        if end > start
    ]
