"""Predicted time of an order: the host, one compute stream, one queue of communication a group."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from overlap_core.costs import IDEAL
from overlap_core.graph import NodeKind, find_waits

from .network import SharedNetwork

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlap_core.costs import Cost, Machine
    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton

__all__ = ["Coalesced", "Span", "SpanKind", "Timeline", "TimelineModel", "network_share_ns"]

UNKNOWN_GROUP = "?"
"""Queue of communication on groups that nobody named."""


def network_share_ns(cost: Cost) -> int:
    """The part of an opaque op's time that loads the network; half of it where nobody knows."""
    total = cost.ns or 0
    return total // 2 if cost.network_ns is None else min(cost.network_ns, total)


@frozen(kw_only=True)
class Coalesced:
    """Launches that become one call."""

    launches: tuple[int, ...]
    """Positions in program order, the first in order first."""
    ns: int
    """Time of the whole call alone."""


@frozen(kw_only=True)
class Timeline:
    """What one order is predicted to take; nanoseconds, by position of the launch."""

    exposed_ns: dict[int, int]
    """Compute stream idle because of this collective."""
    total_ns: int
    host_ns: int = 0
    """When the host has issued everything."""
    waited_for_host_ns: int = 0
    """Compute stream idle only because the host had not issued its next work yet."""

    def gathers_exposed_ns(self, launches: Iterable[int]) -> int:
        """Exposed time of the given launches together."""
        return sum(self.exposed_ns.get(launch, 0) for launch in launches)


class SpanKind(StrEnum):
    """What a stretch of predicted time is."""

    ISSUED = "issued"
    """The host issues a node. It takes no time where the machine's host takes none."""
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
    """The node, by position in program order; of a coalesced call the launch that issued it."""
    start_ns: int
    end_ns: int
    queue: str | None = None
    """The group, for time on the network."""


class _Step(NamedTuple):
    """What one node asks of the host, of the compute stream and of the network."""

    kind: int
    ns: int
    network_ns: int
    host_ns: int


_FREE, _COMPUTE, _KERNELS, _LAUNCH, _WAIT, _OPAQUE = range(6)
"""`_KERNELS`: an opaque op that doesn't communicate; it is more than one kernel."""


