"""The way from graphs to outcomes: every mode, and every way in which a rank can fail."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

import overlap_core as oc
from overlap_core import OverlapConfig
from overlap_core.errors import GraphFormatError
from overlap_core.placement import Plan
from overlap_core.ranks import Mode, ModeDecision
from overlap_core.simulation import simulate, simulate_views
from overlap_core.verdicts import describe_outcome

from .pipeline_views import EXACT, Failing, hosted, same, skewed, slower_unless_pinned, two_layers
from .small_graphs import gather, graph_of, mm, on_ranks, opaque, reduce_scatter, wait

if TYPE_CHECKING:
    from overlap_core.outcome import RankOutcome
    from overlap_core.views import RankView


def decide(views: list[RankView]) -> RankOutcome:
    """The outcome of rank 0, after checking that all ranks tell the same story."""
    outcomes = simulate_views(views)
    assert len({(o.mode, o.why, o.committed, o.scope) for o in outcomes}) == 1
    for outcome in outcomes:
        assert outcome.legal
        if outcome.mode is Mode.ABORT:
            assert not outcome.committed
            assert outcome.graph is not None
            assert list(outcome.order) == [node.name for node in outcome.graph.nodes]
            assert all(gather.verdict == "unmoved" for gather in outcome.gathers)
    return outcomes[0]


def test_identical() -> None:
    outcome = decide(same(3))
    assert (outcome.mode, outcome.why) == (Mode.IDENTICAL, "one graph on all 3 ranks")
    assert " ".join(outcome.order) == "g0 a0 w.g0 b0 g1 a1 w.g1 b1"
    assert [gather.hoisted for gather in outcome.gathers] == [True, True]


def test_slot_keeps_one_order_of_communication() -> None:
    views = skewed({"scatter": True}, {"extra": 1, "scatter": True})
    outcome = decide(views)
    assert outcome.mode is Mode.SLOT
    assert outcome.why.startswith("graphs differ, the 3 skeleton entries match: rank 0: graph ")
    assert outcome.why.endswith(
        "; first difference at node 1: rank 0 has _c10d_functional::all_gather_into_tensor [64x8] "
        "bfloat16, rank 1 has aten::mm"
    )
    outcomes = simulate_views(views)
    assert outcomes[0].collectives == outcomes[1].collectives
    assert [g.slot for g in outcomes[0].gathers] == [g.slot for g in outcomes[1].gathers]


def test_pinned_says_where_the_skeletons_differ() -> None:
    views = skewed({"scatter": True}, {})
    outcome = decide(views)
    assert outcome.mode is Mode.PINNED
    assert "skeletons differ: rank 0: 3 entries" in outcome.why
    assert "skeletons differ at entry 1: _c10d_functional.reduce_scatter_tensor" in outcome.why
    assert outcome.why.endswith(
        "(rank 1); "
        "rank 0's skeleton has one more `_c10d_functional::reduce_scatter_tensor` than rank 1's"
    )


def test_different_numbers_of_gathers_abort() -> None:
    outcome = decide(skewed({}, {"gathers": 1}, {"gathers": 0}))
    assert outcome.mode is Mode.ABORT
    gather = "_c10d_functional.all_gather_into_tensor"
    assert outcome.why == (
        "different numbers of weight gathers: rank 0: 2; rank 1: 1; rank 2: 0; skeletons differ at "
        f"entry 1: {gather}.default [64x8] bfloat16 on group 0 of 3 ranks (rank 0), on one side "
        f"only; rank 0's skeleton has one more `{gather.replace('.', '::')}` than rank 1's"
    )


def test_a_rank_that_would_lose_pins_all() -> None:
    views = same(2, extra=2, scatter=True)
    free = decide(views)
    outcome = decide([views[0], slower_unless_pinned(views[1])])
    assert free.mode is Mode.IDENTICAL
    assert outcome.mode is Mode.PINNED
    assert outcome.committed
    assert outcome.why == (
        "one graph on all 2 ranks; pinned because on rank 1 7 ns more would be exposed than in "
        "program order"
    )


HOOKS = (
    "overlap_classify_node",
    "overlap_measure_cost",
    "overlap_choose_mode",
    "overlap_adjust_plan",
)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_on_one_rank_aborts_everywhere(hook: str) -> None:
    config = evolve(EXACT, mode_ladder="careful")
    graphs = [
        evolve(g, nodes=tuple(evolve(n, cost_ns=None) for n in g.nodes))
        for g in on_ranks(two_layers(), 3)
    ]
    views = []
    for rank, graph in enumerate(graphs):
        plugin = Failing(hook)
        plugin.active = rank == 1
        views.append(hosted(graph, config, plugin))
    outcome = decide(views)
    assert outcome.mode is Mode.ABORT
    assert "rank 1" in outcome.why
    assert "rank 0" not in outcome.why
    assert f"plugin 'failing', hook {hook}" in outcome.why
    assert f"RuntimeError: no {hook} today" in outcome.why


def test_a_long_complaint_is_cut_before_it_travels() -> None:
    class Chatty:
        overlap_plugin_name = "chatty"

        @oc.hookimpl
        def overlap_classify_node(self, node: Any) -> None:
            raise ValueError("\udc80blah " * 10_000)

    views = [hosted(graph, EXACT, Chatty()) for graph in on_ranks(two_layers(), 2)]
    assert len(decide(views).why) < 3000


def test_other_plugins_abort_and_are_named() -> None:
    graphs = on_ranks(two_layers(), 2)
    outcome = decide([hosted(graphs[0]), hosted(graphs[1], EXACT, Failing())])
    assert outcome.mode is Mode.ABORT
    assert outcome.why.startswith("different plugins: rank 0: nothing that others lack (digest ")
    assert "; rank 1: failing (digest " in outcome.why
    assert "OVERLAP_CORE_DISABLE_PLUGINS" in outcome.why


def test_another_configuration_aborts() -> None:
    graphs = on_ranks(two_layers(), 3)
    other = evolve(EXACT, slack_ns=7)
    outcome = decide([hosted(graphs[0]), hosted(graphs[1], other), hosted(graphs[2])])
    assert outcome.mode is Mode.ABORT
    assert outcome.why.startswith("different configuration: ranks 0, 2: ")
    assert "Give every rank the same OverlapConfig" in outcome.why


def test_a_rank_without_any_communication_aborts_those_that_count_on_it() -> None:
    silent = graph_of(mm("a"), rank=1)
    outcome = decide([hosted(on_ranks(two_layers(), 2)[0]), hosted(silent)])
    assert outcome.scope == (0, 1)
    assert outcome.mode is Mode.ABORT
    assert outcome.why.startswith("different numbers of weight gathers: rank 0: 2; rank 1: 0; ")
    assert outcome.why.endswith(
        "; rank 0's skeleton has 2 more `_c10d_functional::all_gather_into_tensor` than rank 1's"
    )


def test_a_rank_whose_graph_cannot_be_described_aborts_all() -> None:
    views = same(2)
    fault = "the graph cannot be described: GraphFormatError: nodes[3]: ..."
    broken = hosted(evolve(views[1].graph, nodes=(), outputs=()))
    vote = evolve(broken.vote, can=False, why=fault)
    outcome = decide([views[0], evolve(broken, vote=vote, fault=fault, skeleton=None)])
    assert outcome.mode is Mode.ABORT
    assert outcome.why == f"rank 1: cannot ({fault})"


def test_a_ladder_that_differs_between_ranks_aborts() -> None:
    class Moody:
        """Wants to pin on rank 1 only, which no ladder may."""

        overlap_plugin_name = "moody"

        def __init__(self, mode: Mode) -> None:
            self.mode = mode

        @oc.hookimpl
        def overlap_choose_mode(self, votes: Any) -> ModeDecision:
            return ModeDecision(mode=self.mode, why="for a reason of my own")

    config = evolve(EXACT, mode_ladder="moody")
    graphs = on_ranks(two_layers(), 2)
    modes = (Mode.IDENTICAL, Mode.PINNED)
    views = [hosted(g, config, Moody(mode)) for g, mode in zip(graphs, modes, strict=True)]
    outcome = decide(views)
    assert outcome.mode is Mode.ABORT
    assert outcome.why == (
        "the mode ladder is not the same function on all ranks: identical (rank 0), pinned (rank 1)"
    )
    views = [hosted(g, config, Moody(Mode.ABORT)) for g in graphs]
    assert decide(views).why == "for a reason of my own"


def test_a_policy_may_hold_gathers_back() -> None:
    class Lazy:
        overlap_plugin_name = "lazy"

        @oc.hookimpl
        def overlap_adjust_plan(self, plan: Any, graph: Any) -> Any:
            back = tuple(evolve(p, boundary=p.original) for p in plan.placements)
            return evolve(plan, placements=back)

    graphs = on_ranks(two_layers(), 2)
    outcome = decide([hosted(graph, EXACT, Lazy()) for graph in graphs])
    assert outcome.mode is Mode.IDENTICAL
    assert outcome.hoisted == 0


def test_stages_decide_for_themselves() -> None:
    stages = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    graphs = []
    for rank, ranks in stages.items():
        base = two_layers(gathers=1 if rank == 3 else 2)
        nodes = tuple(evolve(n, group_ranks=ranks if n.group_ranks else None) for n in base.nodes)
        graphs.append(evolve(base, rank=rank, world_size=4, nodes=nodes))
    outcomes = simulate(graphs)
    assert [outcome.scope for outcome in outcomes] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    modes = [outcome.mode for outcome in outcomes]
    assert modes == [Mode.IDENTICAL, Mode.IDENTICAL, Mode.ABORT, Mode.ABORT]


def test_communication_on_a_group_that_nobody_named_reaches_everybody() -> None:
    graphs = [
        graph_of(opaque("o", "x", group=None), mm("a", "o"), rank=rank, world_size=3)
        for rank in range(3)
    ]
    assert {outcome.scope for outcome in simulate(graphs)} == {(0, 1, 2)}


def test_graphs_that_cannot_belong_together_are_refused() -> None:
    one = graph_of(mm("a"))
    with pytest.raises(GraphFormatError, match="two graphs are of rank 0; give one graph a rank"):
        simulate([one, one])
    other = graph_of(mm("a"), rank=1, world_size=3)
    with pytest.raises(GraphFormatError, match=re.escape("rank 1 is of a world of 3 ranks")):
        simulate([one, other])


def test_a_gather_of_unknown_time_only_keeps_its_slack() -> None:
    unknown = {"ns": None, "sizes": (), "dtypes": (), "nbytes": None}
    graph = graph_of(mm("a"), mm("b"), gather("g", **unknown), wait("g"), mm("c", "w.g"))
    outcome = decide([hosted(graph) for graph in on_ranks(graph, 2)])
    assert outcome.costs[2].ns is None
    assert " ".join(outcome.order) == "a b g w.g c"
    slack = OverlapConfig(slack_ns=150)
    outcome = decide([hosted(graph, slack) for graph in on_ranks(graph, 2)])
    assert " ".join(outcome.order) == "g a b w.g c"


class Holding:
    """A policy that leaves every gather where it was."""

    overlap_plugin_name = "holding"

    @oc.hookimpl
    def overlap_adjust_plan(self, plan: Any, graph: Any) -> Any:
        placements = [
            evolve(p, boundary=p.original, why="held back by a policy") for p in plan.placements
        ]
        return evolve(plan, placements=tuple(placements))


def test_the_report_has_the_reason_that_a_policy_gave() -> None:
    views = [hosted(graph, EXACT, Holding()) for graph in on_ranks(two_layers(extra=2), 2)]
    for held in decide(views).gathers:
        assert held.verdict == "unmoved"
        assert held.why.endswith("stay exposed: held back by a policy")


class Tiring:
    """A policy that agrees with every plan, and raises once it was asked too often."""

    overlap_plugin_name = "tiring"

    def __init__(self) -> None:
        self.left = 1_000

    @oc.hookimpl
    def overlap_adjust_plan(self, plan: Any, graph: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("asked too often")


def test_calls_are_made_by_all_ranks_though_one_fails_to_describe_them() -> None:
    """The bound on memory is described after the decision, and asks policies once more."""
    nodes = []
    for i in range(6):
        reads = (f"w.g{i}", f"a{i - 1}" if i else "x")
        nodes += [gather(f"g{i}", ns=200), wait(f"g{i}"), mm(f"a{i}", *reads)]
    config = evolve(EXACT, coalesce=20, max_in_flight_bytes=20)
    policies = Tiring(), Tiring()
    graphs = on_ranks(graph_of(*nodes), 2)
    views = [hosted(g, config, p) for g, p in zip(graphs, policies, strict=True)]
    policies[1].left = 2
    described, failed = simulate_views(views)
    assert policies[1].left < 0
    assert described.committed
    assert [call.launches for call in described.coalesced] == [(0, 3), (6, 9), (12, 15)]
    assert failed.committed
    assert failed.coalesced == described.coalesced
    assert failed.order == described.order


def test_what_memory_holds_back_in_a_reordered_graph_with_calls_is_said() -> None:
    """The plan is about calls and about reductions that left early, the graph about neither."""
    nodes, before = [mm("start")], "start"
    for i in range(8):
        reads = (before, f"w.g{i}")
        nodes += [gather(f"g{i}", ns=1_000), wait(f"g{i}"), mm(f"a{i}", *reads, ns=300)]
        nodes += [mm(f"d{i}", f"a{i}", ns=50), mm(f"e{i}", ns=50)]
        if i:
            nodes += [reduce_scatter(f"r{i - 1}", f"d{i - 1}", ns=50), wait(f"r{i - 1}")]
        before = f"a{i}"
    graph = graph_of(*nodes, outputs=(before, *(f"w.r{i}" for i in range(7))))
    config = evolve(EXACT, coalesce=20, max_in_flight_bytes=20)
    views = [evolve(hosted(g, config), is_backward=True) for g in on_ranks(graph, 2)]
    for outcome in simulate_views(views):
        assert outcome.committed
        assert len(outcome.gathers) == 8
        assert outcome.coalesced
        held = [g.why for g in outcome.gathers if g.verdict == "memory-limited"]
        assert held
        words = "held by memory: 40 B would be in flight of 20 B allowed (max_in_flight_bytes)"
        assert all(words in why for why in held)


def test_an_outcome_that_cannot_be_described_still_says_what_is_committed() -> None:
    [view] = same(1)
    order = tuple(range(len(view.graph.nodes)))
    decision = ModeDecision(mode=Mode.SLOT, why="for a test")
    described, whole = (
        describe_outcome(v, (0,), (view.vote,), decision, Plan(), order, committed=True)
        for v in (evolve(view, costs=()), view)
    )
    assert "could not be described" in described.notes[0]
    assert described.collectives == whole.collectives
    assert described.collectives
    assert described.skeleton == whole.skeleton


def held_by_memory(nbytes: int, bound: int | None) -> RankOutcome:
    """Layers whose gathers take longer than a layer computes, behind much other compute."""
    nodes = [mm("start", ns=5_000)]
    for i in range(6):
        last = [f"a{i - 1}"] if i else ["start"]
        nodes += [gather(f"g{i}", ns=300, nbytes=nbytes), wait(f"g{i}")]
        nodes.append(mm(f"a{i}", f"w.g{i}", *last))
    config = evolve(EXACT, max_in_flight_bytes=bound)
    [outcome] = simulate_views([hosted(graph_of(*nodes), config)])
    return outcome


@pytest.mark.parametrize(
    ("nbytes", "bound", "words"),
    [
        (10, 19, "held by memory: 20 B would be in flight of 19 B allowed (max_in_flight_bytes)"),
        (
            1 << 30,
            None,
            "held by memory: 3 GiB would be in flight of 2 GiB allowed (twice the largest region)",
        ),
    ],
)
def test_what_the_bound_on_memory_holds_back_is_said(
    nbytes: int, bound: int | None, words: str
) -> None:
    outcome = held_by_memory(nbytes, bound)
    limited = [g for g in outcome.gathers if g.verdict == "memory-limited"]
    assert limited
    assert all(words in gather.why for gather in limited)
    [note] = [note for note in outcome.notes if note.startswith("memory: ")]
    assert "held back" in note


def test_memory_is_no_matter_where_everything_fits() -> None:
    outcome = held_by_memory(10, None)
    assert not any(note.startswith("memory: ") for note in outcome.notes)
