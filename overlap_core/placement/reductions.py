"""Collectives that are no weight gathers, such as reduce-scatters: out early, waited for late.

The sequence of communication stays as it is, so none of this needs an agreement between ranks
about what follows what. `launch_early` depends on structure only and comes before gathers are
placed, `wait_late` on this rank's costs and comes last.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core.graph import NodeKind, find_waits

from .frame import number_base
from .liveness import build_memory
from .timeline import UNKNOWN_GROUP, TimelineModel, network_share_ns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from overlap_core.costs import Cost
    from overlap_core.graph import OverlapGraph
    from overlap_core.skeleton import Skeleton

__all__ = ["launch_early", "wait_late"]


def _find_reductions(graph: OverlapGraph, skeleton: Skeleton) -> tuple[int, ...]:
    """Positions of the functional collectives that are not weight gathers, ascending."""
    gathers = {group.launch for group in skeleton.gathers}
    return tuple(
        position
        for position in skeleton.positions
        if position not in gathers and graph.nodes[position].kind is NodeKind.COLLECTIVE
    )


def launch_early(graph: OverlapGraph, skeleton: Skeleton) -> tuple[int, ...]:
    """An order in which every collective that is no weight gather leaves as early as is legal.

    With a launch go the producers that serve it alone and read one buffer at most: a cast, a
    scale, a pad, a copy into a bucket. A product of two tensors keeps its place, and so does all
    else: in which order gradients are computed is the compiler's choice. No launch passes another
    node that issues communication, so the sequence stays. Only structure counts, not costs, bytes
    or names: ranks with equal graphs get equal orders.

    By `TimelineModel` no graph of one group takes longer so. Of two groups, the one that is served
    earlier may take bandwidth from a gather that is needed sooner.

    Args:
        graph, skeleton: of one rank.

    Returns:
        A legal permutation of the graph's positions. The same again for the graph in that order.
    """
    groups = {
        launch: _find_members(graph, skeleton, launch)
        for launch in _find_reductions(graph, skeleton)
    }
    moving = {member for members in groups.values() for member in members}
    base, boundary_of = number_base(len(graph.nodes), moving)
    arrivals: list[list[int]] = [[] for _ in range(len(base) + 1)]
    placed: dict[int, int] = {}
    reached = 0
    for launch in skeleton.positions:
        if launch not in groups:
            reached = max(reached, boundary_of[launch] + 1)
            continue
        members = groups[launch]
        for before in {before for member in members for before in graph.predecessors[member]}:
            if before in placed:
                reached = max(reached, placed[before])
            elif before not in moving:
                reached = max(reached, boundary_of[before] + 1)
        for member in members:
            # A producer that stands further ahead stays there.
            placed[member] = min(reached, boundary_of[member])
            arrivals[placed[member]].append(member)
    order: list[int] = []
    for boundary, arriving in enumerate(arrivals):
        order.extend(arriving)
        if boundary < len(base):
            order.append(base[boundary])
    return tuple(order)


def _find_members(graph: OverlapGraph, skeleton: Skeleton, launch: int) -> tuple[int, ...]:
    """A launch and the producers that move with it, ascending."""
    members = {launch}
    # A wait may read the launch's input too, to keep it alive.
    stable = {launch, *_find_direct_waits(graph, launch, skeleton.communication)}
    stack = list(graph.data_predecessors[launch])
    while stack:
        position = stack.pop()
        node = graph.nodes[position]
        if (
            position not in members
            and node.kind is NodeKind.COMPUTE
            and position not in skeleton.communication
            and len(node.reads) <= 1
            and stable.issuperset(graph.successors[position])
            and graph.callers.isdisjoint((*node.writes, *node.mutates))
        ):
            members.add(position)
            stable.add(position)
            stack.extend(graph.data_predecessors[position])
    return tuple(sorted(members))


def _find_direct_waits(
    graph: OverlapGraph, launch: int, communicates: Collection[int]
) -> tuple[int, ...]:
    """The waits that make a launch's own buffers readable, not those for what has been ready."""
    unpacks, waits = find_waits(graph, launch, communicates)
    unwaited = {launch, *unpacks}
    return tuple(w for w in waits if not unwaited.isdisjoint(graph.data_predecessors[w]))


