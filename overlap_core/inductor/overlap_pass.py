"""The pass as Inductor sees it: a callable from a list of scheduler nodes to another order.

Nothing that goes wrong in here reaches the user's compile: the nodes come back in program order
and the record of this graph says why. The one exception is a graph with which this rank would
diverge from what its peers run already.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch._functorch.config as functorch_config
from attrs import evolve, frozen
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.virtualized import V

from overlap_core._clock import REAL_CLOCK, Clock
from overlap_core.costs import IDEAL, CostSource, apply_measurements, request_digest, scale_missing
from overlap_core.errors import DivergenceError
from overlap_core.following import (
    agreement_of,
    choose_agreement,
    describe_new,
    follow,
    recognize,
)
from overlap_core.graph import OverlapGraph
from overlap_core.outcome import RankOutcome
from overlap_core.pipeline import negotiate
from overlap_core.ranks import Mode, StoreExchange, run_loopback
from overlap_core.registry import is_declared, note_compiled, op_was_seen_communicating
from overlap_core.session import session
from overlap_core.simulation import reach
from overlap_core.views import prepare, with_costs, with_workspaces

from .adapter import AdaptedGraph, adapt, find_group_ranks
from .coalesce import coalesce, find_uncoalescable
from .dependencies import is_collective_kernel, reorder_comm_deps
from .groups import rank_and_world_size
from .hidden import describe_hidden, note_hidden, opaque_ops, search_hidden
from .identity import code_of, compiled_code, identify
from .job import Meeting, current_job, forget_other_job, key_of
from .measure import DeviceMeasurer
from .op_names import warn_of_unknown_registrations
from .records import add_record
from .telling import tell
from .versions import software
from .warm_start import setting_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlap_core.config import OverlapConfig
    from overlap_core.host import PluginHost
    from overlap_core.ranks import Agreement, GraphKey
    from overlap_core.views import RankView

    from .job import Job
    from .warm_start import Agreements

__all__ = ["OverlapPass"]

logger = logging.getLogger(__name__)

_NOTHING_TO_GAIN_S = 5.0
"""How long a graph without weight gathers waits for its peers, which may never compile it."""


class OverlapPass:
    """One installation of the pass.

    It survives `copy.deepcopy` as itself. Inductor's caches, which pickle it for their keys, get
    the name of the plan that all ranks hold, this rank's number and the function: compiled code is
    found again by the rank that made it, for the function that it was agreed on for, and only under
    the plan that it was made under.
    """

    def __init__(self, config: OverlapConfig, host: PluginHost, clock: Clock = REAL_CLOCK) -> None:
        self.config = config
        self.host = host
        self._clock = clock

    def __deepcopy__(self, memo: object) -> OverlapPass:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        job = current_job()
        if job is None:
            raise BypassFxGraphCache("overlap_core has no process group to ask")
        return str, (job.agreements(self.config, self.host).token(compiled_code()),)

    def __repr__(self) -> str:
        return f"OverlapPass({self.config!r})"

    def __call__(self, snodes: list[Any]) -> list[Any]:
        """Reorder, or return the nodes as they came."""
        if not _is_of_interest(snodes):
            return snodes
        try:
            return self._reorder(snodes)
        except DivergenceError as error:
            logger.error("%s", error)
            raise
        except Exception as error:
            if self._is_bound():
                raise _divergence(error) from error
            logger.warning(
                "overlap is off for one graph: the pass failed and program order is kept "
                "(%s: %s); please report this",
                type(error).__name__,
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            why = _failed(error)
            add_record(_kept(0, why))
            self._excuse(snodes, why)
            return snodes

    def _is_bound(self) -> bool:
        """Whether gathers of the function that is compiled were ever moved."""
        job = session.learned.job
        if job is None:
            return False
        code = None
        try:
            job.agreements(self.config, self.host)
            code = code_of(identify(V.graph))
        except Exception as error:
            logger.debug("what was agreed on for this function is unknown: %s", error)
        return job.has_moved(code)

    def _excuse(self, snodes: list[Any], why: str) -> None:
        """Tell peers that wait for this rank at a graph on which it failed. Never raises."""
        with contextlib.suppress(Exception):
            job = current_job()
            if job is None or job.world_size == 1:
                return
            setting = setting_of(self.config, self.host)
            counts = any(map(is_collective_kernel, snodes))
            meeting = job.missed_meeting(V.graph, identify(V.graph), setting, counts=counts)
            if meeting is not None:
                self._exchange(job, meeting, self.config.deadline_s).leave(why)

    def _reorder(self, snodes: list[Any]) -> list[Any]:
        world = rank_and_world_size()
        if world is None:
            if any(map(is_collective_kernel, snodes)):
                add_record(_kept(0, "no process group is initialized"))
            return snodes
        forget_other_job()
        rank, world_size = world
        if _leaves_this_process():
            if any(map(is_collective_kernel, snodes)):
                add_record(_kept(rank, "it is packaged as C++, which cannot check its plan"))
            return snodes
        sight = self._look(snodes, rank, world_size)
        sight, outcome = self._decide(snodes, sight)
        if outcome is None:
            return snodes
        ordered = snodes
        if outcome.committed and sight.adapted is not None:
            # Committed by all ranks: from here on nothing may keep this one in program order.
            by_name = {snode.get_name(): snode for snode in snodes}
            ordered = [by_name[name] for name in outcome.order]
            self._coalesce(outcome, sight.view, by_name)
        self._follow_up(outcome, ordered, sight)
        return ordered

    def _coalesce(self, outcome: RankOutcome, view: RankView, snodes: Mapping[str, Any]) -> None:
        """Make one call of each of the outcome's.

        Raises:
            DivergenceError: that failed, and the peers will make the calls.
        """
        if not outcome.coalesced or view.skeleton is None:
            return
        nodes = view.graph.nodes
        waits = {group.launch: group.waits for group in view.skeleton.gathers}
        try:
            coalesce(
                [
                    (
                        [snodes[nodes[launch].name] for launch in call.launches],
                        [snodes[nodes[w].name] for launch in call.launches for w in waits[launch]],
                    )
                    for call in outcome.coalesced
                ]
            )
        except Exception as error:
            raise DivergenceError(
                f"rank {outcome.rank} cannot coalesce gathers as the ranks agreed "
                f"({type(error).__name__}: {error}). Set OverlapConfig(coalesce='off') on all "
                "ranks, and report this"
            ) from error

    def _follow_up(self, outcome: RankOutcome, ordered: list[Any], sight: _Sight) -> None:
        """Tell Inductor's later passes of the order, and the user of the outcome. Never raises."""
        try:
            if outcome.committed and sight.adapted is not None:
                issuing = set(outcome.collectives)
                reorder_comm_deps(
                    [s for s in ordered if s.get_name() in issuing and s.node is not None],
                    sight.adapted.comm_buffers,
                )
            notes = [*self.host.notes(), *sight.notes(), *outcome.notes]
            told = evolve(outcome, notes=tuple(notes))
            add_record(told, self._mark_code())
            tell(told)
        except Exception as error:
            logger.warning(
                "after the decision on a graph (%s): %s: %s; please report this",
                outcome.mode,
                type(error).__name__,
                error,
            )

    def _mark_code(self) -> str:
        job = current_job()
        if job is None or V.graph.cpp_wrapper:
            return ""
        return job.agreements(self.config, self.host).mark_code(V.graph.wrapper_code)

    def _look(self, snodes: list[Any], rank: int, world_size: int) -> _Sight:
        """What this rank sees of its graph; one that cannot be described still has a vote."""
        try:
            adapted = adapt(snodes, V.graph, rank, world_size)
            note_compiled(opaque_ops(adapted))
            warn_of_unknown_registrations()
            if self.config.enabled and self.config.costs == "measured":
                hidden = search_hidden(snodes, adapted, self.config, self.host)
                if note_hidden(hidden):
                    adapted = adapt(snodes, V.graph, rank, world_size)
        except Exception as error:
            fault = f"the graph cannot be described: {type(error).__name__}: {error}"
            return self._look_roughly(snodes, rank, world_size, fault)
        view = prepare(
            adapted.graph,
            self.config,
            self.host,
            adapted.requests,
            keep_alone=find_uncoalescable(snodes),
            is_backward=bool(V.graph.is_backward),
        )
        return _Sight(
            adapted=adapted,
            view=view,
            groups=reach(view),
            measurer=self._measurer(snodes, adapted, view),
            undeclared=tuple(op for op in opaque_ops(adapted) if op_was_seen_communicating(op)),
        )

    def _look_roughly(self, snodes: list[Any], rank: int, world_size: int, fault: str) -> _Sight:
        """As much as is needed to follow what was agreed on before."""
        adapted = None
        try:
            adapted = adapt(snodes, V.graph, rank, world_size, roughly=True)
        except Exception as error:
            logger.debug("nor can it be described roughly: %s", error)
        empty = OverlapGraph(rank=rank, world_size=world_size, nodes=())
        graph, requests = (empty, ()) if adapted is None else (adapted.graph, adapted.requests)
        view = prepare(graph, self.config, self.host, requests, fault=fault)
        return _Sight(adapted=adapted, view=view, groups=find_group_ranks(snodes))

    def _measurer(
        self, snodes: list[Any], adapted: AdaptedGraph, view: RankView
    ) -> DeviceMeasurer | None:
        """Who times this graph. None on every rank or on none but those that cannot take part."""
        if self.config.costs != "measured" or view.skeleton is None:
            return None
        return DeviceMeasurer(
            snodes, adapted.requests, view.skeleton, adapted.sizes, self.config, self.host
        )

    def _decide(self, snodes: list[Any], sight: _Sight) -> tuple[_Sight, RankOutcome | None]:
        """Follow what was agreed, or negotiate; None for a graph that holds nothing to decide."""
        view = sight.view
        rank = view.graph.rank
        job = current_job()
        outcome = None
        if not self.config.enabled:
            outcome = _kept(rank, "switched off by OverlapConfig(enabled=False)", view)
        if job is None or job.world_size == 1:
            return sight, outcome or self._decide_alone(sight)
        identity = identify(V.graph)
        key = key_of(view, identity)
        if self.config.enabled:
            agreements = job.agreements(self.config, self.host)
            agreed = agreements.book.of(code_of(identity))
            if agreed and (bound := choose_agreement(view, agreed)) is not None:
                return self._follow(sight, agreements, bound)
            if sight.groups or view.fault:
                key = key_of(recognize(view, agreed), identity)
                return self._negotiate(snodes, sight, job, identity, key, agreed)
        # Peers whose graphs of this function communicate need not wait for this one.
        meeting = job.meeting(view, identity, key, counts=False)
        exchange = self._exchange(job, meeting, self.config.deadline_s)
        off = "" if outcome is None else outcome.why
        exchange.publish_scope(sight.groups, gathers=0, off=off)
        exchange.leave()
        return sight, outcome

    def _follow(
        self, sight: _Sight, agreements: Agreements, agreed: Agreement
    ) -> tuple[_Sight, RankOutcome]:
        """Follow what was agreed; the sight is that of what the outcome is about."""
        view, outcome = follow(self._with_costs(sight, agreements), agreed)
        return evolve(sight, view=view), outcome

    def _with_costs(self, sight: _Sight, agreements: Agreements) -> RankView:
        """The view with what was measured before, and this rank's own compute measured now.

        What communicates is never timed by one rank alone; at a size that is new it takes what
        another size took, scaled.
        """
        view, measurer = sight.view, sight.measurer
        if measurer is None or view.skeleton is None:
            return view
        measured = agreements.costs
        try:
            known = {request_digest(request): cost for request, cost in measured.items()}
            table = {**measurer.measure_compute(known), **known}
            table.update(scale_missing(view.requests, table, measured))
            costs = apply_measurements(view.costs, view.requests, table)
            view = with_costs(view, costs, agreements.machine)
            return with_workspaces(view, measurer.workspace_bytes)
        except Exception as error:  # the order is agreed on; better costs are not worth losing it
            logger.warning("nothing measured: %s: %s", type(error).__name__, error)
            return view

    def _decide_alone(self, sight: _Sight) -> RankOutcome | None:
        """For one rank, and for a fake group, whose ranks always agree."""
        if not sight.groups:
            return None
        rank = sight.view.graph.rank
        scope = tuple(sorted({rank, *(r for ranks in sight.groups for r in ranks)}))
        protocol = negotiate(sight.view, scope, sight.measurer if len(scope) == 1 else None)
        return run_loopback(protocol, scope.index(rank), len(scope))

    def _negotiate(
        self,
        snodes: list[Any],
        sight: _Sight,
        job: Job,
        identity: str,
        key: GraphKey | None,
        agreed: Sequence[Agreement],
    ) -> tuple[_Sight, RankOutcome]:
        """Meet the other ranks, and remember what came of it.

        Raises:
            DivergenceError: nobody came, and peers may run a graph of the function in an order in
                which gathers were moved; or what was decided cannot be learned or remembered.
        """
        view, config = sight.view, self.config
        meeting = job.meeting(view, identity, key)
        bound = any(agreement.moved for agreement in agreed)
        # Where program order is no way out, peers that are slow are worth waiting for.
        deadline_s = (
            config.recompile_deadline_s if meeting.again and not bound else config.deadline_s
        )
        if not sight.can_gain and not bound:
            deadline_s = min(deadline_s, _NOTHING_TO_GAIN_S)
        exchange = self._exchange(job, meeting, deadline_s)
        try:
            gathers = None if view.skeleton is None else len(view.skeleton.gathers)
            found = exchange.find_scope(sight.groups, sight.undeclared, gathers)
            if found.why:
                outcome = evolve(_kept(job.rank, found.why, view, found.ranks), lasting=False)
            else:
                if set(note_hidden(found.seen)) & set(sight.opaque_ops):
                    # A peer saw an op of this graph communicate, which could not be tried here.
                    sight = self._look(snodes, job.rank, job.world_size)
                    key = key_of(recognize(sight.view, agreed), identity)
                outcome = exchange.run(
                    negotiate(sight.view, found.ranks, sight.measurer), found.ranks
                )
        except TimeoutError as error:
            if bound:
                raise DivergenceError(
                    f"rank {job.rank} compiles a graph that it cannot align with what the ranks "
                    f"agreed on for this function: {describe_new(view, agreed)}. No peer has come "
                    f"to agree on a new order ({error}), and those that run the agreed one would "
                    "wait for ever for a rank in another. Compile this shape on all ranks "
                    "together, or switch the pass off on all of them with OVERLAP_CORE=0"
                ) from error
            outcome = evolve(_kept(job.rank, str(error), view), lasting=False)
        except Exception as error:
            exchange.leave(_failed(error))
            raise
        finally:
            exchange.leave()
        kept = outcome
        if not sight.can_gain and not outcome.committed:
            # Nothing of it could move, whoever was late: that holds as long as the job goes on.
            kept = evolve(outcome, scope=(job.rank,), lasting=True)
        try:
            self._remember(evolve(sight, view=recognize(sight.view, agreed)), kept, key, job)
        except Exception as error:
            if outcome.committed:
                raise DivergenceError(
                    f"rank {job.rank} cannot remember what the ranks agreed on "
                    f"({type(error).__name__}: {error}); please report this"
                ) from error
            raise
        return sight, outcome

    def _exchange(self, job: Job, meeting: Meeting, deadline_s: float) -> StoreExchange:
        job.attend(V.graph)
        return StoreExchange(
            *(job.store, job.rank, meeting.name, deadline_s, self._clock),
            job=job.number,
            software=software(),
        )

    def _remember(
        self, sight: _Sight, outcome: RankOutcome, key: GraphKey | None, job: Job
    ) -> None:
        """Keep an agreement and what was measured, for the next graphs and starts."""
        agreements = job.agreements(self.config, self.host)
        if outcome.machine != IDEAL:
            agreements.machine = outcome.machine
        for request, cost in zip(outcome.requests, outcome.costs, strict=False):
            if request is not None and cost.source is CostSource.MEASURED:
                agreements.costs[request] = cost
        if key is not None and (outcome.lasting or sight.can_gain):
            agreements.add(key, agreement_of(sight.view, outcome))


