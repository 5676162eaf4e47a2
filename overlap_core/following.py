"""Ordering a graph alone, as the ranks agreed for an earlier graph of the same skeleton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from .errors import DivergenceError, IllegalOrderError
from .graph import first_violation
from .placement import Plan, align, follow_slots, propose, rebuild_order
from .ranks import Agreement, Mode, ModeDecision
from .verdicts import describe_gathers

if TYPE_CHECKING:
    from .outcome import RankOutcome
    from .pipeline import RankView

__all__ = ["agreement_of", "follow"]

_ALONE = "compiled alone: follows what was agreed for an earlier graph"


def agreement_of(outcome: RankOutcome) -> Agreement:
    """What an outcome means for later graphs of the same skeleton."""
    ordinals = {entry.node: entry.ordinal for entry in outcome.skeleton}
    return Agreement(
        mode=outcome.mode,
        why=outcome.why,
        scope=outcome.scope,
        sequence=[ordinals[name] for name in outcome.collectives] if outcome.committed else (),
        lasting=outcome.committed or outcome.lasting,
    )


def follow(view: RankView, agreement: Agreement) -> RankOutcome:
    """Order one rank's graph as agreed, without asking anybody.

    Communication comes in just the agreed sequence; where in its slot a gather is launched is
    decided by this rank's own costs.

    Args:
        view: of a graph whose skeleton has the structure that the agreement is about.
        agreement: from an earlier graph, perhaps of an earlier run of the job.

    Raises:
        DivergenceError: this graph cannot be brought into the agreed sequence, and program order
            is another one. Peers may run the agreed one already.
    """
    decision = ModeDecision(mode=agreement.mode, why=agreement.why)
    nodes = range(len(view.graph.nodes))
    plan, order = Plan(), tuple(nodes)
    if agreement.mode is not Mode.ABORT:
        try:
            plan, order = _place(view, agreement)
        except Exception as error:
            if _needs_moves(agreement):
                raise DivergenceError(
                    f"rank {view.graph.rank} cannot order a graph that it compiles again as the "
                    f"ranks agreed ({agreement.why}): {type(error).__name__}: {error}. Its peers "
                    "may run the agreed order already, and another one would make them wait for "
                    "each other for ever. Switch the pass off on all ranks with OVERLAP_CORE=0, "
                    "and report this"
                ) from error
            decision = ModeDecision(mode=Mode.ABORT, why=f"{type(error).__name__}: {error}")
            plan, order = Plan(), tuple(nodes)
    outcome = describe_gathers(
        view,
        agreement.scope,
        (view.vote,),
        decision,
        plan,
        order,
        committed=decision.mode is not Mode.ABORT,
    )
    return evolve(outcome, notes=(*outcome.notes, _ALONE))


def _needs_moves(agreement: Agreement) -> bool:
    """Whether the agreed sequence is another one than that of program order."""
    return list(agreement.sequence) != sorted(agreement.sequence)


def _place(view: RankView, agreement: Agreement) -> tuple[Plan, tuple[int, ...]]:
    skeleton, frame = view.skeleton, view.frame
    if skeleton is None or frame is None:
        raise IllegalOrderError(view.fault or "the graph has no skeleton")
    pinned = agreement.mode is Mode.PINNED
    plan = propose(view.graph, skeleton, frame, view.costs, view.config, pinned=pinned)
    plan = align(view.host.adjust_plan(plan, view.graph), frame)
    expected = agreement.sequence or tuple(range(len(skeleton.entries)))
    if not pinned:
        plan = follow_slots(plan, frame, _slots(view, expected))
    order = rebuild_order(frame, tuple(placement.boundary for placement in plan.placements))
    violation = first_violation(view.graph.predecessors, order)
    if violation is not None:
        early, late = (view.graph.nodes[position].name for position in violation)
        raise IllegalOrderError(f"the agreed order has {late!r} before {early!r}")
    ordinal = {position: i for i, position in enumerate(skeleton.positions)}
    sequence = tuple(ordinal[position] for position in order if position in ordinal)
    if sequence != expected:
        raise IllegalOrderError("the rebuilt order has another sequence of communication")
    return plan, order


def _slots(view: RankView, sequence: tuple[int, ...]) -> list[int]:
    """For each gather, in program order, how many fixed entries the sequence has before it."""
    assert view.skeleton is not None
    moving = {entry.ordinal for entry in view.skeleton.entries if entry.weight_gather}
    slots: dict[int, int] = {}
    passed = 0
    for ordinal in sequence:
        if ordinal in moving:
            slots[ordinal] = passed
        else:
            passed += 1
    return [slots[ordinal] for ordinal in sorted(slots)]
