"""The kit's assertions pass what is right, and show what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import example, given

from overlap_core.testing import (
    FakeRanks,
    GraphBuilder,
    assert_legal,
    assert_same_collective_sequence,
    graphs_for_ranks,
)
from overlap_core.testing.strategies import RankSet, rank_sets

from ..parted import swapped_ops, swapped_reductions

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlap_core.outcome import RankOutcome


def layers(g: GraphBuilder) -> None:
    y = g.mm("x", g.gather("w0"))
    y = g.mm(g.reduce_scatter(y, name="r"), g.gather("w1"))
    g.compute("aten.copy_", y, mutates=("cache",), writes=(), name="copy")
    g.mm("cache", name="last", after=("mm0",))


def reorder(outcome: RankOutcome, *order: str) -> RankOutcome:
    """The outcome with nodes moved to the front."""
    rest = [name for name in outcome.order if name not in order]
    issuing = [name for name in (*order, *rest) if name in outcome.collectives]
    return evolve(outcome, order=(*order, *rest), collectives=tuple(issuing))


@pytest.fixture
def outcomes() -> tuple[RankOutcome, ...]:
    return FakeRanks(graphs=graphs_for_ranks(2, layers)).run()


def test_what_the_pass_decides_is_right(outcomes: tuple[RankOutcome, ...]) -> None:
    assert any(outcome.hoisted for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.graph is not None
        assert_legal(outcome.graph, outcome.order)
    assert_same_collective_sequence(outcomes)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (["wait_w0"], "node 'wait_w0' reads buffer 'w0' before anything has written it"),
        (["last"], "node 'last' must come after 'mm0'"),
        (
            ["w0", "wait_w0", "mm0", "last"],
            "sees in buffer 'cache' what 'cache' made; in program order it is what 'copy' made",
        ),
        (["w0", "w0"], r"the order has nodes more than once: \['w0'\]"),
        (["w9"], r"the order is not one of this graph: unknown \['w9'\]"),
    ],
)
def test_illegal_orders(first: list[str], message: str) -> None:
    (graph,) = graphs_for_ranks(1, layers)
    rest = [node.name for node in graph.nodes if node.name not in first]
    with pytest.raises(AssertionError, match=message):
        assert_legal(graph, [*first, *rest])


def test_missing_nodes_and_last_writers() -> None:
    g = GraphBuilder()
    for name in ("a", "b"):
        g.compute("aten.fill_", mutates=("cache",), writes=(), name=name)
    graph = g.build()
    with pytest.raises(AssertionError, match=r"not one of this graph: missing \['b'\]"):
        assert_legal(graph, ["a"])
    with pytest.raises(AssertionError, match="node 'b' sees in buffer 'cache' what 'cache' made"):
        assert_legal(graph, ["b", "a"])


def test_a_launch_that_moved_on_one_rank_only(outcomes: tuple[RankOutcome, ...]) -> None:
    moved = [outcomes[0], reorder(outcomes[1], "r")]
    with pytest.raises(AssertionError) as raised:
        assert_same_collective_sequence(moved)
    message = str(raised.value)
    assert message.startswith("ranks 0 and 1 issue different collectives, first at 0\nrank 0:\n")
    gather = "_c10d_functional.all_gather_into_tensor.default bfloat16 on group 0 of 2 [1024, 256]"
    scatter = "_c10d_functional.reduce_scatter_tensor.default bfloat16 on group 0 of 2 [1024, 256]"
    assert f"rank 0:\n  > 0: #0 {gather} (w0)\n" in message
    assert f"rank 1:\n  > 0: #1 {scatter} (r)\n    1: #0 {gather} (w0)\n" in message


def test_gathers_of_equal_shape_that_swapped(outcomes: tuple[RankOutcome, ...]) -> None:
    moved = [outcomes[0], reorder(outcomes[1], "w1", "w0")]
    with pytest.raises(AssertionError, match="different collectives, first at 0"):
        assert_same_collective_sequence(moved)


def test_ranks_without_a_common_group_may_differ() -> None:
    def stages(g: GraphBuilder) -> None:
        for i in range(1 + g.rank // 2):
            g.mm(g.gather(f"w{i}", group="stage"))

    groups = [{"stage": (0, 1)}] * 2 + [{"stage": (2, 3)}] * 2
    graphs = []
    for rank, own in enumerate(groups):
        builder = GraphBuilder(rank=rank, ranks=4, groups=own)
        stages(builder)
        graphs.append(builder.build())
    outcomes = FakeRanks(graphs=graphs).run()
    assert_same_collective_sequence(outcomes)
    with pytest.raises(AssertionError, match="ranks 2 and 3 issue different collectives"):
        assert_same_collective_sequence([*outcomes[:3], reorder(outcomes[3], "w1", "w0")])


def test_only_the_groups_that_two_ranks_share_count() -> None:
    def fill(g: GraphBuilder) -> None:
        if g.rank == 1:
            g.mm(g.all_reduce("x", group="alone"))
        g.mm(g.gather("w0"))

    graphs = graphs_for_ranks(2, fill, groups={"alone": (1,)})
    assert_same_collective_sequence(FakeRanks(graphs=graphs).run())


def one_more(g: GraphBuilder) -> None:
    layers(g)
    if g.rank == 1:
        g.all_reduce("x", name="more")


def test_programs_that_differ_already() -> None:
    outcomes = FakeRanks(graphs=graphs_for_ranks(2, one_more)).run()
    with pytest.raises(AssertionError, match=r"first at 3\n(.*\n)*  > 3: \(nothing more\)"):
        assert_same_collective_sequence(outcomes)
    assert_same_collective_sequence(outcomes, tolerate_program_differences=True)
    moved = [outcomes[0], reorder(outcomes[1], "r")]
    with pytest.raises(AssertionError, match="nothing may move, but on rank 1 something did"):
        assert_same_collective_sequence(moved, tolerate_program_differences=True)


@pytest.mark.parametrize("ranks", [swapped_reductions(), swapped_ops()])
def test_an_order_that_was_restored_is_one_sequence(ranks: RankSet) -> None:
    first, second = FakeRanks(graphs=ranks.graphs).run()
    assert any("one order was restored" in note for note in second.notes)
    assert_same_collective_sequence([first, second])
    for tolerate in (False, True):
        for one, other in zip(second.collectives, second.collectives[1:], strict=False):
            with pytest.raises(AssertionError, match="ranks 0 and 1 issue different collectives"):
                assert_same_collective_sequence(
                    [first, reorder(second, *_swap(second, one, other))],
                    tolerate_program_differences=tolerate,
                )


def _swap(outcome: RankOutcome, one: str, other: str) -> list[str]:
    names = {one: other, other: one}
    return [names.get(name, name) for name in outcome.order]


def test_equal_gathers_are_told_apart_by_where_they_were_captured() -> None:
    def fill(g: GraphBuilder) -> None:
        for name in ("w1", "w0") if g.rank else ("w0", "w1"):
            g.gather(name, captured=int(name[1]))
        g.mm("w0", "w1", captured=2)

    first, second = FakeRanks(graphs=graphs_for_ranks(2, fill)).run()
    assert first.collectives == second.collectives == ("w0", "w1")
    assert_same_collective_sequence([first, second])
    with pytest.raises(AssertionError, match="ranks 0 and 1 issue different collectives"):
        assert_same_collective_sequence([first, reorder(second, "w1", "w0")])


def test_sizes_count_where_both_are_static() -> None:
    def sized(size: int | str) -> None:
        def fill(g: GraphBuilder) -> None:
            g.mm(g.gather("w0", sizes=(size if g.rank else 8, 4)))

        assert_same_collective_sequence(FakeRanks(graphs=graphs_for_ranks(2, fill)).run())

    sized("s0")
    with pytest.raises(AssertionError, match=r"\[8, 4\]"):
        sized(9)


def exchanges(*rows: int) -> Callable[[GraphBuilder], None]:
    def fill(g: GraphBuilder) -> None:
        names = [
            g.all_to_all("x", name=f"e{i}", sizes=(count + g.rank, 4))
            for i, count in enumerate(rows)
        ]
        g.mm(*names, g.gather("w"))

    return fill


def test_rows_of_exchanges_may_be_each_ranks_own() -> None:
    outcomes = FakeRanks(graphs=graphs_for_ranks(2, exchanges(8, 64))).run()
    assert outcomes[0].mode == "identical"
    assert_same_collective_sequence(outcomes)
    moved = [outcomes[0], reorder(outcomes[1], "e1", "e0")]
    with pytest.raises(AssertionError, match="different collectives, first at 0"):
        assert_same_collective_sequence(moved)


def test_sizes_that_swapped_are_no_rows_of_ranks_own() -> None:
    """Rank 0 has what rank 1 has one exchange later."""
    outcomes = FakeRanks(graphs=graphs_for_ranks(2, exchanges(9, 8))).run()
    assert outcomes[0].mode == "pinned"
    with pytest.raises(AssertionError, match="different collectives, first at 0"):
        assert_same_collective_sequence(outcomes)
    assert_same_collective_sequence(outcomes, tolerate_program_differences=True)


def test_an_outcome_without_a_graph_is_refused(outcomes: tuple[RankOutcome, ...]) -> None:
    with pytest.raises(ValueError, match="the outcome of rank 0 has no graph"):
        assert_same_collective_sequence([evolve(outcomes[0], graph=None)])


@given(rank_sets())
@example(swapped_reductions())
@example(swapped_ops())
def test_all_that_ranks_may_look_like(ranks: RankSet) -> None:
    outcomes = FakeRanks(graphs=ranks.graphs).run()
    assert_same_collective_sequence(outcomes, tolerate_program_differences=True)
    if ranks.divergence in ("identical", "compute"):
        assert_same_collective_sequence(outcomes)
