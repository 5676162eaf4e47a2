"""Predicted time of an order: one compute stream, one queue of communication a group."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core.graph import NodeKind, find_waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlap_core.costs import Cost
    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton

__all__ = ["Timeline", "TimelineModel", "network_share_ns"]

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
        self._queue_count = len(numbers)

    @cached_property
    def program_order(self) -> Timeline:
        """The prediction for the order that the graph came in."""
        return self.run(range(len(self._steps)))

    def run(self, order: Sequence[int]) -> Timeline:
        """Predict one order, a permutation of the graph's positions."""
        now = 0
        free = [0] * self._queue_count
        last: list[int | None] = [None] * self._queue_count
        end: dict[int, int] = {}
        exposed: dict[int, int] = {}
        steps, queues_of = self._steps, self._queues
        for position in order:
            kind, ns, network = steps[position]
            if kind == _COMPUTE:
                now += ns
            elif kind == _LAUNCH:
                start = now
                for queue in queues_of[position]:
                    start = max(start, free[queue])
                end[position] = start + ns
                for queue in queues_of[position]:
                    free[queue] = start + ns
                    last[queue] = position
            elif kind == _WAIT:
                for launch in self._waits.get(position, ()):
                    done = end.get(launch, now)
                    if done > now:
                        exposed[launch] = exposed.get(launch, 0) + done - now
                        now = done
            else:
                for queue in queues_of[position]:
                    blocker = last[queue]
                    if free[queue] > now and blocker is not None:
                        exposed[blocker] = exposed.get(blocker, 0) + free[queue] - now
                        now = free[queue]
                for queue in queues_of[position]:
                    free[queue] = now + network
                    last[queue] = None
                now += ns
        return Timeline(exposed_ns=exposed, total_ns=max(now, *free, 0) if free else now)


_COMPUTE, _LAUNCH, _WAIT, _OPAQUE = range(4)