def wait_late(
    graph: OverlapGraph,
    skeleton: Skeleton,
    costs: Sequence[Cost],
    order: Sequence[int],
    *,
    bound_bytes: int | None,
    slack_ns: int | None,
    contention: float,
    model: TimelineModel | None = None,
) -> tuple[int, ...]:
    """Move the waits of collectives that are no weight gathers back until their time is covered.

    A wait sinks until the compute behind the launch covers the collective's time, or to right
    before its first user that cannot sink with it, or to the end. Compute on which nothing but
    such compute depends sinks along. "As late as is legal" instead (`slack_ns=None`) would hide
    no more by these costs, and would keep full gradients alive, in a backward pass nearly all of
    them: without a tight bound that is the memory that sharding was to save. `slack_ns` and
    `contention` are the margin for costs that are wrong and for peers that are late.

    Args:
        graph, skeleton, costs: of one rank.
        order: a legal order of the graph's positions.
        bound_bytes: most bytes of outputs and inputs of such collectives between launch and last
            wait. The oldest are waited for first to keep it, but no wait comes earlier than in
            `order`, which may exceed it. Unknown sizes count as nothing. None: no bound.
        slack_ns: nanoseconds between the predicted end of a collective and its wait. None: as
            late as is legal, whatever the costs.
        contention: a collective beside compute takes this many times its time alone.
        model: of the same graph, to compare both orders with; None: one of an ideal machine.

    Returns:
        A legal order with the same sequence of communication; `order` itself where the model
        says that more would be exposed otherwise, over all collectives, or the step be longer. A
        collective of unknown cost keeps its wait, unless `slack_ns` is None. Sinking twice changes
        nothing.
    """
    if not _find_reductions(graph, skeleton):
        return tuple(order)
    sinking = _Sinking(graph, skeleton, costs, order, bound_bytes, slack_ns, contention)
    found = sinking.run()
    model = TimelineModel(graph, skeleton, costs) if model is None else model
    before, after = model.run(order), model.run(found)
    more = sum(after.exposed_ns.values()) > sum(before.exposed_ns.values())
    return tuple(order) if more or after.total_ns > before.total_ns else found


@frozen(kw_only=True)
class _Waits:
    """Which waits belong to which collective that is no weight gather."""

    of_launch: dict[int, tuple[int, ...]]
    """By collective, the waits for its own buffers."""
    launches: dict[int, list[int]]
    """By such a wait, the collectives that it waits for."""
    sinking: frozenset[int]
    """The waits that may move."""


def _find_sinking_waits(
    graph: OverlapGraph, skeleton: Skeleton, costs: Sequence[Cost], *, unknown: bool
) -> _Waits:
    """The waits that may sink; with `unknown` also those of collectives without a cost."""
    of_launch: dict[int, tuple[int, ...]] = {}
    launches: dict[int, list[int]] = {}
    fixed = {wait for group in skeleton.gathers for wait in group.waits}
    for launch in _find_reductions(graph, skeleton):
        of_launch[launch] = _find_direct_waits(graph, launch, skeleton.communication)
        if not unknown and costs[launch].ns is None:
            fixed.update(of_launch[launch])
        for wait in of_launch[launch]:
            launches.setdefault(wait, []).append(launch)
    return _Waits(of_launch=of_launch, launches=launches, sinking=frozenset(launches) - fixed)


