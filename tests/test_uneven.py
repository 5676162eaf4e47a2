"""Ranks whose static sizes are their own share of the rows, from their graphs to one order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

from overlap_core import NodeKind, OverlapConfig
from overlap_core.ranks import Mode
from overlap_core.simulation import simulate
from overlap_core.testing import assert_legal, assert_same_collective_sequence, graphs_for_ranks
from overlap_core.testing.strategies import RankSet, rank_sets

from .oracles import is_one_sequence, issued, issues_communication
from .test_common_order import shuffle

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlap_core import Node, OverlapGraph, RankOutcome
    from overlap_core.testing import GraphBuilder

ROWS = (512, 640)
FITTING = {"sent": ((256, 320),) * 2, "received": ((256, 256), (320, 320))}
"""By rank: what each has is spread over both."""
EVEN = {"sent": ((256, 256), (320, 320)), "received": ((256, 256), (320, 320))}
"""By rank: each takes its own rows for everybody's."""


def exchange(g: GraphBuilder, source: str, **rows: Any) -> str:
    more = {key: value[g.rank] for key, value in rows.items()}
    return g.all_to_all(source, group="cp", sizes=(ROWS[g.rank], 256), **more)


def attention(g: GraphBuilder, source: str) -> str:
    return g.opaque("mylib::attn_cp", source, group="cp", sizes=(1, ROWS[g.rank], 8, 64))


def layers(communicate: Callable[..., str], **more: Any) -> Callable[[GraphBuilder], None]:
    """Two gathers, and what communicates rows between compute of this rank's rows."""

    def fill(g: GraphBuilder) -> None:
        y = g.mm("x", g.gather("w0"), sizes=(ROWS[g.rank], 256))
        y = communicate(g, y, **more)
        y = g.mm(y, sizes=(ROWS[g.rank] * 8, 32), ns=500_000)
        g.mm(y, g.gather("w1"), sizes=(ROWS[g.rank], 256))

    return fill


def run(fill: Callable[[GraphBuilder], None], ranks: int = 2) -> tuple[RankOutcome, ...]:
    outcomes = simulate(graphs_for_ranks(ranks, fill))
    assert len({(outcome.mode, outcome.why, outcome.notes) for outcome in outcomes}) == 1
    return outcomes


@pytest.mark.parametrize("fill", [layers(exchange), layers(exchange, **FITTING), layers(attention)])
def test_static_sizes_that_a_ranks_share_decides_keep_freedom(
    fill: Callable[[GraphBuilder], None],
) -> None:
    first, second = run(fill)
    assert (first.mode, first.why) == (Mode.IDENTICAL, "one graph on all 2 ranks")
    assert first.hoisted
    assert first.order == second.order
    assert first.fingerprint != second.fingerprint
    [note] = first.notes
    assert note.startswith("the static sizes of one operation are not compared, since each rank's ")
    assert "512x" in note
    assert "640x" in note
    assert_same_collective_sequence([first, second])


def test_ends_that_do_not_agree_are_both_named() -> None:
    outcome, _ = run(layers(exchange, **EVEN))
    assert outcome.mode is Mode.PINNED
    assert outcome.why.endswith(
        "skeletons differ at entry 1: _c10d_functional.all_to_all_single.default [512x256] "
        "bfloat16 on group 1 of 2 ranks, of which rank 0 (all_to_all_single0) sends 256 rows to "
        "rank 1 (all_to_all_single0), and that one expects 320"
    )
    assert not outcome.notes


def test_symbolic_sizes_are_one_graph_as_ever() -> None:
    def fill(g: GraphBuilder) -> None:
        name = ("s3", "s7")[g.rank]
        y = g.all_to_all(g.mm("x", g.gather("w0"), sizes=(name, 8)), sizes=(name, 8), group="cp")
        g.mm(g.mm(y, sizes=(f"{name}*2", 4)), g.gather("w1"), sizes=(name, 8))

    outcome, _ = run(fill)
    assert outcome.mode is Mode.IDENTICAL
    assert not outcome.notes


