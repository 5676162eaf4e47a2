"""The ladders by themselves, and in a simulation of the whole pipeline."""

from __future__ import annotations

import random
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import overlap_mode_ladders
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from overlap_mode_ladders import compose, conservative, majority, strict

from overlap_core import Node, NodeKind, OverlapConfig, OverlapGraph, simulate
from overlap_core.builtin import ladder as builtin_ladder
from overlap_core.errors import ConfigError, PluginError
from overlap_core.host import PluginHost
from overlap_core.ranks.votes import Mode, ModeDecision, Vote
from overlap_core.testing import GraphBuilder, graphs_for_ranks
from overlap_core.testing.strategies import RankSet, rank_sets

if TYPE_CHECKING:
    from overlap_core import RankOutcome

LADDERS = {"strict": strict, "conservative": conservative, "majority": majority}
EXPECTED = {
    "default": tuple(Mode),
    "strict": (Mode.IDENTICAL, Mode.ABORT, Mode.ABORT, Mode.ABORT),
    "conservative": (Mode.PINNED, Mode.PINNED, Mode.PINNED, Mode.ABORT),
    "majority": (Mode.ABORT,) * 4,
}
"""For each decision of `default`, from identical to abort."""
DIVERGENCE = ("none", "compute", "skeleton", "count")
slowly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

few = st.sampled_from(["a", "b"])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "can": st.booleans(),
    "config": few,
    "plugins": few,
    "fingerprint": few,
    "skeleton": few,
    "entries": st.integers(3, 4),
    "weight_gathers": st.integers(2, 3),
}
BASE = Vote(rank=0, can=True, fingerprint="f", skeleton="s", entries=3, weight_gathers=2)


@st.composite
def ballots(draw: st.DrawFn) -> tuple[Vote, ...]:
    """Votes of 1 to 6 ranks that differ in few things, so that every decision is common."""
    ranks = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True))
    varied = sorted(draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=3)))
    return tuple(
        attrs.evolve(BASE, rank=rank, **{name: draw(VALUES[name]) for name in varied})
        for rank in ranks
    )


def from_default(name: str, mode: Mode) -> Mode:
    return EXPECTED[name][tuple(Mode).index(mode)]


def choose(ladder: str, votes: tuple[Vote, ...], *plugins: object) -> ModeDecision:
    host = PluginHost.discover(
        OverlapConfig(mode_ladder=ladder), plugins=[overlap_mode_ladders, *plugins], environ={}
    )
    return host.choose_mode(votes)


def module(**members: object) -> ModuleType:
    """A plugin of a stranger, given as a module."""
    made = ModuleType("stranger")
    vars(made).update(members)
    return made


def graph(rank: int, diverge: str = "none") -> OverlapGraph:
    """Two matmuls, each behind a weight gather with an all-reduce before it; rank 1 may differ."""
    differs = diverge if rank else "none"
    nodes, inputs, ready = list[Node](), ["x"], "x"

    def compute(name: str, reads: tuple[str, ...], out: str) -> None:
        nodes.append(
            Node(
                name=name,
                kind=NodeKind.COMPUTE,
                op="aten.mm.out",
                reads=reads,
                writes=(out,),
                sizes=((64, 64),),
                dtypes=("float32",),
                cost_ns=500_000,
            )
        )

    def collective(name: str, op: str, read: str, out: str) -> None:
        nodes.append(
            Node(
                name=name,
                kind=NodeKind.COLLECTIVE,
                op=f"_c10d_functional.{op}.default",
                reads=(read,),
                writes=(f"{out}_launched",),
                sizes=((64, 64),),
                dtypes=("float32",),
                group="0",
                group_ranks=(0, 1),
                nbytes=16_384,
                cost_ns=100_000,
            )
        )
        wait = "_c10d_functional.wait_tensor.default"
        nodes.append(
            Node(
                name=f"{name}_wait",
                kind=NodeKind.WAIT,
                op=wait,
                reads=(f"{out}_launched",),
                writes=(out,),
            )
        )

    if differs == "compute":
        compute("extra", ("x",), "unused")
    for layer in range(3 if differs == "count" else 2):
        compute(f"mm{layer}", (ready, ready), f"y{layer}")
        for number in range(2 if differs == "skeleton" and layer else 1):
            collective(f"reduce{layer}_{number}", "all_reduce", f"y{layer}", f"r{layer}_{number}")
        inputs.append(f"shard{layer}")
        collective(f"gather{layer}", "all_gather_into_tensor", f"shard{layer}", f"w{layer}")
        compute(f"use{layer}", (f"r{layer}_0", f"w{layer}"), ready := f"z{layer}")
    return OverlapGraph(
        rank=rank, world_size=2, inputs=tuple(inputs), outputs=(ready,), nodes=tuple(nodes)
    )


