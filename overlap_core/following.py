"""Ordering a graph alone, as the ranks agreed for an earlier graph of the same skeleton."""

from __future__ import annotations

import logging
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import evolve

from .errors import DivergenceError, IllegalOrderError, PluginError
from .graph import restore_order
from .pipeline import RESTORED
from .placement import (
    Plan,
    cut_illegal,
    follow_slots,
    rebuild_order,
    stand_still,
)
from .ranks import Agreement, Mode, ModeDecision, PeerEntry, PeerSkeleton, align
from .skeleton import captured_order, describe_entry
from .verdicts import describe_outcome
from .views import (
    as_it_came,
    coalesced,
    estimated,
    find_violation,
    propose_plan,
    reordered,
    with_early_launches,
    with_gathers,
    with_late_waits,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .graph import OverlapGraph
    from .outcome import RankOutcome
    from .placement import Frame
    from .ranks import Alignment
    from .skeleton import Skeleton
    from .views import RankView

__all__ = [
    "agreement_of",
    "choose_agreement",
    "describe_new",
    "follow",
    "peer_skeleton_of",
    "recognize",
]

logger = logging.getLogger(__name__)

_ALONE = "compiled alone: follows what was agreed for an earlier graph"


def peer_skeleton_of(
    graph: OverlapGraph, skeleton: Skeleton
) -> tuple[PeerSkeleton, tuple[int, ...]]:
    """What peers notice of a graph's communication, and each entry's ordinal in program order.

    In captured order where that is known, so that it doesn't matter how Inductor has ordered this
    graph.
    """
    nodes = [graph.nodes[position] for position in skeleton.positions]
    ranks_of = {node.group: node.group_ranks for node in nodes if node.group_ranks is not None}
    groups: dict[str, int] = {}
    entries, ordinals = [], []
    for ordinal in _canonical(graph, skeleton):
        entry, node = skeleton.entries[ordinal], nodes[ordinal]
        answer = skeleton.communication[skeleton.positions[ordinal]]
        names = answer.groups or (() if node.group is None else (node.group,)) or ("",)
        if all(len(ranks_of.get(name) or ()) == 1 for name in names):
            continue
        for name in names:
            if name not in groups:
                groups[name] = len(groups)
        entries.append(
            PeerEntry(
                op=entry.op,
                dtypes=entry.dtypes,
                groups=tuple(groups[name] for name in names),
                comparable=entry.comparable,
            )
        )
        ordinals.append(ordinal)
    noticed = PeerSkeleton(
        entries=tuple(entries),
        groups=tuple(ranks_of.get(name) or () for name in groups),
        names=tuple(groups),
    )
    return noticed, tuple(ordinals)


def agreement_of(view: RankView, outcome: RankOutcome) -> Agreement:
    """What an outcome means for later graphs of the same function."""
    noticed = PeerSkeleton()
    sequence: list[int] = []
    calls: list[list[int]] = []
    moved = False
    if view.skeleton is not None:
        noticed, ordinals = peer_skeleton_of(view.graph, view.skeleton)
        names = [entry.node for entry in view.skeleton.entries]
        place = {names[ordinal]: i for i, ordinal in enumerate(ordinals)}
        sequence = [place[name] for name in outcome.order if name in place]
        nodes = view.graph.nodes
        named = [[nodes[p].name for p in call.launches] for call in outcome.coalesced]
        calls = [[place[name] for name in call] for call in named if place.keys() >= set(call)]
        moved = bool(calls) or sequence != [place[name] for name in names if name in place]
        alike = len({vote.skeleton for vote in outcome.votes}) == 1
        # Who gave up midway never heard that skeletons are alike once an order is restored.
        alike = alike or outcome.why.startswith(RESTORED)
        if not moved and not (outcome.committed and alike):
            # No rank moved anything: later graphs stay as they are.
            sequence = []
    return Agreement(
        mode=outcome.mode,
        why=outcome.why,
        scope=outcome.scope,
        skeleton=noticed,
        sequence=sequence,
        calls=calls,
        moved=moved,
        lasting=outcome.committed or outcome.lasting,
    )


def recognize(view: RankView, agreements: Sequence[Agreement]) -> RankView:
    """The view with a skeleton though it has a fault, as far as one can be had.

    By that a rank with a fault meets those that compile the same, and finds what came of it.

    Args:
        view: of the graph that this rank compiles.
        agreements: all that were made for its function.
    """
    if view.skeleton is not None or not view.graph.nodes:
        return view
    try:
        return estimated(view, [e for agreed in agreements for e in agreed.skeleton.entries])
    except Exception as error:
        logger.debug("not even a skeleton is known: %s", error)
        return view


def choose_agreement(view: RankView, agreements: Sequence[Agreement]) -> Agreement | None:
    """The agreement that this rank must follow, since peers may run a graph of it; None: none.

    Args:
        view: of the graph that this rank compiles, or, with a fault, what is known of it.
        agreements: all that were made for its function.

    Raises:
        DivergenceError: peers may run either of two graphs, and no order fits both.
    """
    chosen: Agreement | None = None
    for agreement in agreements:
        own = recognize(view, [agreement])
        found = _align(own, agreement)
        if found is None or found.difference:
            continue
        if chosen is None:
            chosen = agreement
        elif _contradicts(own, chosen, agreement):
            raise DivergenceError(
                f"rank {view.graph.rank} compiles a graph alone that fits two earlier ones "
                "whose ranks agreed on different orders, and peers may run either. Switch the pass "
                "off on all ranks with OVERLAP_CORE=0, and report this"
            )
    return chosen


def describe_new(view: RankView, agreements: Sequence[Agreement]) -> str:
    """Why no peer can run an agreed graph beside this one: the first entry that has no counterpart.

    Args:
        view, agreements: for which `choose_agreement` found none.
    """
    found = [_align(view, agreement) for agreement in agreements if agreement.moved]
    return next((one.difference for one in found if one is not None), view.fault)


def follow(view: RankView, agreement: Agreement) -> tuple[RankView, RankOutcome]:
    """Order one rank's graph as agreed, without asking anybody.

    What it shares with the agreed graph comes in just the agreed sequence; where between its
    neighbours a gather is launched is decided by this rank's own costs. What goes wrong there (a
    policy that raises) costs time, not the sequence.

    Args:
        view: of a graph that `choose_agreement` found the agreement for.
        agreement: from an earlier graph, perhaps of an earlier run of the job.

    Returns:
        The view that the outcome is about, which has no fault, and the outcome.

    Raises:
        DivergenceError: this graph cannot be brought into the sequence on which the ranks agreed,
            and program order is another one. Peers may run the agreed one already.
    """
    decision = ModeDecision(mode=agreement.mode, why=agreement.why)
    order = program = tuple(range(len(view.graph.nodes)))
    plan, notes = Plan(), [_ALONE]
    if view.fault:
        notes.append(f"costs and policies are left out: {view.fault}")
    try:
        view = _with_called(estimated(view, agreement.skeleton.entries), agreement)
        try:
            view, plan, order = _order(view, agreement)
        except PluginError as error:
            notes.append(f"policies are left out: {error}")
            view, plan, order = _order(evolve(view, host=view.host.builtins()), agreement)
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
    return view, evolve(outcome, notes=(*outcome.notes, *notes))


def _canonical(graph: OverlapGraph, skeleton: Skeleton) -> tuple[int, ...]:
    """Ordinals of the entries in an order that graphs of one function share."""
    return captured_order(graph, skeleton) or tuple(range(len(skeleton.entries)))


def _align(view: RankView, agreement: Agreement) -> Alignment | None:
    if view.skeleton is None:
        return None
    mine, _ = peer_skeleton_of(view.graph, view.skeleton)
    return align(mine, agreement.skeleton, view.graph.rank)


def _wanted(view: RankView, agreement: Agreement) -> tuple[tuple[int, ...], list[list[int]]]:
    """All entries in the order to follow, and the agreed calls, in this graph's own ordinals.

    Raises:
        IllegalOrderError: the graph can't follow.
    """
    assert view.skeleton is not None
    mine, ordinals = peer_skeleton_of(view.graph, view.skeleton)
    found = align(mine, agreement.skeleton, view.graph.rank)
    if found.difference:
        raise IllegalOrderError(f"the agreement is about other communication: {found.difference}")
    own = {place: ordinals[i] for i, place in enumerate(found.places) if place is not None}
    if not agreement.sequence:
        return tuple(range(len(view.skeleton.entries))), []
    sequence = [own[place] for place in agreement.sequence if place in own]
    calls = [[own[place] for place in call] for call in agreement.calls if set(call) <= own.keys()]
    return _fit_in(view, sequence, calls), calls


def _with_called(view: RankView, agreement: Agreement) -> RankView:
    """The view where all gathers of the agreed calls may move, whatever their inputs are here."""
    if not agreement.calls:
        return view
    assert view.skeleton is not None
    positions = view.skeleton.positions
    called = {positions[ordinal] for call in _wanted(view, agreement)[1] for ordinal in call}
    known = {group.launch for group in view.skeleton.gathers}
    return view if called <= known else with_gathers(view, called)


def _fit_in(
    view: RankView, sequence: Sequence[int], calls: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """All entries: those of a sequence in that order, the others among them.

    The others keep their captured order. Each comes behind all that were captured before it, and
    no later, unless something that depends on it comes earlier; none comes between launches of one
    call. So ranks that run graphs of one structure end alike.

    Raises:
        IllegalOrderError: dependencies contradict the sequence.
    """
    assert view.skeleton is not None
    canonical = _canonical(view.graph, view.skeleton)
    spot = {ordinal: i for i, ordinal in enumerate(sequence)}
    end = {**spot, **{o: max(map(spot.__getitem__, call)) for call in calls for o in call}}
    weights: dict[int, tuple[int, int]] = {}
    last = -1
    for captured, ordinal in enumerate(canonical):
        last = max(last, end.get(ordinal, -1))
        weights[ordinal] = (spot[ordinal], -1) if ordinal in spot else (last, captured)
    needed = _needed_entries(view.graph, view.skeleton.positions)
    for chain in (sequence, [ordinal for ordinal in canonical if ordinal not in spot]):
        for earlier, later in pairwise(chain):
            needed[later].add(earlier)
    users: list[list[int]] = [[] for _ in needed]
    for ordinal, before in enumerate(needed):
        for earlier in before:
            users[earlier].append(ordinal)
    missing = [len(before) for before in needed]
    ready = [(*weights[ordinal], ordinal) for ordinal, count in enumerate(missing) if not count]
    heapify(ready)
    wanted: list[int] = []
    while ready:
        ordinal = heappop(ready)[-1]
        wanted.append(ordinal)
        for user in users[ordinal]:
            missing[user] -= 1
            if not missing[user]:
                heappush(ready, (*weights[user], user))
    if len(wanted) < len(needed):
        entries = view.skeleton.entries
        stuck = next(ordinal for ordinal in sequence if missing[ordinal])
        after = ", ".join(entries[o].node for o in sorted(needed[stuck]) if missing[o])
        raise IllegalOrderError(
            f"{describe_entry(entries[stuck])} ({entries[stuck].node}) cannot come where it was "
            f"agreed on, since it depends on {after}"
        )
    return tuple(wanted)


def _needed_entries(graph: OverlapGraph, positions: Sequence[int]) -> list[set[int]]:
    """For each entry those that its node depends on, through whatever lies between."""
    ordinal_of = {position: ordinal for ordinal, position in enumerate(positions)}
    behind: list[int] = []
    """By node a bit for each entry."""
    needed: list[set[int]] = []
    for position, before in enumerate(graph.predecessors):
        found = 0
        for earlier in before:
            found |= behind[earlier]
        if position in ordinal_of:
            needed.append({o for o in range(found.bit_length()) if found >> o & 1})
            found |= 1 << ordinal_of[position]
        behind.append(found)
    return needed


def _contradicts(view: RankView, chosen: Agreement, agreement: Agreement) -> bool:
    """Whether another agreement wants launches in another order than the chosen one."""
    assert view.skeleton is not None
    mine, ordinals = peer_skeleton_of(view.graph, view.skeleton)
    places = align(mine, agreement.skeleton, view.graph.rank).places
    shared = {ordinals[i] for i, place in enumerate(places) if place is not None}
    try:
        wanted, _ = _wanted(view, chosen)
    except IllegalOrderError:
        return False  # `follow` will say so
    try:
        other, _ = _wanted(view, agreement)
    except IllegalOrderError:
        return True
    return [o for o in wanted if o in shared] != [o for o in other if o in shared]


def _is_program_order(view: RankView, agreement: Agreement) -> bool:
    """Whether the agreed sequence is that of this graph's program order."""
    if agreement.calls or view.skeleton is None:
        return not agreement.moved
    try:
        wanted, _ = _wanted(view, agreement)
    except IllegalOrderError:
        return False
    return wanted == tuple(range(len(wanted)))


def _order(view: RankView, agreement: Agreement) -> tuple[RankView, Plan, tuple[int, ...]]:
    """This graph in the agreed sequence: its calls, where they are, and the order of positions."""
    wanted, calls = _wanted(view, agreement)
    assert view.skeleton is not None
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
    assert restored is not None  # or `_fit_in` would have found what contradicts
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
    assert skeleton is not None
    assert frame is not None
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