def test_other_compute_beside_leaves_them_in_slot() -> None:
    def fill(g: GraphBuilder) -> None:
        layers(attention)(g)
        g.extra_compute(g.rank)

    outcome, _ = run(fill)
    assert outcome.mode is Mode.SLOT
    assert (
        "first difference at node 8: rank 1 has aten::mm [#x#] bfloat16, the other graph ends"
        in (outcome.why)
    )
    assert len(outcome.notes) == 1


def test_sizes_of_compute_alone_are_other_compute() -> None:
    def fill(g: GraphBuilder) -> None:
        g.mm(g.all_reduce(g.mm("x", g.gather("w"), sizes=(ROWS[g.rank], 8))))

    outcome, _ = run(fill)
    assert outcome.mode is Mode.SLOT
    assert "[512x8]" in outcome.why


def swapped(
    *rows: tuple[int, int], known: bool = False, opaque: bool = False
) -> Callable[[GraphBuilder], None]:
    """Operations of other numbers of rows on each rank, which rank 1 issues the other way round."""

    def fill(g: GraphBuilder) -> None:
        y = g.mm("x", g.gather("w0"))
        numbered = list(enumerate(rows))
        for number, counts in numbered[::-1] if g.rank else numbered:
            more: dict[str, Any] = {"name": f"e{number}", "sizes": (counts[g.rank], 8)}
            more |= {"captured": number + 1} if known else {}
            if opaque:
                g.opaque("mylib::attn_cp", y, group="cp", **more)
            else:
                g.all_to_all(y, group="cp", **more)
        g.mm(*(f"e{number}" for number, _ in numbered))
        g.mm("mm1", g.gather("w1"))

    def known_places(g: GraphBuilder) -> None:
        fill(g)
        if known:
            places = {"w0": 0, "w1": 9}
            g._nodes |= {
                name: evolve(g._nodes[name], captured=place) for name, place in places.items()
            }

    return known_places


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        ((512, 512), (640, 640)),
        ((512, 640), (256, 256)),
        ((512, 640), (100, 120)),
    ],
)
def test_operations_that_swapped_on_one_rank_are_a_difference(
    rows: tuple[tuple[int, int], ...], opaque: bool
) -> None:
    outcomes = run(swapped(*rows, opaque=opaque))
    names = [[name for name in outcome.collectives if name[0] == "e"] for outcome in outcomes]
    assert outcomes[0].mode is Mode.PINNED
    assert names in ([["e0", "e1"], ["e1", "e0"]], [["e0", "e1"]] * 2)


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize(
    "rows", [((512, 512), (640, 640)), ((512, 640), (256, 256)), ((512, 640), (100, 120))]
)
def test_where_the_captured_order_is_known_one_order_is_restored(
    rows: tuple[tuple[int, int], ...], opaque: bool
) -> None:
    outcomes = run(swapped(*rows, known=True, opaque=opaque))
    for outcome in outcomes:
        assert [name for name in outcome.collectives if name[0] == "e"] == ["e0", "e1"]
        assert "one order was restored on all of them" in outcome.notes[0]
        assert outcome.mode is Mode.IDENTICAL
    assert_same_collective_sequence(outcomes)


def test_ends_that_agree_outweigh_what_sizes_look_like() -> None:
    """The first of one rank is as large as the second of the other, and they don't meet."""
    sent = (((4, 4), (4, 4)), ((6, 2), (2, 6)))
    received = (((4, 6), (4, 2)), ((4, 2), (4, 6)))

    def fill(g: GraphBuilder) -> None:
        y = g.mm("x", g.gather("w0"))
        for number in range(2):
            rows = received[g.rank][number]
            more: dict[str, Any] = {"sent": sent[g.rank][number], "received": rows}
            g.all_to_all(y, name=f"e{number}", group="cp", sizes=(sum(rows), 8), **more)
        g.mm("e0", "e1", g.gather("w1"))

    outcomes = run(fill)
    assert outcomes[0].mode is Mode.IDENTICAL, outcomes[0].why
    assert_same_collective_sequence(outcomes)


FACTORS = (101, 103, 107, 109, 113)
"""By rank; no product of one is likely to be that of another."""