class TimelineModel:
    """Replays orders of one graph; what does not depend on the order is prepared once.

    *Host.* It issues the nodes in order, each for the time that the machine says, and never
    waits. The call of coalesced launches is issued whole at the first of them in the order.
    Compute that takes no time (a view, an unpack) is not issued at all.

    *Compute stream.* Work starts once it is issued and the work before it is done. A wait blocks
    the stream until its collective is done; an opaque op that communicates, until its queues are
    free. That is the exposed time: of the launch whose wait blocks, or of the last launch that
    holds the queue. Idle time before the next work is issued is the host's, and exposes nothing.

    *Queues, one a group.* A collective starts once it is issued, the compute issued before it is
    done, and the collectives before it in its queues are. A coalesced call ends for all its
    launches at once. An opaque op holds its queues for its network part, with which it begins.

    *Room.* On a machine that says `waits_for_kernel` a collective that could start while a compute
    node runs, or together with one, starts when that node is done. An opaque op is many kernels
    and leaves room between them.

    *Sharing.* Collectives and network parts that run at one time share the network evenly.
    Compute beside a collective takes `compute_slowdown` times as long, a collective beside
    compute `gather_slowdown` times; the network part of an opaque op is no compute, and no
    collective.

    On an `IDEAL` machine with one group only the nodes' own times count.

    Args:
        graph, skeleton, costs: of one rank; costs by position.
        machine: what the host takes, and how compute and collectives slow each other.
        coalesced: launches that `run` and `spans` take as one call; a launch is in one at most.
    """

    def __init__(
        self,
        graph: OverlapGraph,
        skeleton: Skeleton,
        costs: Sequence[Cost],
        machine: Machine = IDEAL,
        coalesced: Sequence[Coalesced] = (),
    ) -> None:
        self._machine = machine
        self._steps: list[_Step] = []
        self._queues: list[tuple[int, ...]] = []
        waits: dict[int, list[int]] = {}
        numbers: dict[str, int] = {}
        for position, node in enumerate(graph.nodes):
            ns = costs[position].ns or 0
            host_ns = machine.host_ns(node.kind, ns)
            communication = skeleton.communication.get(position)
            queues: tuple[int, ...] = ()
            if communication is not None:
                names = communication.groups or (node.group or UNKNOWN_GROUP,)
                queues = tuple(numbers.setdefault(name, len(numbers)) for name in names)
            self._queues.append(queues)
            network_ns = 0
            if communication is None:
                kind = _WAIT if node.kind is NodeKind.WAIT else _COMPUTE
                if node.kind is NodeKind.COMPUTE and not ns:
                    kind = _FREE
                elif node.kind is NodeKind.OPAQUE:
                    kind = _KERNELS
            elif node.kind is NodeKind.COLLECTIVE:
                kind = _LAUNCH
                for wait in find_waits(graph, position, skeleton.communication)[1]:
                    waits.setdefault(wait, []).append(position)
            else:
                kind, network_ns = _OPAQUE, network_share_ns(costs[position])
            self._steps.append(_Step(kind, ns, network_ns, host_ns))
        self._waits = {wait: tuple(launches) for wait, launches in waits.items()}
        self._names = tuple(numbers)
        self._calls = {launch: call for call in coalesced for launch in call.launches}

    @cached_property
    def program_order(self) -> Timeline:
        """The prediction for the order that the graph came in, nothing coalesced."""
        return self._replay(range(len(self._steps)), {}, record=False).timeline

    def run(self, order: Sequence[int]) -> Timeline:
        """Predict one order, a permutation of the graph's positions."""
        return self._replay(order, self._calls, record=False).timeline

    def spans(self, order: Sequence[int]) -> tuple[Span, ...]:
        """What happens when in one order, in the order of its nodes.

        On the host, on the compute stream, and on each queue, spans don't overlap. The idle spans
        of a launch add up to its exposed time in `run`. Compute has a span on the host only where
        it takes host time; where nothing does, launches and waits stand where the stream is.
        """
        replay = self._replay(order, self._calls, record=True)
        times = replay.network.started, replay.network.ended
        spans: list[Span] = []
        for kind, position, start, end in replay.records:
            queues: tuple[str | None, ...] = (None,)
            if kind is SpanKind.NETWORK:
                start, end = (round(time[position]) for time in times)
                queues = tuple(self._names[queue] for queue in replay.queues_of(position))
            spans += (
                Span(kind=kind, position=position, start_ns=start, end_ns=end, queue=queue)
                for queue in queues
            )
        return tuple(spans)

    def _replay(
        self, order: Sequence[int], calls: dict[int, Coalesced], *, record: bool
    ) -> _Replay:
        network = SharedNetwork(len(self._names), self._machine)
        replay = _Replay(self._machine, network, self._queues, self._waits, calls, record=record)
        replay.run(order, self._steps)
        return replay


