"""What one rank knows of its graph, and what follows from it without asking anybody."""

from __future__ import annotations

import hashlib
import logging
import sys
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ._words import bytes_in_words, counted
from .costs import IDEAL, request_digest, resolve_costs
from .errors import IllegalOrderError
from .graph import NodeKind, first_violation
from .placement import (
    REGION_BYTES,
    TimelineModel,
    Verdict,
    align,
    bound_peak,
    build_frame,
    calls_of,
    contention_of,
    join,
    largest_region_bytes,
    launch_early,
    peak_bytes,
    propose,
    rebuild_order,
    wait_late,
)
from .ranks import Vote
from .registry import registry_digest
from .skeleton import (
    NO_COMMUNICATION,
    Communication,
    build_skeleton,
    captured_order,
    fingerprint,
    order_digest,
    skeleton_digest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from .config import OverlapConfig
    from .costs import Cost, CostRequest, Machine
    from .graph import Node, OverlapGraph
    from .host import PluginHost
    from .placement import Coalesced, Frame, PeakBound, Plan
    from .ranks import PeerEntry
    from .skeleton import Skeleton

__all__ = [
    "RankView",
    "as_it_came",
    "came_calls",
    "coalesced",
    "describe_bound",
    "describe_error",
    "estimated",
    "find_violation",
    "prepare",
    "propose_plan",
    "reordered",
    "with_costs",
    "with_early_launches",
    "with_late_waits",
    "with_workspaces",
]

logger = logging.getLogger(__name__)

_NO_FAULT = ""
_LONGEST_WHY = 1000
"""Characters of an error that travel to the other ranks."""


@frozen(kw_only=True)
class RankView:
    """What one rank knows before it talks to others. `fault` says why it cannot take part."""

    graph: OverlapGraph
    config: OverlapConfig
    host: PluginHost
    vote: Vote
    fault: str = _NO_FAULT
    skeleton: Skeleton | None = None
    costs: tuple[Cost, ...] = ()
    requests: tuple[CostRequest | None, ...] = ()
    machine: Machine = IDEAL
    frame: Frame | None = None
    """With `calls` its gathers are launch groups of calls, else of single gathers."""
    model: TimelineModel | None = None
    calls: tuple[Coalesced, ...] = ()
    region_bytes: int = 0
    """Bytes of weights in a region; 0: as by default."""
    keep_alone: frozenset[str] = frozenset()
    """Names of launches for which no coalesced call can be made."""
    is_backward: bool = False
    """Of gradients: its reductions leave as early as is legal."""
    peak: PeakBound | None = None
    """Most bytes that may be allocated at once; None: not bounded, or not known."""

    @property
    def bound_bytes(self) -> int:
        """Most bytes of gathered weights that may be in flight."""
        if self.config.max_in_flight_bytes is not None:
            return self.config.max_in_flight_bytes
        region = self.region_bytes or _asked_bytes(self.config)
        gathers = () if self.skeleton is None else self.skeleton.gathers
        return 2 * max(1, largest_region_bytes(self.graph, gathers, region))


def _asked_bytes(config: OverlapConfig) -> int:
    """The size of regions where none was chosen for a graph."""
    return config.coalesce if isinstance(config.coalesce, int) else REGION_BYTES


def prepare(
    graph: OverlapGraph,
    config: OverlapConfig,
    host: PluginHost,
    requests: Sequence[CostRequest | None] | None = None,
    fault: str = _NO_FAULT,
    keep_alone: frozenset[str] = frozenset(),
    is_backward: bool = False,
) -> RankView:
    """Classify, fingerprint and cost one rank's graph. Never raises: a failure becomes `fault`.

    Args:
        graph: this rank's nodes.
        config, host: as on all ranks; both are part of the vote.
        requests: structural keys of the nodes' costs, if somebody knows more than the graph.
        fault: what went wrong before, if anything did.
        keep_alone: names of launches for which no coalesced call can be made.
        is_backward: whether the graph computes gradients, on all ranks or on none.
    """
    names = host.plugin_names()
    digest = registry_digest()
    if digest:
        names = (*names, f"registered ops {digest[:8]}")
    vote = Vote(
        rank=graph.rank,
        can=not fault,
        why=fault,
        config=config.digest(),
        plugins=hashlib.sha256(f"{host.digest()}\0{digest}".encode()).hexdigest(),
        plugin_names=names,
    )
    view = RankView(
        graph=graph,
        config=config,
        host=host,
        vote=vote,
        fault=fault,
        keep_alone=keep_alone,
        is_backward=is_backward,
    )
    if fault:
        return view
    try:
        skeleton, costs = host.bounded(
            lambda: (
                build_skeleton(graph, host.classify),
                resolve_costs(graph, host.measure_cost, requests),
            )
        )
        return evolve(
            view,
            skeleton=skeleton,
            costs=costs,
            requests=() if requests is None else tuple(requests),
            frame=build_frame(graph, skeleton),
            model=TimelineModel(graph, skeleton, costs),
            peak=bound_peak(graph, config.max_peak_growth),
            vote=evolve(
                vote,
                fingerprint=fingerprint(graph),
                skeleton=skeleton_digest(skeleton.entries),
                order=order_digest(captured_order(graph, skeleton)),
                entries=len(skeleton.entries),
                weight_gathers=len(skeleton.gathers),
            ),
        )
    except Exception as error:
        why = describe_error(error)
        requests = () if requests is None else tuple(requests)
        return evolve(view, fault=why, requests=requests, vote=evolve(vote, can=False, why=why))


def estimated(view: RankView, agreed: Collection[PeerEntry]) -> RankView:
    """The view without faults, for a rank that must follow what was agreed.

    Plugins that failed are not asked again. An op that communicates in an earlier graph does so.

    Args:
        view: of one rank.
        agreed: entries of an earlier graph.

    Raises:
        OverlapError: not even the built-in plugins can say what the graph is.
    """
    if view.skeleton is not None:
        return view
    entries = {entry.op: entry for entry in agreed}
    host = view.host.builtins()

    def classify(node: Node) -> Communication | None:
        answer = host.classify(node)
        known = None if node.kind is NodeKind.WAIT else entries.get(node.op)
        if known is None:
            return answer
        answer = answer or Communication(groups=() if node.group is None else (node.group,))
        return evolve(answer, issues=True, comparable=known.comparable)

    costs = resolve_costs(view.graph, host.measure_cost, view.requests or None)
    peak = bound_peak(view.graph, view.config.max_peak_growth)
    view = evolve(view, host=host, costs=costs, peak=peak)
    return _with_skeleton(view, build_skeleton(view.graph, classify))


def with_gathers(view: RankView, positions: Collection[int]) -> RankView:
    """The view with gathers that count as weight gathers, though they look like none here."""
    assert view.skeleton is not None
    answers = {view.graph.nodes[p].name: said for p, said in view.skeleton.communication.items()}
    skeleton = build_skeleton(view.graph, lambda node: answers.get(node.name), positions)
    return _with_skeleton(view, skeleton)


def _with_skeleton(view: RankView, skeleton: Skeleton) -> RankView:
    return evolve(
        view,
        skeleton=skeleton,
        frame=build_frame(view.graph, skeleton),
        model=TimelineModel(view.graph, skeleton, view.costs, view.machine),
    )


def with_costs(view: RankView, costs: tuple[Cost, ...], machine: Machine) -> RankView:
    """The view with other costs."""
    assert view.skeleton is not None
    model = TimelineModel(view.graph, view.skeleton, costs, machine)
    return evolve(view, costs=costs, machine=machine, model=model)


def with_workspaces(view: RankView, workspace_bytes: Callable[[str], int]) -> RankView:
    """The view with what opaque ops allocate, beside what they make, while they run.

    Args:
        workspace_bytes: of an op, by the digest of its structural key.
    """
    nbytes = {
        position: found
        for position, request in enumerate(view.requests)
        if request is not None and request.kind == NodeKind.OPAQUE
        if (found := workspace_bytes(request_digest(request)))
    }
    if view.peak is None or not nbytes:
        return view
    memory = view.peak.memory.with_workspaces(nbytes)
    return evolve(view, peak=bound_peak(view.graph, view.config.max_peak_growth, memory))


def coalesced(view: RankView, labels: Sequence[int], region_bytes: int = 0) -> RankView:
    """The view with gathers of one label as one call.

    Args:
        view: in which each gather is alone.
        labels: one a gather, from `placement.units`.
        region_bytes: the size of region that the labels were made for, for the memory bound;
            0, not known, as where ranks agreed on an earlier graph: no smaller than any call.
    """
    assert view.skeleton is not None
    gathers = join(view.skeleton.gathers, labels)
    calls = calls_of(view.graph, view.skeleton, gathers, view.costs)
    nbytes = [sum(view.graph.nodes[p].nbytes or 0 for p in call.launches) for call in calls]
    return evolve(
        view,
        frame=build_frame(view.graph, view.skeleton, gathers),
        model=TimelineModel(view.graph, view.skeleton, view.costs, view.machine, calls),
        calls=calls,
        region_bytes=region_bytes or max(_asked_bytes(view.config), *nbytes, 0),
    )


def reordered(view: RankView, order: tuple[int, ...]) -> RankView:
    """The view as if program order had been `order`, a legal order of its positions."""
    assert view.skeleton is not None
    graph = evolve(view.graph, nodes=tuple(view.graph.nodes[p] for p in order))
    known = {view.graph.nodes[p].name: c for p, c in view.skeleton.communication.items()}
    skeleton = build_skeleton(graph, lambda node: known.get(node.name, NO_COMMUNICATION))
    costs = tuple(view.costs[p] for p in order)
    return evolve(
        view,
        graph=graph,
        skeleton=skeleton,
        costs=costs,
        requests=tuple(view.requests[p] for p in order) if view.requests else (),
        frame=build_frame(graph, skeleton),
        model=TimelineModel(graph, skeleton, costs, view.machine),
        peak=view.peak and evolve(view.peak, memory=view.peak.memory.in_order(order)),
        vote=evolve(
            view.vote,
            fingerprint=fingerprint(graph),
            skeleton=skeleton_digest(skeleton.entries),
            order=order_digest(captured_order(graph, skeleton)),
        ),
    )


def propose_plan(view: RankView, *, pinned: bool) -> Plan:
    """Where this rank would launch each gather, after every policy had its say.

    Raises:
        PluginError: from a policy.
    """
    assert view.skeleton is not None
    assert view.frame is not None
    plan = propose(
        view.graph,
        view.skeleton,
        view.frame,
        view.costs,
        view.config,
        pinned=pinned,
        calls=view.calls,
        machine=view.machine,
        bound_bytes=view.bound_bytes,
        peak=view.peak,
    )
    return align(view.host.adjust_plan(plan, view.graph), view.frame)


def with_early_launches(view: RankView) -> tuple[RankView, tuple[int, ...]]:
    """The view with reductions of gradients launched as early as is legal, in the same sequence.

    Returns:
        The view, and its program order as positions of the given one; empty if nothing moved.
        Never raises: what fails on one rank keeps its reductions where they are.
    """
    program = tuple(range(len(view.graph.nodes)))
    if view.skeleton is None or not view.is_backward:
        return view, ()
    try:
        order = launch_early(view.graph, view.skeleton)
        if order == program:
            return view, ()
        # Checked here, since the graph in another order takes that one for what must be kept.
        if problem := find_violation(view.graph, order):
            raise IllegalOrderError(f"the order has {problem}")
        return reordered(view, order), order
    except Exception as error:
        logger.warning("reductions are launched where they were: %s", describe_error(error))
        return view, ()


def with_late_waits(view: RankView, order: tuple[int, ...]) -> tuple[int, ...]:
    """An order in which reductions are waited for no earlier than their time needs.

    Where that would break the bound on the peak of memory, waits stay where they are.

    Never raises: what fails on one rank leaves its waits where they are.
    """
    assert view.skeleton is not None
    try:
        late = wait_late(
            view.graph,
            view.skeleton,
            view.costs,
            order,
            bound_bytes=view.bound_bytes,
            slack_ns=view.config.slack_ns,
            contention=contention_of(view.config, view.machine),
            model=view.model,
        )
        return late if late == order or _fits_peak(view, late, order) else order
    except Exception as error:
        logger.warning("reductions are waited for where they were: %s", describe_error(error))
        return order


def _fits_peak(view: RankView, order: tuple[int, ...], instead_of: tuple[int, ...]) -> bool:
    """Whether an order keeps the bound on the peak of memory, or allocates no more than another."""
    if view.peak is None:
        return True
    memory = view.peak.memory
    needed = peak_bytes(view.graph, order, memory)
    return needed <= max(view.peak.nbytes, peak_bytes(view.graph, instead_of, memory))


def as_it_came(came: RankView, view: RankView, base: tuple[int, ...]) -> RankView:
    """What a view holds, in terms of the program order that a rank came with.

    Args:
        came: the view before it was reordered.
        view: the one after.
        base: program order of `view` as positions of `came`; empty: the same.
    """
    if not base:
        return view
    assert came.skeleton is not None
    by_position = dict(zip(base, view.costs, strict=True))
    costs = tuple(by_position[position] for position in range(len(base)))
    calls = came_calls(view, base)
    model = TimelineModel(came.graph, came.skeleton, costs, view.machine, calls)
    return evolve(
        came,
        costs=costs,
        machine=view.machine,
        model=model,
        calls=calls,
        region_bytes=view.region_bytes,
    )


def came_calls(view: RankView, base: tuple[int, ...]) -> tuple[Coalesced, ...]:
    """The calls of a view by positions of what it was reordered from; see `as_it_came`."""
    if not base:
        return view.calls
    return tuple(
        evolve(call, launches=tuple(base[launch] for launch in call.launches))
        for call in view.calls
    )


def describe_bound(
    view: RankView, plan: Plan, order: tuple[int, ...], *, pinned: bool
) -> list[str]:
    """What the bound on memory costs, in one sentence; nothing if it holds no gather back."""
    assert view.frame is not None
    assert view.model is not None
    held = [p for p in plan.placements if p.verdict is Verdict.MEMORY_LIMITED]
    if not held:
        return []
    config = evolve(view.config, max_in_flight_bytes=sys.maxsize)
    unbound = evolve(view, config=config, peak=None)
    free = propose_plan(unbound, pinned=pinned).placements
    order_without = rebuild_order(view.frame, [placement.boundary for placement in free])
    cost_ns = view.model.run(order).total_ns - view.model.run(order_without).total_ns
    sentence = (
        f"memory: {counted(len(held), 'launch', 'launches')} held back, so that at most "
        f"{bytes_in_words(view.bound_bytes)} of gathered weights are in flight"
    )
    limits, names = "bound", "max_in_flight_bytes"
    if view.peak is not None:
        grown = bytes_in_words(view.peak.growth_bytes)
        sentence += f" and the peak of memory grows by at most {grown}"
        limits, names = "bounds", f"{names}, max_peak_growth"
    sentence += (
        f"; without the {limits} the step is predicted to take "
        f"{max(0, cost_ns) / 1000:.0f} µs less ({names})"
    )
    return [sentence]


def find_violation(graph: OverlapGraph, order: tuple[int, ...]) -> str:
    """The first two nodes that an order has the wrong way round, in words; "" if it is legal."""
    violation = first_violation(graph.predecessors, order)
    if violation is None:
        return ""
    early, late = (graph.nodes[position].name for position in violation)
    return f"{late!r} before {early!r}"


def describe_error(error: Exception) -> str:
    """An error in words that may travel to other ranks."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _LONGEST_WHY else f"{text[: _LONGEST_WHY - 3]}..."