class _Sinking:
    """One pass over an order that holds nodes back, and lets them go at the time for each."""

    def __init__(
        self,
        graph: OverlapGraph,
        skeleton: Skeleton,
        costs: Sequence[Cost],
        order: Sequence[int],
        bound_bytes: int | None,
        slack_ns: int | None,
        contention: float,
    ) -> None:
        self.given = order
        self.place = {position: place for place, position in enumerate(order)}
        self.bound_bytes = bound_bytes
        self.slack_ns = slack_ns
        self.clock = _Clock(graph, skeleton, costs, contention)
        self.waits = _find_sinking_waits(graph, skeleton, costs, unknown=slack_ns is None)
        self.nbytes = _find_bytes(graph, self.waits)
        self.before, self.behind = self._find_edges(graph)
        self.followers = self._find_followers(graph, skeleton)
        self.order: list[int] = []
        self.held: set[int] = set()
        self.blocked: dict[int, int] = {}
        """By held follower, how many of those that it must come behind are held."""
        self.due: list[tuple[int, int, int]] = []
        """Heap of (time, place, wait)."""
        self.oldest: list[tuple[int, int, int]] = []
        """Heap of (place of the launch, place, wait)."""
        self.open_waits: dict[int, int] = {}
        """By collective in flight, how many of its waits are still to come."""
        self.in_flight_bytes = 0

    def run(self) -> tuple[int, ...]:
        for position in self.given:
            while self.due and self.due[0][0] <= self.clock.now:
                self._release([heappop(self.due)[2]])
            self._make_room(self.nbytes.get(position, 0))
            if position in self.waits.sinking and self._may_hold(position):
                self._hold_wait(position)
            elif position in self.followers and not self.held.isdisjoint(self.before[position]):
                self.blocked[position] = sum(b in self.held for b in self.before[position])
                self.held.add(position)
            else:
                self._release([b for b in self.before[position] if b in self.held])
                self._emit(position)
        self._release([position for position in self.held if position not in self.blocked])
        return tuple(self.order)

    def _find_edges(self, graph: OverlapGraph) -> tuple[list[list[int]], list[list[int]]]:
        """What comes before and behind each node, with what a graph need not say.

        The network reads a collective's input until the wait, so whoever changes that in place
        behind the wait stays behind it.
        """
        before = [list(some) for some in graph.predecessors]
        behind = [list(some) for some in graph.successors]
        changes: defaultdict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(graph.nodes):
            for buffer in node.mutates:
                changes[buffer].append(position)
        for wait in sorted(self.waits.sinking):
            launches = self.waits.launches[wait]
            buffers = dict.fromkeys(b for ln in launches for b in graph.nodes[ln].reads)
            for change in [c for b in buffers for c in changes.get(b, ())]:
                if self.place[change] > self.place[wait] and wait not in before[change]:
                    before[change].append(wait)
                    behind[wait].append(change)
        return before, behind

    def _find_followers(self, graph: OverlapGraph, skeleton: Skeleton) -> set[int]:
        """Compute behind a sinking wait with nothing but more of the kind behind it."""
        sinking: set[int] = set(self.waits.sinking)
        for position in self.given:
            if (
                graph.nodes[position].kind is NodeKind.COMPUTE
                and position not in skeleton.communication
                and not sinking.isdisjoint(self.before[position])
            ):
                sinking.add(position)
        followers: set[int] = set()
        for position in reversed(self.given):
            if (
                position in sinking
                and position not in self.waits.sinking
                and followers.issuperset(self.behind[position])
            ):
                followers.add(position)
        return followers

    def _may_hold(self, wait: int) -> bool:
        if self.bound_bytes is not None and self.in_flight_bytes > self.bound_bytes:
            return False
        return self.slack_ns is None or self._due_ns(wait) > self.clock.now

    def _due_ns(self, wait: int) -> int:
        ends = [self.clock.end[launch] for launch in self.waits.launches[wait]]
        return max(ends) + (self.slack_ns or 0)

    def _hold_wait(self, wait: int) -> None:
        self.held.add(wait)
        place = self.place[wait]
        if self.slack_ns is not None:
            heappush(self.due, (self._due_ns(wait), place, wait))
        launch = min(self.place[launch] for launch in self.waits.launches[wait])
        heappush(self.oldest, (launch, place, wait))

    def _make_room(self, nbytes: int) -> None:
        """Let the oldest waits go until so many more bytes fit, or nothing is held any more."""
        if self.bound_bytes is None or not nbytes:
            return
        while self.oldest and self.in_flight_bytes + nbytes > self.bound_bytes:
            self._release([heappop(self.oldest)[2]])

    def _release(self, waits: Iterable[int]) -> None:
        """Let waits go, those held that they must come behind, and what then follows them."""
        needed: set[int] = set()
        stack = [wait for wait in waits if wait in self.held]
        while stack:
            wait = stack.pop()
            if wait not in needed:
                needed.add(wait)
                stack.extend(b for b in self.before[wait] if b in self.held)
        self.held -= needed
        ready = [(self.place[wait], wait) for wait in needed]
        heapify(ready)
        while ready:
            _, position = heappop(ready)
            self._emit(position)
            for follower in self.behind[position]:
                if follower in self.blocked:
                    self.blocked[follower] -= 1
                    if not self.blocked[follower]:
                        del self.blocked[follower]
                        self.held.remove(follower)
                        heappush(ready, (self.place[follower], follower))

    def _emit(self, position: int) -> None:
        self.order.append(position)
        self.clock.advance(position)
        waits = self.waits.of_launch.get(position)
        if waits:
            self.open_waits[position] = len(waits)
            self.in_flight_bytes += self.nbytes[position]
        for launch in self.waits.launches.get(position, ()):
            self.open_waits[launch] -= 1
            if not self.open_waits[launch]:
                self.in_flight_bytes -= self.nbytes[launch]