def test_it_is_installed() -> None:
    (point,) = metadata.entry_points(group="overlap_core", name="mode_ladders")
    assert point.load() is overlap_mode_ladders
    host = PluginHost.discover(OverlapConfig())
    assert {"default", *LADDERS} <= {*host.ladders()}
    (info,) = (plugin for plugin in host.plugins() if plugin.name == point.name)
    assert (info.distribution, info.hooks) == ("overlap-mode-ladders", ("overlap_choose_mode",))


def test_modes_are_listed_from_the_freest_to_the_most_careful() -> None:
    assert tuple(Mode) == ("identical", "slot", "pinned", "abort")


@pytest.mark.parametrize("name", LADDERS)
@given(ballot=ballots())
@slowly
def test_overlap_choose_mode(name: str, ballot: tuple[Vote, ...]) -> None:
    default = builtin_ladder.default(ballot)
    decision = LADDERS[name](ballot)
    assert decision.mode is from_default(name, default.mode)
    assert decision.why
    assert name == "majority" or default.why in decision.why


@pytest.mark.parametrize("name", LADDERS)
@given(ballot=ballots(), rng=st.randoms(use_true_random=False))
@slowly
def test_ladders_are_pure_functions_of_the_votes(
    name: str, ballot: tuple[Vote, ...], rng: random.Random
) -> None:
    first = LADDERS[name](ballot)
    shuffled = list(ballot)
    rng.shuffle(shuffled)
    random.random()  # a state that another rank doesn't share
    assert LADDERS[name](tuple(shuffled)) == first


@pytest.mark.parametrize("name", LADDERS)
@given(ballot=ballots())
@slowly
def test_the_host_accepts_every_decision(name: str, ballot: tuple[Vote, ...]) -> None:
    assert choose(name, ballot) == LADDERS[name](tuple(sorted(ballot, key=lambda v: v.rank)))


@pytest.mark.parametrize("diverge", DIVERGENCE)
@pytest.mark.parametrize("name", ["default", *LADDERS])
def test_simulated_ranks_all_end_in_the_expected_mode(name: str, diverge: str) -> None:
    graphs = [graph(rank, diverge) for rank in range(2)]
    outcomes = simulate(graphs, OverlapConfig(mode_ladder=name), plugins=[overlap_mode_ladders])
    expected = from_default(name, tuple(Mode)[DIVERGENCE.index(diverge)])
    assert [outcome.mode for outcome in outcomes] == [expected] * 2
    assert len({outcome.why for outcome in outcomes}) == 1
    for outcome, rank_graph in zip(outcomes, graphs, strict=True):
        program = tuple(node.name for node in rank_graph.nodes)
        communication = tuple(n.name for n in rank_graph.nodes if n.kind is NodeKind.COLLECTIVE)
        if expected is Mode.ABORT:
            assert outcome.order == program
        if expected is Mode.PINNED:
            assert outcome.collectives == communication
        if expected is Mode.IDENTICAL:
            assert outcome.hoisted


def two_swapped_reductions() -> RankSet:
    """Ranks whose orders had parted before they came: one of both is restored."""

    def fill(g: GraphBuilder) -> None:
        for number in (1, 0) if g.rank else (0, 1):
            g.reduce_scatter("x", name=f"r{number}", sizes=(number + 1,))
        g.mm(g.mm("r0", "r1"), g.gather("w"))

    graphs = graphs_for_ranks(2, fill)
    return RankSet(graphs=tuple(graphs), stages=((0, 1),), divergence="skeleton")


RESTORED = "one order of communication was restored, no gather moved: "


def is_only_restored(outcome: RankOutcome) -> bool:
    return outcome.mode is Mode.PINNED and outcome.why.startswith(RESTORED)


@pytest.mark.parametrize("name", LADDERS)
@given(ranks=rank_sets(max_items=8, max_ranks=3))
@example(ranks=two_swapped_reductions())
@settings(slowly, max_examples=20)
def test_simulated_ranks_never_get_more_than_the_ladder_allows(name: str, ranks: RankSet) -> None:
    """But for orders that had parted: those are restored, and nothing moves beyond that."""
    plugins = [overlap_mode_ladders]
    plain = simulate(ranks.graphs, plugins=plugins)
    bound = simulate(ranks.graphs, OverlapConfig(mode_ladder=name), plugins=plugins)
    still = {
        outcome.rank: outcome.order == tuple(node.name for node in graph.nodes)
        for outcome, graph in zip(bound, ranks.graphs, strict=True)
    }
    for outcome, unbound in zip(bound, plain, strict=True):
        allowed = from_default(name, builtin_ladder.default(unbound.votes).mode)
        event(f"{allowed} allowed, {outcome.mode}: {outcome.why[: len(RESTORED)]}")
        if allowed is Mode.ABORT and is_only_restored(outcome):
            # The order is that of a rank, and that rank moves nothing at all.
            assert any(still[rank] for rank in outcome.scope)
            assert any("nothing was moved beyond it" in note for note in outcome.notes)
            # As it would have been without a ladder that says no: the ranks had parted.
            assert any("one order was restored" in note for note in unbound.notes)
            continue
        assert tuple(Mode).index(outcome.mode) >= tuple(Mode).index(allowed)
        if allowed is Mode.IDENTICAL:
            assert (outcome.mode, outcome.order) == (unbound.mode, unbound.order)
        if allowed is Mode.ABORT:
            assert not outcome.committed
            assert still[outcome.rank]