@frozen(kw_only=True)
class _Sight:
    """What one rank sees of its graph before it talks to others."""

    adapted: AdaptedGraph | None
    """None: the graph cannot be described."""
    view: RankView
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group that the graph communicates on."""
    measurer: DeviceMeasurer | None = None
    undeclared: tuple[str, ...] = ()
    """Ops that were seen to communicate."""

    @property
    def can_gain(self) -> bool:
        """Whether there is a gather to move, or a fault that peers must hear of."""
        skeleton = self.view.skeleton
        return bool(self.view.fault or (skeleton is not None and skeleton.gathers))

    @property
    def opaque_ops(self) -> tuple[str, ...]:
        return () if self.adapted is None else opaque_ops(self.adapted)

    def notes(self) -> list[str]:
        notes = [describe_hidden(op) for op in self.undeclared if not is_declared(op)]
        measurer = self.measurer
        if measurer is not None and measurer.seconds:
            notes += measurer.notes
            parts = ", ".join(f"{what} {took:.2f}" for what, took in measurer.seconds.items())
            notes.append(
                f"measuring took {sum(measurer.seconds.values()):.2f} s ({parts}) and raised the "
                f"peak of GPU memory by {measurer.peak_growth_bytes / 2**20:.0f} MiB"
            )
        return notes


def _is_of_interest(snodes: list[Any]) -> bool:
    """Leave empty graphs and the graphs of Inductor's own autotuning alone."""
    name = getattr(V.graph, "name", None) or ""
    return bool(snodes) and not name.startswith("benchmark_")


