"""A rank that orders a graph alone ends with the sequence that all ranks agreed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import event, given

from overlap_core import OverlapConfig
from overlap_core.errors import DivergenceError
from overlap_core.following import (
    agreement_of,
    follow,
    peer_skeleton_of,
)
from overlap_core.host import PluginHost
from overlap_core.placement import peak_bytes
from overlap_core.ranks import Mode
from overlap_core.simulation import simulate, simulate_views
from overlap_core.testing import assert_legal
from overlap_core.testing.strategies import RankSet, rank_sets
from overlap_core.views import prepare

from .pipeline_views import EXACT, hosted, same, skewed, two_layers
from .small_graphs import gather, graph_of, mm, on_ranks, reduce_scatter, wait

if TYPE_CHECKING:
    from overlap_core.outcome import RankOutcome
    from overlap_core.ranks import Agreement, PeerSkeleton
    from overlap_core.views import RankView


def sequence(outcome: RankOutcome) -> list[int]:
    ordinals = {entry.node: entry.ordinal for entry in outcome.skeleton}
    return [ordinals[name] for name in outcome.collectives]


def shared(outcome: RankOutcome) -> list[str]:
    """The nodes that communicate with other ranks, as they are issued."""
    graph = outcome.graph
    assert graph is not None
    ranks = {name: graph.nodes[graph.index[name]].group_ranks for name in outcome.collectives}
    return [name for name in outcome.collectives if len(ranks[name] or ()) != 1]


def agreed(*views: RankView) -> Agreement:
    return agreement_of(views[0], simulate_views(views)[0])


def noticed(view: RankView) -> PeerSkeleton:
    assert view.skeleton is not None
    return peer_skeleton_of(view.graph, view.skeleton)[0]


def test_a_graph_with_more_compute_follows_the_agreed_sequence() -> None:
    views = same(2, scatter=True, extra=2)
    agreement = agreement_of(views[0], simulate_views(views)[0])
    assert agreement.mode is Mode.IDENTICAL
    assert agreement.sequence == (0, 2, 1)
    again, _ = skewed(*[{"scatter": True, "extra": 5}] * 2)
    _, outcome = follow(again, agreement)
    assert outcome.committed
    assert outcome.scope == (0, 1)
    assert outcome.collectives == ("g0", "g1", "r")
    assert outcome.why == agreement.why
    assert outcome.notes == ("compiled alone: follows what was agreed for an earlier graph",)


@pytest.mark.parametrize("mode", [Mode.PINNED, Mode.ABORT])
def test_without_a_sequence_communication_stays_in_program_order(mode: Mode) -> None:
    view, peer = same(2, scatter=True, extra=2)
    agreement = evolve(agreed(view, peer), mode=mode, sequence=())
    _, outcome = follow(view, agreement)
    assert outcome.collectives == ("g0", "r", "g1")
    assert outcome.mode is mode
    assert outcome.committed == (mode is Mode.PINNED)


def test_a_graph_that_cannot_follow_is_refused_loudly() -> None:
    view, peer = same(2, scatter=True)
    impossible = evolve(agreed(view, peer), why="skeletons match", sequence=(1, 0, 2))
    with pytest.raises(
        DivergenceError, match=r"cannot order .* as the ranks agreed \(skeletons"
    ) as e:
        follow(view, impossible)
    assert "(r) cannot come where it was agreed on, since it depends on g0" in str(e.value)


def test_a_graph_with_other_communication_is_refused_loudly() -> None:
    view, _ = same(2, scatter=True)
    with pytest.raises(DivergenceError, match="is about other communication: entry 1"):
        follow(view, agreed(*same(2)))


def test_a_graph_that_cannot_follow_keeps_program_order_where_that_is_the_agreement() -> None:
    view, peer = same(2, scatter=True)
    broken = evolve(view, frame=None)
    agreement = evolve(agreed(view, peer), mode=Mode.SLOT, sequence=(0, 1, 2))
    _, outcome = follow(broken, agreement)
    assert outcome.mode is Mode.ABORT
    assert not outcome.committed


def test_what_peers_do_not_notice_changes_no_structure() -> None:
    graph = on_ranks(two_layers(scatter=True), 2)[0]
    alone = evolve(reduce_scatter("own", "x", group="mine"), group_ranks=(0,))
    wider = [evolve(n, sizes=((64, 16),)) if n.name in ("g0", "r") else n for n in graph.nodes]
    other = [evolve(n, dtypes=("float16",)) if n.name == "r" else n for n in graph.nodes]
    assert noticed(hosted(evolve(graph, nodes=tuple(wider)))) == noticed(hosted(graph))
    assert noticed(hosted(evolve(graph, nodes=(alone, *graph.nodes)))) == noticed(hosted(graph))
    assert noticed(hosted(evolve(graph, nodes=tuple(other)))) != noticed(hosted(graph))


@given(rank_sets())
def test_every_rank_could_have_followed_alone(ranks: RankSet) -> None:
    config = OverlapConfig(contention=1, slack_ns=0)
    host = PluginHost.discover(config)
    for outcome in simulate(ranks.graphs, config):
        assert outcome.graph is not None
        view = prepare(outcome.graph, config, host)
        agreement = agreement_of(view, outcome)
        _, alone = follow(view, agreement)
        event(f"mode {alone.mode}")
        assert alone.committed or not outcome.committed
        # Where what nobody else takes part in comes, is the rank's own affair.
        assert shared(alone) == shared(outcome)
        assert_legal(outcome.graph, alone.order)


def test_what_was_agreed_under_exact_costs_is_what_is_said() -> None:
    view = hosted(two_layers(), EXACT)
    agreement = agreement_of(view, simulate_views([view])[0])
    assert agreement.lasting
    assert agreement.sequence == (0, 1)


def test_who_follows_keeps_the_bound_on_the_peak_of_memory() -> None:
    """Gradients of 64 MiB would be kept until their slow reductions are waited for late."""
    mib = 1 << 20
    nodes = [mm("start"), gather("g"), wait("g"), mm("a", "start", "w.g", ns=300)]
    before = "a"
    for i in range(4):
        nodes += [
            mm(f"a{i}", before, ns=300),
            mm(f"d{i}", f"a{i}", sizes=((64 * mib,),), dtypes=("uint8",)),
            reduce_scatter(f"r{i}", f"d{i}", ns=5_000, nbytes=mib),
            wait(f"r{i}"),
        ]
        before = f"a{i}"
    graph = graph_of(*nodes, outputs=(before, *(f"w.r{i}" for i in range(4))))
    program = peak_bytes(graph, range(len(nodes)))
    peaks = []
    for growth in (None, 0):
        config = evolve(EXACT, max_peak_growth=growth, max_in_flight_bytes=1 << 40)
        views = [hosted(evolve(g, input_bytes=0), config) for g in on_ranks(graph, 2)]
        outcome = simulate_views(views)[0]
        _, followed = follow(views[0], agreement_of(views[0], outcome))
        assert followed.committed
        peaks.append([peak_bytes(graph, o.positions) for o in (outcome, followed)])
    assert min(peaks[0]) > program + 32 * mib >= max(peaks[1])


def test_a_graph_that_inductor_ordered_otherwise_is_brought_back() -> None:
    """The agreement is in terms of the captured order, whatever order a later graph comes in."""
    graph = on_ranks(two_layers(scatter=True, extra=2), 2)[0]
    nodes = [evolve(node, captured=place) for place, node in enumerate(graph.nodes)]
    view = hosted(evolve(graph, nodes=tuple(nodes)))
    agreement = agreement_of(view, simulate_views([evolve(view)])[0])
    names = [node.name for node in nodes]
    # The reduce-scatter behind the second gather, as a pass that saves memory might put it.
    late = [name for name in names if name not in ("r", "w.r")]
    late[late.index("w.g1") : late.index("w.g1")] = ["r", "w.r"]
    order = dict(zip(names, nodes, strict=True))
    other = hosted(evolve(graph, nodes=tuple(order[name] for name in late)))
    assert noticed(other) == noticed(view)
    _, outcome = follow(other, agreement)
    assert outcome.collectives == simulate_views([view])[0].collectives
    assert_legal(other.graph, outcome.order)


def test_a_graph_with_a_gather_too_early_follows_the_order_that_was_restored() -> None:
    """No gather moved up brings this rank into the sequence; it ended there by an agreement."""
    places = {"r": 1, "g": 6}
    nodes = [mm("a"), reduce_scatter("r", "a"), wait("r"), mm("b", "a"), mm("c", "b")]
    nodes += [mm("d", "c"), gather("g"), wait("g"), mm("e", "w.g", "d")]
    nodes = [evolve(node, captured=places.get(node.name)) for node in nodes]
    graphs = on_ranks(graph_of(*nodes), 2)
    g = nodes.pop(6)
    graphs = [graphs[0], evolve(graphs[1], nodes=(g, *nodes))]
    views = [hosted(graph) for graph in graphs]
    for view, outcome in zip(views, simulate_views(views), strict=True):
        assert outcome.collectives == ("r", "g")
        _, again = follow(view, agreement_of(view, outcome))
        assert again.collectives == ("r", "g")
        assert_legal(view.graph, again.order)
