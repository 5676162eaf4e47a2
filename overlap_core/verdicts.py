"""Why each gather is where it is, and why ranks cannot agree, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ._words import bytes_apart_in_words, bytes_in_words, counted
from .graph import first_violation
from .outcome import GatherOutcome, RankOutcome
from .placement import Verdict
from .placement.memory import bytes_if_earlier
from .ranks import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .graph import LaunchGroup
    from .placement import Coalesced, GatherPlacement, Plan
    from .ranks import ModeDecision, Proposal, Vote
    from .views import RankView

__all__ = ["describe_outcome", "find_conflict", "join_refusals"]

_HIDDEN_SHARE = 0.05
"""A gather with at most this share of its time exposed counts as hidden."""


def describe_outcome(
    view: RankView,
    scope: tuple[int, ...],
    votes: tuple[Vote, ...],
    decision: ModeDecision,
    plan: Plan,
    order: tuple[int, ...],
    *,
    committed: bool,
) -> RankOutcome:
    """The outcome of one rank. Never raises: what was decided stands, in words or without."""
    skeleton = view.skeleton
    issuing = () if skeleton is None else frozenset(skeleton.positions)
    outcome = RankOutcome(
        rank=view.graph.rank,
        scope=scope,
        mode=decision.mode,
        why=decision.why,
        order=tuple(view.graph.nodes[position].name for position in order),
        collectives=tuple(view.graph.nodes[p].name for p in order if p in issuing),
        gathers=(),
        legal=True,
        committed=committed,
        votes=votes,
        skeleton=() if skeleton is None else skeleton.entries,
        fingerprint=view.vote.fingerprint,
        graph=view.graph,
        costs=view.costs,
        requests=view.requests,
        machine=view.machine,
        coalesced=view.calls,
    )
    try:
        return _with_gathers(outcome, view, decision, plan, order)
    except Exception as error:
        note = f"the outcome could not be described: {type(error).__name__}: {error}"
        return evolve(outcome, notes=(note,))


def _with_gathers(
    outcome: RankOutcome,
    view: RankView,
    decision: ModeDecision,
    plan: Plan,
    order: tuple[int, ...],
) -> RankOutcome:
    """The outcome with what became of each gather, and predicted times before and after."""
    graph, skeleton = view.graph, view.skeleton
    gathers: list[GatherOutcome] = []
    total_before = total_after = 0
    if skeleton is not None and view.model is not None:
        program = tuple(range(len(graph.nodes)))
        before = view.model.program_order
        after = before if order == program and not view.calls else view.model.run(order)
        total_before, total_after = before.total_ns, after.total_ns
        place = {position: spot for spot, position in enumerate(order)}
        issuing = set(skeleton.positions)
        fixed = issuing - {group.launch for group in skeleton.gathers}
        slots: dict[int, int] = {}
        passed = 0
        for position in order:
            slots[position] = passed
            passed += position in fixed
        placed = _placements(plan) if outcome.committed else {}
        crowds = _crowds(view, plan)
        calls = {p: number for number, call in enumerate(view.calls) for p in call.launches}
        for group in skeleton.gathers:
            number = calls.get(group.launch)
            call = None if number is None else view.calls[number]
            verdict, why = _judge(
                view,
                group,
                call,
                decision,
                placed.get(graph.nodes[group.launch].name),
                crowds,
                place,
                after.exposed_ns.get(group.launch, 0),
            )
            gathers.append(
                GatherOutcome(
                    name=graph.nodes[group.launch].name,
                    source=group.launch,
                    target=place[group.launch],
                    slot=slots[group.launch],
                    verdict=str(verdict),
                    why=why + _company(call),
                    exposed_ns_before=before.exposed_ns.get(group.launch, 0),
                    exposed_ns_after=after.exposed_ns.get(group.launch, 0),
                    call=number,
                )
            )
    return evolve(
        outcome,
        gathers=tuple(gathers),
        legal=_is_legal(view, order),
        total_ns_before=total_before,
        total_ns_after=total_after,
    )


def _placements(plan: Plan) -> dict[str, GatherPlacement]:
    """The placement of each gather by name; those of one call share one."""
    return {
        name: placement
        for placement in plan.placements
        for name in placement.coalesced or (placement.gather,)
    }


def _crowds(view: RankView, plan: Plan) -> dict[int, str]:
    """By ordinal of a placement, what would be in flight if it were any earlier, in words."""
    bound_bytes, index = view.bound_bytes, view.graph.index
    if all(placement.verdict is not Verdict.MEMORY_LIMITED for placement in plan.placements):
        return {}
    sizes = [
        sum(view.graph.nodes[index[name]].nbytes or 0 for name in p.coalesced or (p.gather,))
        for p in plan.placements
    ]
    given = view.config.max_in_flight_bytes is not None
    whence = "max_in_flight_bytes" if given else "twice the largest region"
    crowds = {}
    for placement, nbytes in zip(
        plan.placements, bytes_if_earlier(sizes, bound_bytes), strict=True
    ):
        if placement.by_peak and view.peak is not None:
            grown = bytes_in_words(view.peak.growth_bytes)
            crowds[placement.ordinal] = (
                f"held by memory: the peak would grow by more than {grown} (max_peak_growth)"
            )
        elif nbytes:
            wanted, allowed = bytes_apart_in_words(nbytes, bound_bytes)
            crowds[placement.ordinal] = (
                f"held by memory: {wanted} would be in flight of {allowed} allowed ({whence})"
            )
    return crowds


def _is_legal(view: RankView, order: tuple[int, ...]) -> bool:
    complete = sorted(order) == list(range(len(view.graph.nodes)))
    return complete and first_violation(view.graph.predecessors, order) is None


def _judge(
    view: RankView,
    group: LaunchGroup,
    call: Coalesced | None,
    decision: ModeDecision,
    placement: GatherPlacement | None,
    crowds: dict[int, str],
    place: dict[int, int],
    exposed_ns: int,
) -> tuple[Verdict, str]:
    """A verdict, and what a reader can do with it."""
    duration_ns = (view.costs[group.launch].ns or 0) if call is None else call.ns
    moved = place[group.launch] < group.launch
    if placement is None:
        return Verdict.UNMOVED, f"program order was kept: {decision.why}"
    passed = group.launch - place[group.launch]
    if exposed_ns <= duration_ns * _HIDDEN_SHARE:
        if moved:
            nodes = counted(passed, "node")
            return Verdict.HIDDEN, f"launched {nodes} earlier, behind enough compute"
        return Verdict.HIDDEN, "enough compute lies between launch and wait as it is"
    proposed = placement.verdict
    left = f"{exposed_ns / 1000:.0f} of {duration_ns / 1000:.0f} µs stay exposed"
    if placement.why:  # a policy held it back, and says so
        return (Verdict.COMPUTE_LIMITED if moved else Verdict.UNMOVED), f"{left}: {placement.why}"
    if proposed is Verdict.MEMORY_LIMITED and placement.ordinal in crowds:
        return proposed, f"{left}: {crowds[placement.ordinal]}"
    if proposed is Verdict.PINNED or (decision.mode is Mode.PINNED and _stopped(view, group)):
        return Verdict.PINNED, f"{left}: it may not pass any communication ({decision.why})"
    if place[group.launch] <= len(group.members):
        return Verdict.COMPUTE_LIMITED, f"{left}: nothing to hide behind at the head of the graph"
    if not moved:
        return Verdict.UNMOVED, f"{left}: an earlier launch is not legal or would not help"
    return Verdict.COMPUTE_LIMITED, f"{left}: too little compute before its wait"


def _company(call: Coalesced | None) -> str:
    if call is None:
        return ""
    others = len(call.launches) - 1
    return "; in one call with " + ("another gather" if others == 1 else f"{others} others")


def _stopped(view: RankView, group: LaunchGroup) -> bool:
    frame = view.frame
    if frame is None:
        return False
    return frame.slot_start(frame.slot(frame.boundary_of[group.launch])) > 0


def join_refusals(scope: Sequence[int], answers: Sequence[tuple[bool, str]]) -> str:
    """Which ranks of a scope said no, and why; empty if none did.

    Args:
        scope: the ranks.
        answers: of each rank, whether it can and why not.
    """
    reasons = [
        f"rank {rank} cannot: {why}"
        for rank, (ok, why) in zip(scope, answers, strict=True)
        if not ok
    ]
    more = f" (and {len(reasons) - 4} more ranks)" if len(reasons) > 4 else ""
    return "; ".join(reasons[:4]) + more


def find_conflict(scope: Sequence[int], proposals: Sequence[Proposal]) -> str:
    """Why the proposals of a scope's ranks can't be reconciled; empty if they can."""
    chosen = {p.mode: rank for p, rank in zip(reversed(proposals), reversed(scope), strict=True)}
    if len(chosen) > 1:
        words = ", ".join(f"{mode} (rank {rank})" for mode, rank in sorted(chosen.items()))
        return f"the mode ladder is not the same function on all ranks: {words}"
    lengths = {len(p.units) for p in proposals}
    return "ranks propose different numbers of gathers" if len(lengths) > 1 else ""