def _divergence(error: Exception) -> DivergenceError:
    return DivergenceError(
        f"{_failed(error)}, and the graph cannot stay in program order, since peers may run one of "
        "this function in which gathers were moved. Switch the pass off on all ranks with "
        "OVERLAP_CORE=0, and report this"
    )


def _leaves_this_process() -> bool:
    """Whether another process may load the code without asking; what is Python asks."""
    bundled = functorch_config.bundled_autograd_cache and V.graph.cpp_wrapper
    return bool(V.graph.aot_mode or bundled)


def _failed(error: Exception) -> str:
    return f"the pass failed: {type(error).__name__}: {error}"


def _kept(
    rank: int, why: str, view: RankView | None = None, scope: tuple[int, ...] = ()
) -> RankOutcome:
    """The record of a graph that stays in program order without a negotiation."""
    graph = None if view is None else view.graph
    names = () if graph is None else tuple(node.name for node in graph.nodes)
    collectives = (
        ()
        if view is None or view.skeleton is None
        else tuple(view.graph.nodes[p].name for p in view.skeleton.positions)
    )
    return RankOutcome(
        rank=rank,
        scope=scope or (rank,),
        mode=Mode.ABORT,
        why=why,
        order=names,
        collectives=collectives,
        gathers=(),
        legal=True,
        committed=False,
        votes=() if view is None else (view.vote,),
        skeleton=() if view is None or view.skeleton is None else view.skeleton.entries,
        fingerprint="" if view is None else view.vote.fingerprint,
        graph=graph,
    )
