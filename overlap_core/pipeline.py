"""One rank's way from a graph to a committed order, as a protocol that any driver can run.

Every step can say no, and then all ranks of the scope keep program order. A failure on this rank
(a plugin that raises, an order that turns out illegal) is never an early return: it is carried
into the next exchange as "cannot", so that peers hear of it and nobody waits.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING

from attrs import evolve

from .coalescing import Choice, choose_labels, decode_labels, encode_labels
from .costs import apply_measurements
from .errors import DeadlineError, DivergenceError
from .placement import Plan, alone, rebuild_order, settle, stand_still
from .ranks import (
    Commitment,
    CommonOrder,
    Decide,
    Mode,
    ModeDecision,
    Proposal,
    Vote,
    agree_on_costs,
    agree_on_machine,
    decode_each,
    decode_votes,
    encode_nodes,
    encode_vote,
    find_difference,
    reconcile,
    share_distinct,
    share_explained,
)
from .skeleton import structure
from .verdicts import describe_outcome, find_conflict, join_refusals
from .views import (
    RankView,
    as_it_came,
    came_calls,
    coalesced,
    describe_bound,
    describe_error,
    find_violation,
    prepare,
    propose_plan,
    reordered,
    with_costs,
    with_early_launches,
    with_late_waits,
    with_workspaces,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .outcome import RankOutcome
    from .placement import Timeline
    from .ranks import Measurer
    from .ranks.negotiation import Protocol

__all__ = ["RESTORED", "RankView", "negotiate", "prepare"]

logger = logging.getLogger(__name__)

RESTORED = "one order of communication was restored, no gather moved: "
"""Begins the reason of an outcome that is nothing but that."""
_KEEP, _LATE = b"keep ", b"late "
"""Program order, decided from what all ranks said, or because one could not say it."""


def negotiate(
    view: RankView, scope: tuple[int, ...], measurer: Measurer | None = None
) -> Protocol[RankOutcome]:
    """This rank's side of the negotiation of one graph.

    Args:
        view: from `prepare`.
        scope: the ranks that negotiate, ascending, this one among them.
        measurer: times this rank's nodes together with its peers; None on all ranks: never.

    Returns:
        The outcome; program order unless every rank of the scope committed the same plan.

    Raises:
        DivergenceError: what was decided cannot be learned, while peers may have moved something.
    """
    side = _Side(view, scope, measurer)
    try:
        wish = yield from side.run()
    except DeadlineError as error:
        side.failed = True
        wish = side.give_up(str(error))
    except Exception as error:
        # Peers may have this rank's word already, and must not decide without it being told.
        logger.warning("a negotiation failed: %s", describe_error(error))
        side.failed = True
        wish = side.give_up(f"rank {view.graph.rank} failed: {describe_error(error)}")
    try:
        # Whoever comes here first decides for all, so the ranks of a scope end alike, for one
        # reason.
        [verdict] = yield Decide("decision", wish)
    except Exception as error:
        if side.has_voted:
            raise DivergenceError(
                f"rank {view.graph.rank} cannot learn whether the ranks reordered this graph "
                f"({describe_error(error)}), so it may compile no order: look for the rank or the "
                "connection to the job's store that was lost"
            ) from error
        # Without this rank's vote nobody can have moved anything.
        side.failed = True
        verdict = side.give_up(f"rank {view.graph.rank} failed: {describe_error(error)}")
    return side.close(verdict)


class _Side:
    """The state of one rank in one negotiation."""

    def __init__(
        self, view: RankView, scope: tuple[int, ...], measurer: Measurer | None = None
    ) -> None:
        self.view = view
        """In terms of the restored order, once ranks agreed on one; `came` never is."""
        self.came = self.single = view
        """What this rank came with, and the last view in which each gather is alone."""
        self.labels: tuple[int, ...] = ()
        """Which gathers ranks agreed to coalesce; empty: none."""
        self.choice = Choice(labels=())
        self.base: tuple[int, ...] = ()
        """Program order of `view` as positions of what this rank came with; empty: the same."""
        self.before: Timeline | None = None
        """Predicted for the order that counts as program order."""
        self.early: tuple[int, ...] | None = None
        """Positions of `view` in that order, where reductions were moved."""
        self.unmoved: tuple[RankView, tuple[int, ...]] = (view, ())
        """The view and the base before reductions were moved."""
        self.common: CommonOrder | None = None
        self.measurer = measurer
        self.scope = scope
        self.index = scope.index(view.graph.rank)
        self.votes: tuple[Vote, ...] = (view.vote,)
        self.decision = ModeDecision(mode=Mode.ABORT, why="not negotiated")
        self.plan = Plan()
        self.order: tuple[int, ...] = ()
        self.plain: tuple[int, ...] = ()
        """As `order`, with reductions waited for where they were."""
        self.offer = b""
        self.slower_why = ""
        self.has_voted = False
        """All votes are known, so peers may have gone on."""
        self.failed = False
        """A rank was late or could not take part; another start may do better."""

    def run(self) -> Protocol[bytes]:
        """Everything up to the decision; what this rank would have decided."""
        payloads, nodes = yield from share_explained(
            "vote", encode_vote(self.view.vote), self.index, self.nodes
        )
        self.has_voted = True
        self.votes = decode_votes(payloads, self.scope)
        fault, difference = "", ""
        self.failed = not all(vote.can for vote in self.votes)
        if not self.failed:
            difference = yield from self.compare_skeletons()
            yield from self.measure()
            difference = difference or self.compare_nodes(nodes)
            self.launch_reductions_early()
        try:
            self.decision = self.view.host.choose_mode(self.votes)
        except Exception as error:
            fault = describe_error(error)
        if difference and self.graphs_decide():
            self.decision = evolve(self.decision, why=f"{self.decision.why}; {difference}")
        self.single = self.view
        if not self.failed:
            yield from self.coalesce()
        for attempt in ("first", "alone", "pinned"):
            if attempt == "alone" and not self.labels:
                continue
            # An attempt was slower than program order somewhere: less is tried, by all ranks.
            if attempt == "alone":
                self.labels = ()
            elif attempt == "pinned":
                self.decision = ModeDecision(
                    mode=Mode.PINNED, why=f"{self.decision.why}; {self.slower_why}"
                )
            agreed = yield from self.attempt(attempt, fault)
            if agreed:
                return self.offer
            if self.decision.mode is Mode.ABORT or attempt == "pinned":
                break
        return self.give_up(self.decision.why)

    def alike(self) -> bool:
        """Whether the votes leave anything to move and anything to agree on; equal on all ranks."""
        first = self.votes[0]
        return bool(first.weight_gathers) and all(
            (v.config, v.plugins, v.weight_gathers)
            == (first.config, first.plugins, first.weight_gathers)
            for v in self.votes
        )

    def graphs_decide(self) -> bool:
        """Whether it is the graphs' difference that cost the ranks freedom, and nothing else."""
        if self.decision.mode is not Mode.ABORT:
            return self.decision.mode is not Mode.IDENTICAL
        first = self.votes[0]
        return any(vote.weight_gathers != first.weight_gathers for vote in self.votes) and all(
            (v.config, v.plugins) == (first.config, first.plugins) for v in self.votes
        )

    def nodes(self) -> bytes:
        """What this rank's nodes are, for `compare_nodes`; empty if that can't be said."""
        try:
            return encode_nodes(self.came.graph)
        except Exception as error:
            logger.warning("nodes cannot be compared: %s", describe_error(error))
            return b""

    def compare_nodes(self, nodes: Mapping[int, bytes]) -> str:
        """Where graphs that share a skeleton begin to differ; empty if that isn't known.

        Args:
            nodes: by place in the scope, of the first two ranks whose votes differ.
        """
        fingerprints = {self.votes[place].fingerprint for place in nodes}
        # Nodes come in the order of before it was restored, which is no difference any more.
        is_restored = self.common is not None and self.common.chosen is not None
        if not nodes or not all(nodes.values()) or len(fingerprints) < len(nodes) or is_restored:
            return ""
        try:
            ranks = [self.scope[place] for place in nodes]
            static = self.common is None or not self.common.uneven
            return find_difference(ranks, list(nodes.values()), static=static)
        except Exception as error:  # on all ranks alike, and no reason to give up a plan
            logger.warning("nodes cannot be compared: %s", describe_error(error))
            return ""

    def measure(self) -> Protocol[None]:
        """Replace estimated costs by measured ones, if the votes leave anything to move."""
        if self.measurer is None or not self.alike():
            return
        view = self.view
        table = yield from agree_on_costs(self.measurer, self.index)
        machine = yield from agree_on_machine(self.measurer, self.index)
        view = with_costs(view, apply_measurements(view.costs, view.requests, table), machine)
        self.view = with_workspaces(view, self.measurer.workspace_bytes)

    def coalesce(self) -> Protocol[None]:
        """Agree on which gathers become one call; ranks that share no skeleton coalesce nothing.

        Whether the step takes place depends on what all ranks know alike, not on the mode.
        """
        view = self.view
        wish = view.config.coalesce
        if wish == "off" or (wish == "auto" and self.measurer is None) or not self.alike():
            return
        assert view.skeleton is not None
        single = alone(len(view.skeleton.gathers))
        self.choice = Choice(labels=single)
        try:
            self.choice = choose_labels(view)
        except Exception as error:
            logger.warning("gathers are not coalesced: %s", describe_error(error))
        payloads = yield from share_distinct(
            "coalesce", encode_labels(self.choice.labels), self.index
        )
        agreed = decode_labels(payloads, len(single))
        self.labels = () if agreed == single else agreed

    def seen_in(self, mode: Mode) -> RankView:
        """The view for a mode: what is one call must follow each other on all ranks."""
        if not self.labels or mode is Mode.PINNED:
            return self.single
        return coalesced(self.single, self.labels, self.choice.region_bytes)

    def compare_skeletons(self) -> Protocol[str]:
        """Give compatible skeletons one digest in the votes; else say where they differ.

        Where ranks came with the same communication in different orders and one order is legal on
        all of them, everything from here on is about that one: it takes program order's place.
        """
        view = self.view
        assert view.skeleton is not None
        self.common = common = CommonOrder(
            graph=view.graph,
            skeleton=view.skeleton,
            scope=self.scope,
            index=self.index,
            votes=self.votes,
            fingerprint_of=self.fingerprint_of,
        )
        difference = yield from common.compare()
        self.votes = common.votes
        if common.chosen is not None:
            self.view, self.base = reordered(view, common.order), common.order
        return difference

    def launch_reductions_early(self) -> None:
        """Let program order be one in which reductions leave as early as they can.

        Only structure decides, so ranks of one graph get one order, and no rank's sequence of
        communication changes.
        """
        assert self.view.model is not None
        self.before = self.view.model.program_order
        early, order = with_early_launches(self.view)
        self.unmoved = (self.view, self.base)
        if order:
            self.view, self.early = early, order
            self.base = tuple(self.base[p] for p in order) if self.base else order

    def fingerprint_of(self, order: tuple[int, ...], *, static: bool) -> str:
        """Of this rank's graph in another order; empty, "cannot", if anything goes wrong."""
        try:
            view = reordered(self.view, order)
            return view.vote.fingerprint if static else structure(view.graph)
        except Exception as error:
            logger.warning(
                "an order of communication cannot be restored: %s", describe_error(error)
            )
            return ""

    def give_up(self, why: str) -> bytes:
        """What to wish for without a plan: program order, or the order that had to be restored.

        Here it is decided that a placement which came to nothing never leads back to program
        orders that had parted: those hang.
        """
        return (self.common and self.common.wish(why)) or (_LATE if self.failed else _KEEP) + (
            why.encode(errors="replace")
        )

    def attempt(self, name: str, fault: str) -> Protocol[bool]:
        """Propose, reconcile, rebuild, verify. Whether all ranks are ready to commit."""
        mode, self.offer = self.decision.mode, b""
        proposal = Proposal(mode=str(mode), can=not fault, why=fault)
        if not fault and mode is not Mode.ABORT:
            try:
                self.view = self.seen_in(mode)
                self.plan = propose_plan(self.view, pinned=mode is Mode.PINNED)
                proposal = evolve(proposal, units=self.units(mode))
            except Exception as error:
                proposal = evolve(proposal, can=False, why=describe_error(error))
        step = f"proposal/{name}"
        payloads = yield from share_distinct(step, proposal.encode(), self.index)
        proposals = decode_each(payloads, Proposal.decode)
        why = join_refusals(self.scope, [(p.can, p.why) for p in proposals])
        why = why or find_conflict(self.scope, proposals)
        if why:
            self.failed = True
            self.decision = ModeDecision(mode=Mode.ABORT, why=why)
        if self.decision.mode is Mode.ABORT:
            return False
        commitment = self.rebuild(mode, proposals)
        # Known before peers can know it: if they decide to commit, this rank is able to follow,
        # even where it gave up waiting for their last words.
        self.offer = b"commit " + commitment.plan.encode() if commitment.ok else b""
        step = f"commit/{name}"
        payloads = yield from share_distinct(step, commitment.encode(), self.index)
        commitments = decode_each(payloads, Commitment.decode)
        slower = [c.slower for c in commitments]
        if any(slower) and mode is not Mode.PINNED and all(c.ok or c.slower for c in commitments):
            rank = self.scope[slower.index(True)]
            self.slower_why = f"pinned because on rank {rank} {commitments[slower.index(True)].why}"
            return False
        why = join_refusals(self.scope, [(c.ok, c.why) for c in commitments])
        if len({c.order for c in commitments}) > 1:
            # By its own costs each rank would wait elsewhere; ranks of one graph have one order.
            self.order = self.plain
        if not why and len({c.plan for c in commitments}) > 1:
            why = "ranks would commit different sequences of communication"
        if why:
            self.failed = True
            self.decision = ModeDecision(mode=Mode.ABORT, why=why)
        return not why

    def units(self, mode: Mode) -> tuple[int, ...]:
        """What ranks agree on: boundaries where graphs are equal, slots where skeletons are."""
        if mode is Mode.PINNED:
            return ()
        if mode is Mode.IDENTICAL:
            return tuple(p.boundary for p in self.plan.placements)
        return tuple(p.slot for p in self.plan.placements)

    def rebuild(self, mode: Mode, proposals: Sequence[Proposal]) -> Commitment:
        view = self.view
        try:
            assert view.skeleton is not None
            assert view.frame is not None
            assert view.model is not None
            agreed: tuple[int, ...] = ()
            boundaries = tuple(p.boundary for p in self.plan.placements)
            if mode is not Mode.PINNED:
                distinct = {id(p): p.units for p in proposals}
                agreed = reconcile(list(distinct.values()))
                by_boundary = mode is Mode.IDENTICAL
                self.plan = settle(self.plan, view.frame, agreed, by_boundary=by_boundary)
                boundaries = tuple(p.boundary for p in self.plan.placements)
            self.plain = rebuild_order(view.frame, boundaries)
            self.order = self.plain
            if problem := find_violation(view.graph, self.order):
                return Commitment(ok=False, why=f"the new order has {problem}")
            plan = self.plan_digest(mode, agreed)
            if slower := self.how_much_slower(self.plain):
                if mode is not Mode.PINNED:
                    return Commitment(ok=False, slower=True, why=slower)
                view = self.keep_still()
            late = with_late_waits(view, self.plain)
            if (
                late != self.plain
                and not find_violation(view.graph, late)
                and not self.how_much_slower(late)
            ):
                self.order = late
            whole = "" if mode is not Mode.IDENTICAL else _digest(self.order)
            return Commitment(ok=True, plan=plan, order=whole)
        except Exception as error:
            return Commitment(ok=False, why=describe_error(error))

    def keep_still(self) -> RankView:
        """Move nothing: where nothing passes communication, each rank may stay where it is."""
        program = tuple(range(len(self.view.graph.nodes)))
        if self.early is not None and self.how_much_slower(program):
            # Nor may reductions leave early then.
            self.view, self.base = self.unmoved
            self.early = None
        assert self.view.frame is not None
        self.plan = stand_still(self.view.graph, self.view.frame)
        self.order = self.plain = program
        return self.view

    def how_much_slower(self, order: tuple[int, ...]) -> str:
        """In words; "" if an order is predicted to be no slower than program order."""
        view = self.view
        assert view.skeleton is not None
        assert view.model is not None
        before, after = self.before or view.model.program_order, view.model.run(order)
        if not view.calls:
            launches = [group.launch for group in view.skeleton.gathers]
            came = launches if self.early is None else [self.early[launch] for launch in launches]
            more = after.gathers_exposed_ns(launches) - before.gathers_exposed_ns(came)
            if more > 0:
                return f"{more} ns more would be exposed than in program order"
        # A call is exposed as a whole where its first gather alone would not be, and saves the
        # host's time elsewhere; and gathers may delay what else communicates, or the host.
        longer = after.total_ns - before.total_ns
        return f"the step would take {longer} ns longer than in program order" * (longer > 0)

    def plan_digest(self, mode: Mode, agreed: tuple[int, ...]) -> str:
        """Digest of what must be equal on all ranks that commit."""
        if mode is Mode.PINNED:
            return str(mode)
        assert self.view.skeleton is not None
        place = {p: i for i, p in enumerate(self.view.skeleton.positions)}
        sequence = [place[p] for p in self.order if p in place]
        calls = [[place[launch] for launch in call.launches] for call in self.view.calls]
        return _digest([str(mode), agreed, sequence, calls])

    def close(self, verdict: bytes) -> RankOutcome:
        """Turn what was decided for the scope into this rank's outcome."""
        committed = bool(self.offer) and verdict == self.offer
        common, decision, graph = self.common, self.decision, self.came.graph
        restored, stopped_by = common.read(verdict) if common else ((), "")
        order = tuple(range(len(graph.nodes)))
        if committed:
            order = self.order
            if self.base:
                order = tuple(self.base[position] for position in order)
        elif restored:
            committed, order = True, restored
            decision = ModeDecision(mode=Mode.PINNED, why=RESTORED + stopped_by)
        else:
            why = verdict[len(_KEEP) :].decode(errors="replace")
            decision = ModeDecision(mode=Mode.ABORT, why=why)
        notes = common.notes(committed=committed, planned=not restored) if common else ()
        lasting = not verdict.startswith(_LATE)
        try:
            view, plan = as_it_came(self.came, self.view, self.base), self.plan
            if restored and view.frame is not None:
                plan = stand_still(view.graph, view.frame)
            elif committed:
                pinned = decision.mode is Mode.PINNED
                notes = (*notes, *describe_bound(self.view, self.plan, self.order, pinned=pinned))
                if self.choice.note and not pinned:
                    notes = (*notes, self.choice.note)
        except Exception:
            view, plan = self.came, Plan()
        # Not part of the description: the peers make these calls, whatever failed above.
        calls = came_calls(self.view, self.base) if committed and not restored else ()
        view = evolve(view, calls=calls)
        outcome = describe_outcome(
            view, self.scope, self.votes, decision, plan, order, committed=committed
        )
        return evolve(outcome, notes=(*outcome.notes, *notes), lasting=lasting)


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