def _find_bytes(graph: OverlapGraph, waits: _Waits) -> dict[int, int]:
    """By collective that somebody waits for, the bytes that it makes, reads and changes."""
    memory = build_memory(graph)
    return {launch: memory.node_bytes(launch) for launch, own in waits.of_launch.items() if own}


class _Clock:
    """Predicted time along an order while it grows, with every collective slowed by contention.

    Simpler than `TimelineModel`: the host takes no time, groups share nothing, and each launch of
    a coalesced call takes its own. What that gets wrong makes waits later rather than sooner.
    """

    def __init__(
        self, graph: OverlapGraph, skeleton: Skeleton, costs: Sequence[Cost], contention: float
    ) -> None:
        self.now = 0
        """Nanoseconds on the compute stream."""
        self.end: dict[int, int] = {}
        """When each collective launched so far is done."""
        self._nodes = graph.nodes
        self._communication = skeleton.communication
        self._costs = costs
        self._contention = contention
        self._free: defaultdict[str, int] = defaultdict(int)
        self._launches: defaultdict[int, list[int]] = defaultdict(list)
        for launch in skeleton.positions:
            if graph.nodes[launch].kind is NodeKind.COLLECTIVE:
                for wait in find_waits(graph, launch, skeleton.communication)[1]:
                    self._launches[wait].append(launch)

    def advance(self, position: int) -> None:
        """Run one node."""
        node, cost = self._nodes[position], self._costs[position]
        if node.kind is NodeKind.WAIT:
            self.now = max(self.now, *(self.end[ln] for ln in self._launches.get(position, ())), 0)
            return
        communication = self._communication.get(position)
        if communication is None:
            self.now += cost.ns or 0
            return
        queues = communication.groups or (node.group or UNKNOWN_GROUP,)
        start = max(self.now, *(self._free[queue] for queue in queues))
        if node.kind is NodeKind.COLLECTIVE:
            busy = self.end[position] = start + round((cost.ns or 0) * self._contention)
        else:
            busy = start + network_share_ns(cost)
            self.now = start + (cost.ns or 0)
        self._free.update(dict.fromkeys(queues, busy))