def with_own_rows(ranks: RankSet) -> RankSet:
    """The set with rows of each rank's own, in shapes that are static on all ranks.

    Reduce-scatters become all-to-alls, of which each rank's rows are spread over all of them.
    """
    return evolve(ranks, graphs=tuple(map(_with_own_rows, ranks.graphs)))


def _with_own_rows(graph: OverlapGraph) -> OverlapGraph:
    factor = FACTORS[graph.rank]

    def own(node: Node) -> Node:
        if "reduce_scatter" in node.op:
            rows: dict[str, Any] = {"op": "_c10d_functional.all_to_all_single.default"}
            if node.group_ranks is not None:
                sent = tuple(FACTORS[rank] for rank in node.group_ranks)
                rows |= {"sent": sent, "received": (factor,) * len(sent)}
            node = evolve(node, **rows)
        elif node.kind is not NodeKind.COMPUTE and not node.issues_collective:
            return node
        sizes = tuple(
            (dims[0] * factor, *dims[1:]) if all(isinstance(d, int) for d in dims) else dims
            for dims in node.sizes
        )
        return evolve(node, sizes=sizes)

    return evolve(graph, nodes=tuple(map(own, graph.nodes)))


@given(rank_sets("identical", max_ranks=4).map(with_own_rows))
def test_ranks_that_differ_in_their_rows_only_are_one_graph(ranks: RankSet) -> None:
    outcomes = simulate(ranks.graphs)
    for _, group in itertools.groupby(outcomes, key=lambda outcome: outcome.scope):
        scope = list(group)
        event(str(scope[0].mode))
        slower = "would be exposed" in scope[0].why or "the step would take" in scope[0].why
        if scope[0].mode is Mode.SLOT:  # other compute, and nobody communicates such rows
            assert is_one_sequence([issued(outcome, outcome.order) for outcome in scope])
            sizes = {tuple(entry.sizes for entry in outcome.skeleton) for outcome in scope}
            assert len(sizes) == 1
            continue
        assert scope[0].mode is Mode.IDENTICAL or slower, scope[0].why
        assert len({outcome.positions for outcome in scope}) == 1
    assert_same_collective_sequence(outcomes)


@given(rank_sets(max_ranks=4).map(with_own_rows))
def test_communication_is_in_one_order_on_all_ranks(ranks: RankSet) -> None:
    outcomes = simulate(ranks.graphs, OverlapConfig(contention=1, slack_ns=0))
    for outcome in outcomes:
        assert outcome.graph is not None
        assert_legal(outcome.graph, outcome.order)
    assert_same_collective_sequence(outcomes, tolerate_program_differences=True)
    for _, group in itertools.groupby(outcomes, key=lambda outcome: outcome.scope):
        scope = list(group)
        event(str(scope[0].mode))
        if scope[0].mode in (Mode.IDENTICAL, Mode.SLOT):
            assert is_one_sequence([issued(outcome, outcome.order) for outcome in scope])


@given(rank_sets("compute", max_ranks=4) | rank_sets("identical", max_ranks=4), st.data())
def test_whatever_happened_to_the_captured_order_ranks_end_with_one(
    ranks: RankSet, data: st.DataObject
) -> None:
    def choose(count: int) -> int:
        return data.draw(st.integers(0, count - 1)) if count > 1 else 0

    outcomes = simulate([shuffle(graph, choose) for graph in with_own_rows(ranks).graphs])
    for _, scope in itertools.groupby(outcomes, key=lambda outcome: outcome.scope):
        found = set()
        for outcome in scope:
            uneven = any("static sizes" in note for note in outcome.notes)
            event(f"{outcome.mode}, {'uneven' if uneven else 'even'}")
            assert outcome.graph is not None
            assert_legal(outcome.graph, outcome.order)
            issuing = [n for n in outcome.graph.nodes if issues_communication(n)]
            issuing.sort(key=lambda node: node.captured or 0)
            ordinal = {node.name: number for number, node in enumerate(issuing)}
            found.add(tuple(ordinal[name] for name in outcome.order if name in ordinal))
        assert len(found) == 1
