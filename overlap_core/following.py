"""Ordering a graph alone, as the ranks agreed for an earlier graph of the same skeleton."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import evolve

from .errors import DivergenceError, IllegalOrderError
from .graph import restore_order
from .placement import (
    Plan,
    cut_illegal,
    follow_slots,
    rebuild_order,
    stand_still,
)
from .ranks import Agreement, Mode, ModeDecision
from .skeleton import arrange, captured_order, structure_digest
from .verdicts import describe_outcome
from .views import (
    as_it_came,
    coalesced,
    find_violation,
    propose_plan,
    reordered,
    with_early_launches,
    with_late_waits,
)

if TYPE_CHECKING:
    from .graph import OverlapGraph
    from .outcome import RankOutcome
    from .placement import Frame
    from .skeleton import Skeleton
    from .views import RankView

__all__ = ["agreement_of", "follow", "structure_of"]

logger = logging.getLogger(__name__)

_ALONE = "compiled alone: follows what was agreed for an earlier graph"


def structure_of(graph: OverlapGraph, skeleton: Skeleton) -> str:
    """Digest of what graphs have in common that share an agreement.

    Taken in captured order where that is known, so that it doesn't matter how Inductor has ordered
    this graph.
    """
    return structure_digest(arrange(skeleton.entries, _canonical(graph, skeleton)))


def agreement_of(view: RankView, outcome: RankOutcome) -> Agreement:
    """What an outcome means for later graphs of the same structure."""
    sequence: list[int] = []
    calls: list[list[int]] = []
    if view.skeleton is not None:
        names = [entry.node for entry in view.skeleton.entries]
        place = {names[o]: i for i, o in enumerate(_canonical(view.graph, view.skeleton))}
        issued = set(names)
        sequence = [place[name] for name in outcome.order if name in issued]
        nodes = view.graph.nodes
        calls = [[place[nodes[p].name] for p in call.launches] for call in outcome.coalesced]
    return Agreement(
        mode=outcome.mode,
        why=outcome.why,
        scope=outcome.scope,
        sequence=sequence,
        calls=calls,
        lasting=outcome.committed or outcome.lasting,
    )


def follow(view: RankView, agreement: Agreement) -> RankOutcome:
    """Order one rank's graph as agreed, without asking anybody.

    Communication comes in just the agreed sequence; where between its neighbours a gather is
    launched is decided by this rank's own costs.

    Args:
        view: of a graph of the structure that the agreement is about.
        agreement: from an earlier graph, perhaps of an earlier run of the job.

    Raises:
        DivergenceError: this graph cannot be brought into the sequence on which the ranks agreed,
            and program order is another one. Peers may run the agreed one already.
    """
    decision = ModeDecision(mode=agreement.mode, why=agreement.why)
    order = program = tuple(range(len(view.graph.nodes)))
    plan, notes = Plan(), [_ALONE]
    try:
        view, plan, order = _order(view, agreement)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if agreement.mode is not Mode.ABORT and not _is_program_order(view, agreement):
            raise DivergenceError(
                f"rank {view.graph.rank} cannot order a graph that it compiles again as the ranks "
                f"agreed ({agreement.why}): {problem}. Its peers may run the agreed order "
                "already, and another one would make them wait for each other for ever. Switch "
                "the pass off on all ranks with OVERLAP_CORE=0, and report this"
            ) from error
        decision = ModeDecision(mode=Mode.ABORT, why=problem)
        notes = [f"compiled alone and left in program order: {problem}"]
    outcome = describe_outcome(
        view,
        agreement.scope,
        (view.vote,),
        decision,
        plan,
        order,
        committed=decision.mode is not Mode.ABORT or order != program,
    )
    return evolve(outcome, notes=(*outcome.notes, *notes))


def _canonical(graph: OverlapGraph, skeleton: Skeleton) -> tuple[int, ...]:
    """Ordinals of the entries in an order that graphs of one structure share."""
    return captured_order(graph, skeleton) or tuple(range(len(skeleton.entries)))


def _wanted(view: RankView, agreement: Agreement) -> tuple[int, ...]:
    """The agreed sequence in this graph's own ordinals."""
    if view.skeleton is None:
        raise IllegalOrderError(view.fault or "the graph has no skeleton")
    entries = len(view.skeleton.entries)
    if not agreement.sequence:
        return tuple(range(entries))
    if sorted(agreement.sequence) != list(range(entries)):
        raise IllegalOrderError("the agreement is about a skeleton of another length")
    canonical = _canonical(view.graph, view.skeleton)
    return tuple(canonical[place] for place in agreement.sequence)


def _is_program_order(view: RankView, agreement: Agreement) -> bool:
    """Whether the agreed sequence is that of this graph's program order."""
    if agreement.calls:
        return False
    if view.skeleton is None:
        return list(agreement.sequence) == sorted(agreement.sequence)
    try:
        wanted = _wanted(view, agreement)
    except IllegalOrderError:
        return False
    return wanted == tuple(range(len(wanted)))