def test_parted_orders_are_restored_though_the_ladder_says_no() -> None:
    graphs = two_swapped_reductions().graphs
    for name in ("majority", "strict"):
        config = OverlapConfig(mode_ladder=name)
        first, second = simulate(graphs, config, plugins=[overlap_mode_ladders])
        if name == "majority":
            assert is_only_restored(first)
            assert "majority is refused" in first.why
            assert (first.order, first.hoisted) == (tuple(n.name for n in graphs[0].nodes), 0)
        assert first.collectives == second.collectives
        assert first.mode is second.mode


def test_majority_says_why_it_is_refused() -> None:
    (outcome,) = simulate(
        [attrs.evolve(graph(0), world_size=2)],
        OverlapConfig(mode_ladder="majority"),
        plugins=[overlap_mode_ladders],
    )
    assert outcome.mode is Mode.ABORT
    assert "a ladder must be the same function on all ranks" in outcome.why
    assert outcome.hoisted == 0


def test_a_majority_of_what_each_rank_heard_so_far_ends_differently(readme_majority: Any) -> None:
    """The README's example, over every set of votes that a rank may have heard."""
    votes = [Vote(rank=rank, can=True, fingerprint=graph) for rank, graph in enumerate("ffgh")]
    heard = {
        rank: {
            readme_majority([votes[rank], *(v for v in votes if v.rank not in (rank, late))])
            for late in range(4)
            if late != rank
        }
        for rank in range(4)
    }
    assert heard[0] == {Mode.IDENTICAL, Mode.SLOT}  # one rank, by who was late
    assert heard[3] == {Mode.IDENTICAL, Mode.SLOT}
    assert majority(tuple(votes)).mode is Mode.ABORT


def test_a_majority_of_all_votes_is_refused_by_the_core(readme_majority: Any) -> None:
    def by_majority(votes: tuple[Vote, ...]) -> ModeDecision:
        return ModeDecision(mode=readme_majority(list(votes)), why="most of us have one graph")

    plugin = module(counted=mark(by_majority))
    votes = tuple(
        attrs.evolve(BASE, rank=rank, fingerprint=graph) for rank, graph in enumerate("ffg")
    )
    with pytest.raises(PluginError, match="chose mode identical where the votes allow slot"):
        choose("by_majority", votes, plugin)


def mark(function: Any) -> Any:
    from overlap_core import hookimpl

    return hookimpl(specname="overlap_choose_mode")(function)


def test_ranks_with_different_ladders_keep_program_order() -> None:
    configs = [OverlapConfig(mode_ladder=name) for name in ("strict", "default")]
    votes = tuple(
        attrs.evolve(BASE, rank=rank, config=config.digest()) for rank, config in enumerate(configs)
    )
    decisions = [choose(config.mode_ladder, votes) for config in configs]
    assert [decision.mode for decision in decisions] == [Mode.ABORT] * 2
    assert decisions[0] == decisions[1]


def test_a_ladder_of_the_same_name_elsewhere_is_refused() -> None:
    with pytest.raises(PluginError, match="both offer a mode ladder named 'strict'"):
        choose("strict", (BASE,), module(strict=strict))


def test_without_the_plugin_the_name_is_unknown() -> None:
    config = OverlapConfig(mode_ladder="strict")
    plain = PluginHost.discover(OverlapConfig())
    left_out = [p.name for p in plain.plugins() if p.name == "mode_ladders"]
    with pytest.raises(ConfigError, match="no plugin offers a ladder of this name"):
        PluginHost.discover(attrs.evolve(config, disable_plugins=left_out), environ={})


def test_compose_is_no_ladder_itself() -> None:
    host = PluginHost.discover(OverlapConfig(), plugins=[overlap_mode_ladders], environ={})
    assert compose.__name__ not in host.ladders()


@pytest.fixture
def readme_majority() -> Any:
    """The function that the README warns of."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = (part for part in readme.split("```python\n") if "def count_what_i_heard" in part)
    space: dict[str, Any] = {}
    exec(block.partition("```")[0], space)
    return space["count_what_i_heard"]
