"""What must hold for all graphs of all ranks, whatever the pass decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from attrs import evolve
from hypothesis import event, example, given
from hypothesis import strategies as st

from overlap_core import OverlapConfig, OverlapGraph, simulate
from overlap_core.costs import IDEAL
from overlap_core.host import PluginHost
from overlap_core.placement import (
    PeakBound,
    build_frame,
    build_memory,
    join,
    peak_bytes,
    rebuild_order,
)
from overlap_core.ranks import Mode
from overlap_core.simulation import simulate_views
from overlap_core.testing import assert_legal
from overlap_core.testing.strategies import RankSet, rank_sets
from overlap_core.views import prepare

from .oracles import (
    bytes_in_flight,
    find_movable,
    find_reductions,
    is_one_sequence,
    is_restored,
    issued,
    issues_communication,
    launches_of_waits,
    weight_gathers,
)
from .parted import swapped_ops, swapped_reductions
from .placement.event_simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from fractions import Fraction

    from overlap_core.costs import Cost
    from overlap_core.outcome import RankOutcome

Test = TypeVar("Test", bound="Callable[..., None]")
ROUNDING_NS = 1
FREE = (Mode.IDENTICAL, Mode.SLOT)


def configs() -> st.SearchStrategy[OverlapConfig]:
    """From no caution at all to far too much, with and without a bound on memory."""
    return st.builds(
        OverlapConfig,
        contention=st.sampled_from((1, 1.15, 3, 1000)),
        slack_ns=st.sampled_from((0, 20_000, 10**9)),
        max_in_flight_bytes=st.none() | st.integers(1, 6_000),
    )


def exposed_ns(
    graph: OverlapGraph, costs: Sequence[Cost], order: Sequence[str]
) -> dict[str, Fraction]:
    """Idle time of the compute stream by the launch that causes it, by a simulation of its own."""
    return Simulation.of(graph, costs, order, IDEAL, launches_of_waits(graph)).run().exposed


def names(graph: OverlapGraph) -> list[str]:
    return [node.name for node in graph.nodes]


def communication(outcome: RankOutcome, order: tuple[str, ...] | None = None) -> list[str]:
    assert outcome.graph is not None
    issuing = {node.name for node in outcome.graph.nodes if issues_communication(node)}
    return [name for name in (order or outcome.order) if name in issuing]


def graph_of(outcome: RankOutcome) -> OverlapGraph:
    assert outcome.graph is not None
    return outcome.graph


def by_scope(outcomes: tuple[RankOutcome, ...]) -> list[list[RankOutcome]]:
    scopes: dict[tuple[int, ...], list[RankOutcome]] = {}
    for outcome in outcomes:
        scopes.setdefault(outcome.scope, []).append(outcome)
    return list(scopes.values())


def parted(*more: Any) -> Callable[[Test], Test]:
    """Explicit examples of ranks that had parted, with the other arguments of the property."""

    def add(test: Test) -> Test:
        for ranks in (swapped_reductions(), swapped_ops()):
            test = example(ranks, *(more or (OverlapConfig(),)))(test)
        return test

    return add


@given(rank_sets(), configs())
@parted()
def test_every_final_order_is_legal(ranks: RankSet, config: OverlapConfig) -> None:
    for outcome in simulate(ranks.graphs, config):
        event(f"{outcome.mode}, {'hoisted' if outcome.hoisted else 'still'}")
        assert_legal(graph_of(outcome), outcome.order)
        assert outcome.legal


@given(rank_sets(), configs())
@parted()
def test_communication_is_in_one_order_on_all_ranks(ranks: RankSet, config: OverlapConfig) -> None:
    """By what ranks can compare: what comes at which place, and which launch of the program."""
    for scope in by_scope(simulate(ranks.graphs, config)):
        programs = [communication(o, tuple(names(graph_of(o)))) for o in scope]
        came = [issued(o, program) for o, program in zip(scope, programs, strict=True)]
        finals = [communication(o) for o in scope]
        assert finals == [list(o.collectives) for o in scope]
        ordinals = [[p.index(n) for n in f] for p, f in zip(programs, finals, strict=True)]
        left = [issued(outcome, outcome.order) for outcome in scope]
        (restored,) = {is_restored(outcome) for outcome in scope}
        event(f"{scope[0].mode}, {'restored' if restored else 'as it came'}")
        if restored:
            # A launch's place in the program says nothing any more, but no two of these launches
            # look alike: without captured places they can't be told apart in any other way.
            assert not is_one_sequence(came)
            assert is_one_sequence(left)
            for entries in left:
                keys = [evolve(entry, ordinal=0, groups=()) for entry in entries]
                assert len(set(keys)) == len(keys)
            if scope[0].mode is Mode.PINNED:  # the order of a rank, and nothing passed it
                assert any(one == sorted(one) for one in ordinals)
        elif scope[0].mode in FREE:
            assert is_one_sequence(left)
            assert all(one == ordinals[0] for one in ordinals)
        else:
            assert all(one == sorted(one) for one in ordinals)


@given(rank_sets(), configs())
@parted()
def test_ranks_of_a_scope_tell_one_story(ranks: RankSet, config: OverlapConfig) -> None:
    outcomes = simulate(ranks.graphs, config)
    for scope in by_scope(outcomes):
        assert [outcome.rank for outcome in scope] == list(scope[0].scope)
        assert len({(outcome.mode, outcome.why, outcome.committed) for outcome in scope}) == 1
        counts = {len(weight_gathers(graph_of(outcome))) for outcome in scope}
        if len(counts) > 1:
            assert scope[0].mode is Mode.ABORT
            assert "different numbers of weight gathers" in scope[0].why
        for outcome in scope:
            assert outcome.why
            assert outcome.committed is (outcome.mode is not Mode.ABORT)
            if outcome.mode is Mode.ABORT:
                assert list(outcome.order) == names(graph_of(outcome))


@given(rank_sets("identical"), configs())
def test_equal_graphs_get_one_order(ranks: RankSet, config: OverlapConfig) -> None:
    for scope in by_scope(simulate(ranks.graphs, config)):
        assert scope[0].mode in (Mode.IDENTICAL, Mode.PINNED), scope[0].why
        if scope[0].mode is Mode.IDENTICAL:
            assert scope[0].why == f"one graph on {'all' if len(scope) > 1 else 'rank'} " + (
                f"{len(scope)} ranks" if len(scope) > 1 else str(scope[0].rank)
            )
        assert len({outcome.positions for outcome in scope}) == 1


@given(rank_sets("compute"), configs())
def test_divergent_compute_still_allows_to_move(ranks: RankSet, config: OverlapConfig) -> None:
    for outcome in simulate(ranks.graphs, config):
        slower = "would be exposed" in outcome.why or "the step would take" in outcome.why
        assert outcome.mode in FREE or slower


@given(rank_sets("skeleton"), configs())
@parted()
def test_pinned_passes_no_communication(ranks: RankSet, config: OverlapConfig) -> None:
    """Every moved node keeps the same communication before and behind it, gathers excepted."""
    for outcome in simulate(ranks.graphs, config):
        if outcome.mode is not Mode.PINNED or is_restored(outcome):
            continue
        graph = graph_of(outcome)
        program, order = names(graph), list(outcome.order)
        moved_gathers = {gather.name for gather in outcome.gathers if gather.hoisted}
        movable = find_movable(graph)
        for entry in communication(outcome):
            for name in movable - {entry}:
                was_before = program.index(name) < program.index(entry)
                is_before = order.index(name) < order.index(entry)
                if entry not in moved_gathers:
                    assert was_before == is_before, (name, entry)


@given(rank_sets(), configs())
@parted()
def test_nothing_but_launch_groups_and_reductions_moves(
    ranks: RankSet, config: OverlapConfig
) -> None:
    for outcome in simulate(ranks.graphs, config):
        if is_restored(outcome):  # which holds back whatever stands in its way
            continue
        graph = graph_of(outcome)
        movable = find_movable(graph) | find_reductions(graph)
        still = [name for name in names(graph) if name not in movable]
        assert [name for name in outcome.order if name not in movable] == still
        gathers = [gather.name for gather in outcome.gathers]
        assert gathers == weight_gathers(graph)
        assert [name for name in outcome.order if name in gathers] == gathers
        for gather in outcome.gathers:
            assert gather.target <= gather.source


@given(rank_sets(), configs())
@parted()
def test_prediction_never_gets_worse(ranks: RankSet, config: OverlapConfig) -> None:
    for outcome in simulate(ranks.graphs, config):
        graph = graph_of(outcome)
        before = exposed_ns(graph, outcome.costs, names(graph))
        after = exposed_ns(graph, outcome.costs, outcome.order)
        gathers = [gather.name for gather in outcome.gathers]
        rounding = len(gathers) * ROUNDING_NS
        # A restored order is no choice: what comes of it is held against it, not against what came.
        assert is_restored(outcome) or sum(after.get(g, 0) for g in gathers) <= (
            sum(before.get(g, 0) for g in gathers) + rounding
        )
        for gather in outcome.gathers:
            assert abs(gather.exposed_ns_before - before.get(gather.name, 0)) <= ROUNDING_NS
            assert abs(gather.exposed_ns_after - after.get(gather.name, 0)) <= ROUNDING_NS


def compute_sank(outcome: RankOutcome) -> bool:
    """Whether something else than gathers and communication moved: what waits for reductions."""
    graph = graph_of(outcome)
    movable = find_movable(graph)
    stays = [
        graph.index[name]
        for name in outcome.order
        if name not in movable and not issues_communication(graph.nodes[graph.index[name]])
    ]
    return stays != sorted(stays)


@given(rank_sets(), configs())
@parted()
def test_running_twice_changes_nothing(ranks: RankSet, config: OverlapConfig) -> None:
    """Unless waits of reductions sank, since the compute that follows them covers gathers too."""
    first = simulate(ranks.graphs, config)
    again = [
        evolve(graph, nodes=tuple(graph.nodes[p] for p in outcome.positions))
        for graph, outcome in zip(ranks.graphs, first, strict=True)
    ]
    sunk = any(compute_sank(outcome) for outcome in first)
    event("sunk" if sunk else "as placed")
    second = simulate(again, config)
    if not sunk:
        assert [outcome.order for outcome in second] == [outcome.order for outcome in first]


@given(rank_sets(), st.integers(1, 4_000))
@parted(1_000)
def test_bytes_in_flight_are_bounded(ranks: RankSet, bound: int) -> None:
    config = OverlapConfig(max_in_flight_bytes=bound)
    for outcome in simulate(ranks.graphs, config):
        graph = graph_of(outcome)
        gathers = [gather.name for gather in outcome.gathers]
        largest = max((graph.nodes[graph.index[g]].nbytes or 0 for g in gathers), default=0)
        allowed = max(bound, largest, bytes_in_flight(graph, names(graph), gathers))
        assert bytes_in_flight(graph, outcome.order, gathers) <= allowed


@given(rank_sets(), st.integers(0, 4_000), st.booleans())
def test_the_peak_of_memory_is_bounded(ranks: RankSet, growth: int, together: bool) -> None:
    """No order needs more than the bound, or than its calls where program order has them."""
    config = OverlapConfig(coalesce=1_000 if together else "off")
    host = PluginHost.discover(config)
    views = []
    for graph in ranks.graphs:
        view = prepare(graph, config, host)
        memory = build_memory(graph)
        nbytes = peak_bytes(graph, range(len(graph.nodes)), memory) + growth
        peak = PeakBound(memory=memory, nbytes=nbytes, growth_bytes=growth)
        views.append(evolve(view, peak=peak))
    for view, outcome in zip(views, simulate_views(views), strict=True):
        assert view.peak is not None
        order = outcome.positions
        event(f"mode {outcome.mode}, {'moved' if outcome.hoisted else 'nothing moved'}")
        if view.skeleton is None or is_restored(outcome):
            continue
        numbers = {group.launch: n for n, group in enumerate(view.skeleton.gathers)}
        labels = list(range(len(numbers)))
        for call in outcome.coalesced:
            for launch in call.launches:
                labels[numbers[launch]] = numbers[call.launches[0]]
        frame = build_frame(view.graph, view.skeleton, join(view.skeleton.gathers, labels))
        still = peak_bytes(view.graph, rebuild_order(frame, frame.originals))
        assert peak_bytes(view.graph, order) <= max(view.peak.nbytes, still)


@given(rank_sets(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_given_means_nothing(ranks: RankSet, random: object) -> None:
    shuffled = list(ranks.graphs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    by_rank = {outcome.rank: outcome for outcome in simulate(shuffled)}
    assert [by_rank[graph.rank] for graph in ranks.graphs] == list(simulate(ranks.graphs))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_graph_without_communication_is_left_alone(world_size: int) -> None:
    graphs = [OverlapGraph(rank=r, world_size=world_size, nodes=()) for r in range(world_size)]
    outcomes = simulate(graphs)
    assert [outcome.scope for outcome in outcomes] == [(rank,) for rank in range(world_size)]