class _Replay:
    """One order, node by node; the network's clock is that of the compute stream."""

    def __init__(
        self,
        machine: Machine,
        network: SharedNetwork,
        queues: Sequence[tuple[int, ...]],
        waits: dict[int, tuple[int, ...]],
        calls: dict[int, Coalesced],
        *,
        record: bool,
    ) -> None:
        self.network = network
        self.records: list[tuple[SpanKind, int, int, int]] = []
        """Kind, position, start, end; a job's times on the network are known only at the end."""
        self._machine = machine
        self._queues = queues
        self._waits = waits
        self._calls = calls
        self._record = record
        self._has_host = _takes_host_time(machine)
        self._exposed: dict[int, int] = {}
        self._issued = 0
        """When the host has issued the nodes so far."""
        self._waited: float = 0
        self._job_of: dict[int, int] = {}
        """The launch that issued each launch's call."""

    @property
    def timeline(self) -> Timeline:
        """What came out, after `run`."""
        return Timeline(
            exposed_ns=self._exposed,
            total_ns=round(self.network.now),
            host_ns=self._issued,
            waited_for_host_ns=round(self._waited),
        )

    def run(self, order: Sequence[int], steps: Sequence[_Step]) -> None:
        """Let everything happen, to the end of the last job."""
        network, waits, job_of, record = self.network, self._waits, self._job_of, self._record
        free: float = 0
        """When the compute stream was done with its work so far."""
        for position in order:
            kind, ns, network_ns, host_ns = steps[position]
            if kind == _LAUNCH:
                self._launch(position, ns, host_ns)
                continue
            if host_ns or record:
                self._issue(position, host_ns, is_mark=kind == _WAIT)
            start = network.now
            if kind != _FREE:
                if self._issued > free:
                    self._waited += self._issued - free
                if kind in (_COMPUTE, _KERNELS):
                    network.compute(ns, fills=kind == _COMPUTE)
                elif kind == _WAIT:
                    for launch in waits.get(position, ()):
                        if launch in job_of:
                            self._block(job_of[launch], launch)
                else:
                    start = self._run_opaque(position, ns, network_ns)
                free = network.now
            if record and kind != _WAIT:
                self._add(SpanKind.COMPUTE, position, start)
                if kind == _OPAQUE:
                    self.records.append((SpanKind.NETWORK, position, 0, 0))
        network.idle_until_free()

    def queues_of(self, position: int) -> tuple[int, ...]:
        """The queues of an opaque op, or of the call that a launch issues."""
        if position not in self._calls:
            return self._queues[position]
        launches = self._calls[position].launches
        return tuple(dict.fromkeys(queue for one in launches for queue in self._queues[one]))

    def _issue(self, position: int, host_ns: int, *, is_mark: bool) -> None:
        """The host issues a node; what comes after it in the order happens later."""
        start = self._issued
        self._issued += host_ns
        self.network.idle_until(self._issued)
        if self._record and (host_ns or is_mark):
            end = self._issued
            if not self._has_host:
                start = end = round(self.network.now)
            self.records.append((SpanKind.ISSUED, position, start, end))

    def _launch(self, position: int, ns: int, host_ns: int) -> None:
        call = self._calls.get(position)
        launches: tuple[int, ...] = (position,)
        if call is not None:
            launches, ns = call.launches, call.ns
            host_ns = self._machine.call_host_ns(len(launches))
        is_first = position not in self._job_of
        self._issue(position, host_ns if is_first else 0, is_mark=True)
        if is_first:
            self._job_of.update(dict.fromkeys(launches, position))
            self.network.submit(position, self.queues_of(position), ns)
            if self._record:
                self.records.append((SpanKind.NETWORK, position, 0, 0))

    def _run_opaque(self, position: int, ns: int, network_ns: int) -> float:
        """The op's network part, then its compute; when it started."""
        for queue in self._queues[position]:
            holder = self.network.last_in(queue)
            if holder is not None:
                self._block(holder, holder)
        start = self.network.now
        self.network.communicate(position, network_ns)
        self.network.compute(ns - network_ns, fills=False)
        return start

    def _block(self, job: int, launch: int) -> None:
        """The stream waits for a job, on account of a launch."""
        start = self.network.now
        self.network.idle_until_done(job)
        # Times are rounded, and not lengths, so that spans add up to what is exposed.
        exposed = round(self.network.now) - round(start)
        if exposed:
            self._exposed[launch] = self._exposed.get(launch, 0) + exposed
            self._add(SpanKind.IDLE, launch, start)

    def _add(self, kind: SpanKind, position: int, start: float) -> None:
        """A span of the compute stream, up to now."""
        if self._record:
            self.records.append((kind, position, round(start), round(self.network.now)))


def _takes_host_time(machine: Machine) -> bool:
    return any(
        (
            machine.kernel_host_ns,
            machine.opaque_host_ns,
            machine.collective_host_ns,
            machine.member_host_ns,
            machine.wait_host_ns,
        )
    )
