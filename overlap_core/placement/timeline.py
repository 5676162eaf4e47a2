"""Predicted time of an order: one compute stream, one queue of communication a group."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core.graph import NodeKind, find_waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlap_core.costs import Cost
    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton

__all__ = ["Span", "SpanKind", "Timeline", "TimelineModel", "network_share_ns"]

UNKNOWN_GROUP = "?"
"""Queue of communication on groups that nobody named."""


def network_share_ns(cost: Cost) -> int:
    """The part of an opaque op's time that loads the network; half of it where nobody knows."""
    total = cost.ns or 0
    return total // 2 if cost.network_ns is None else min(cost.network_ns, total)


@frozen(kw_only=True)
class Timeline:
    """What one order is predicted to take; nanoseconds, by position of the launch."""

    exposed_ns: dict[int, int]
    """Compute stream idle because of this collective."""
    total_ns: int

    def gathers_exposed_ns(self, launches: Iterable[int]) -> int:
        """Exposed time of the given launches together."""
        return sum(self.exposed_ns.get(launch, 0) for launch in launches)


class SpanKind(StrEnum):
    """What a stretch of predicted time is."""

    ISSUED = "issued"
    """The host issues a launch or a wait; no time passes."""
    COMPUTE = "compute"
    """A node runs on the compute stream."""
    IDLE = "idle"
    """The compute stream waits for the collective of the span's node."""
    NETWORK = "network"
    """A node uses the queue of a group."""


@frozen(kw_only=True)
class Span:
    """A stretch of predicted time, in nanoseconds from the start of the order."""

    kind: SpanKind
    position: int
    """The node, by position in program order."""
    start_ns: int
    end_ns: int
    queue: str | None = None
    """The group, for time on the network."""


class TimelineModel:
    """Replays orders of one graph; what does not depend on the order is prepared once.

    A launch queues its collective on its group and costs the compute stream nothing; a wait
    blocks the stream until the collective is done; an opaque op that communicates needs its
    group's queue from its start on. Collectives of one group run one after another.
    """

    def __init__(self, graph: OverlapGraph, skeleton: Skeleton, costs: Sequence[Cost]) -> None:
        self._steps: list[tuple[int, int, int]] = []
        self._queues: list[tuple[int, ...]] = []
        self._waits: dict[int, tuple[int, ...]] = {}
        waits: dict[int, list[int]] = {}
        numbers: dict[str, int] = {}
        for position, node in enumerate(graph.nodes):
            ns = costs[position].ns or 0
            communication = skeleton.communication.get(position)
            queues: tuple[int, ...] = ()
            if communication is not None:
                names = communication.groups or (node.group or UNKNOWN_GROUP,)
                queues = tuple(numbers.setdefault(name, len(numbers)) for name in names)
            self._queues.append(queues)
            if communication is None:
                self._steps.append((_WAIT if node.kind is NodeKind.WAIT else _COMPUTE, ns, 0))
            elif node.kind is NodeKind.COLLECTIVE:
                self._steps.append((_LAUNCH, ns, 0))
                for wait in find_waits(graph, position, skeleton.communication)[1]:
                    waits.setdefault(wait, []).append(position)
            else:
                self._steps.append((_OPAQUE, ns, network_share_ns(costs[position])))
        self._waits = {wait: tuple(launches) for wait, launches in waits.items()}
        self._names = tuple(numbers)

    @cached_property
    def program_order(self) -> Timeline:
        """The prediction for the order that the graph came in."""
        return self.run(range(len(self._steps)))

    def run(self, order: Sequence[int]) -> Timeline:
        """Predict one order, a permutation of the graph's positions."""
        return self._replay(order, None)

    def spans(self, order: Sequence[int]) -> tuple[Span, ...]:
        """What happens when in one order, in the order of its nodes.

        On the compute stream, and on each queue, spans don't overlap. The idle spans of a launch
        add up to its exposed time in `run`.
        """
        spans: list[Span] = []
        self._replay(order, spans)
        return tuple(spans)

    def _replay(self, order: Sequence[int], spans: list[Span] | None) -> Timeline:
        now = 0
        free = [0] * len(self._names)
        last: list[int | None] = [None] * len(self._names)
        end: dict[int, int] = {}
        exposed: dict[int, int] = {}
        steps, queues_of = self._steps, self._queues
        for position in order:
            kind, ns, network = steps[position]
            if kind == _COMPUTE:
                if spans is not None:
                    spans.append(_on_stream(position, now, ns))
                now += ns
            elif kind == _LAUNCH:
                start = now
                for queue in queues_of[position]:
                    start = max(start, free[queue])
                end[position] = start + ns
                for queue in queues_of[position]:
                    free[queue] = start + ns
                    last[queue] = position
                if spans is not None:
                    spans.append(_issued(position, now))
                    spans += self._on_network(position, start, ns)
            elif kind == _WAIT:
                if spans is not None:
                    spans.append(_issued(position, now))
                for launch in self._waits.get(position, ()):
                    done = end.get(launch, now)
                    if done > now:
                        exposed[launch] = exposed.get(launch, 0) + done - now
                        if spans is not None:
                            spans.append(_idle(launch, now, done))
                        now = done
            else:
                for queue in queues_of[position]:
                    blocker = last[queue]
                    if free[queue] > now and blocker is not None:
                        exposed[blocker] = exposed.get(blocker, 0) + free[queue] - now
                        if spans is not None:
                            spans.append(_idle(blocker, now, free[queue]))
                        now = free[queue]
                for queue in queues_of[position]:
                    free[queue] = now + network
                    last[queue] = None
                if spans is not None:
                    spans.append(_on_stream(position, now, ns))
                    spans += self._on_network(position, now, network)
                now += ns
        return Timeline(exposed_ns=exposed, total_ns=max(now, *free, 0) if free else now)

    def _on_network(self, position: int, start: int, ns: int) -> list[Span]:
        return [
            Span(
                kind=SpanKind.NETWORK,
                position=position,
                start_ns=start,
                end_ns=start + ns,
                queue=self._names[queue],
            )
            for queue in self._queues[position]
        ]


def _issued(position: int, at: int) -> Span:
    return Span(kind=SpanKind.ISSUED, position=position, start_ns=at, end_ns=at)


def _on_stream(position: int, start: int, ns: int) -> Span:
    return Span(kind=SpanKind.COMPUTE, position=position, start_ns=start, end_ns=start + ns)


def _idle(launch: int, start: int, end: int) -> Span:
    return Span(kind=SpanKind.IDLE, position=launch, start_ns=start, end_ns=end)


_COMPUTE, _LAUNCH, _WAIT, _OPAQUE = range(4)