def _order(view: RankView, agreement: Agreement) -> tuple[RankView, Plan, tuple[int, ...]]:
    """This graph in the agreed sequence: its calls, where they are, and the order of positions."""
    wanted = _wanted(view, agreement)
    assert view.skeleton is not None
    canonical = _canonical(view.graph, view.skeleton)
    calls = [[canonical[place] for place in call] for call in agreement.calls]
    moving = {entry.ordinal for entry in view.skeleton.entries if entry.weight_gather}
    fixed = [ordinal for ordinal in wanted if ordinal not in moving]
    if fixed != sorted(fixed) or not _ascends(wanted, moving, calls):
        return _restore(view, wanted, calls)
    if agreement.mode is Mode.ABORT:
        if wanted != tuple(range(len(wanted))):
            raise IllegalOrderError("nothing was agreed that would move gathers")
        return view, Plan(), tuple(range(len(view.graph.nodes)))
    try:
        return _hoist(view, wanted, calls, pinned=agreement.mode is Mode.PINNED)
    except IllegalOrderError as error:
        logger.debug("more than gathers moves into the agreed sequence: %s", error)
        return _restore(view, wanted, calls)


def _hoist(
    view: RankView, wanted: tuple[int, ...], calls: list[list[int]], *, pinned: bool
) -> tuple[RankView, Plan, tuple[int, ...]]:
    """The agreed sequence by moving gathers up."""
    assert view.skeleton is not None
    positions = view.skeleton.positions
    early, base = with_early_launches(view)
    place = {position: spot for spot, position in enumerate(base)}
    launches = [[place.get(positions[o], positions[o]) for o in call] for call in calls]
    early = _with_calls(early, launches)
    plan, order = _place(early, wanted, pinned=pinned)
    if base:
        order = tuple(base[position] for position in order)
    return as_it_came(view, early, base), plan, order


def _restore(
    view: RankView, wanted: tuple[int, ...], calls: list[list[int]]
) -> tuple[RankView, Plan, tuple[int, ...]]:
    """The agreed sequence where Inductor has ordered this graph otherwise than the earlier one."""
    assert view.skeleton is not None
    assert view.frame is not None
    positions = view.skeleton.positions
    restored = restore_order(view.graph.predecessors, [positions[o] for o in wanted])
    if restored is None:
        raise IllegalOrderError("its dependencies contradict the agreed sequence")
    place = {position: spot for spot, position in enumerate(restored)}
    anew = _with_calls(
        reordered(view, restored), [[place[positions[o]] for o in call] for call in calls]
    )
    _, order = _place(anew, tuple(range(len(wanted))), pinned=True)
    order = tuple(restored[position] for position in order)
    plan = stand_still(view.graph, view.frame)
    return as_it_came(view, anew, restored), plan, order


def _with_calls(view: RankView, calls: list[list[int]]) -> RankView:
    """The view with launches, given by position, as the coalesced calls that were agreed on."""
    if not calls:
        return view
    assert view.skeleton is not None
    assert view.frame is not None
    number = {group.launch: i for i, group in enumerate(view.skeleton.gathers)}
    labels = list(range(len(number)))
    for call in calls:
        if not number.keys() >= set(call):
            raise IllegalOrderError("a coalesced call holds a node that is no weight gather here")
        members = [number[launch] for launch in call]
        if any(view.graph.nodes[launch].name in view.keep_alone for launch in call):
            raise IllegalOrderError("a gather cannot be coalesced here")
        for member in members:
            labels[member] = min(members)
    if cut_illegal(labels, view.frame, ()) != tuple(labels):
        raise IllegalOrderError("gathers that were coalesced cannot be launched together here")
    return coalesced(view, labels)


def _ascends(wanted: tuple[int, ...], moving: set[int], calls: list[list[int]]) -> bool:
    """Whether gathers come in program order, those of a call where its first one is."""
    later = {ordinal for call in calls for ordinal in call[1:]}
    gathers = [ordinal for ordinal in wanted if ordinal in moving and ordinal not in later]
    return gathers == sorted(gathers) and all(call == sorted(call) for call in calls)


def _place(
    view: RankView, wanted: tuple[int, ...], *, pinned: bool
) -> tuple[Plan, tuple[int, ...]]:
    """Move gathers only, to where the sequence has them."""
    skeleton, frame = view.skeleton, view.frame
    if skeleton is None or frame is None:
        raise IllegalOrderError(view.fault or "the graph has no skeleton")
    plan = propose_plan(view, pinned=pinned)
    if not pinned:
        plan = follow_slots(plan, frame, _slots(skeleton, frame, wanted))
    order = rebuild_order(frame, tuple(placement.boundary for placement in plan.placements))
    order = with_late_waits(view, order)
    if problem := find_violation(view.graph, order):
        raise IllegalOrderError(f"the agreed order has {problem}")
    ordinal = {position: i for i, position in enumerate(skeleton.positions)}
    if tuple(ordinal[position] for position in order if position in ordinal) != wanted:
        raise IllegalOrderError("the rebuilt order has another sequence of communication")
    return plan, order


def _slots(skeleton: Skeleton, frame: Frame, wanted: tuple[int, ...]) -> list[int]:
    """For each gather of the frame how many fixed entries the sequence has before it."""
    moving = {entry.ordinal for entry in skeleton.entries if entry.weight_gather}
    slots: dict[int, int] = {}
    passed = 0
    for ordinal in wanted:
        if ordinal in moving:
            slots[skeleton.positions[ordinal]] = passed
        else:
            passed += 1
    return [slots[group.launch] for group in frame.gathers]
