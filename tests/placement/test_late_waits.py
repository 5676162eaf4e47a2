"""Reduce-scatters waited for late: known cases, and what holds for any graph."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

from overlap_core import Node, NodeKind, OverlapGraph
from overlap_core.placement.reductions import launch_early
from overlap_core.testing import assert_legal
from overlap_core.testing.strategies import graphs

from ..small_graphs import cast, gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait
from .byte_oracle import bytes_around
from .reduction_graphs import (
    Order,
    communication,
    exposed_ns,
    permuted,
    place_gathers,
    reductions,
    sink,
    training_graphs,
    words,
)


def late(
    *nodes: Node,
    bound_bytes: int | None = None,
    slack_ns: int | None = 0,
    contention: float = 1,
    **more: Any,
) -> str:
    graph = graph_of(*nodes, **more)
    return words(graph, sink(graph, range(len(nodes)), bound_bytes, slack_ns, contention))


def sized(node: Node, nbytes: int) -> Node:
    """The node with one output of so many bytes."""
    return evolve(node, sizes=((nbytes // 4,),), dtypes=("float32",), nbytes=None)


def test_a_wait_sinks_until_its_time_is_covered_and_what_follows_it_sinks_along() -> None:
    nodes = (
        mm("a"),
        reduce_scatter("r", "a", ns=100),
        wait("r"),
        cast("k", "w.r"),
        cast("l", "k"),
        *(mm(name, ns=60) for name in "bcde"),
    )
    graph = graph_of(*nodes, outputs=("l", "e"))
    order = sink(graph, range(len(nodes)))
    assert words(graph, order) == "a r b c w.r k l d e"
    assert (exposed_ns(graph, range(len(nodes))), exposed_ns(graph, order)) == (100, 0)
    assert late(*nodes, contention=1.25) == "a r b c d w.r k l e"
    assert late(*nodes, slack_ns=81) == "a r b c d e w.r k l"
    assert late(*nodes, slack_ns=None) == "a r b c d e w.r k l"


def test_collectives_of_one_group_queue() -> None:
    launches = (reduce_scatter("r", "a"), wait("r"), reduce_scatter("q", "a"), wait("q"))
    rest = tuple(mm(name, ns=60) for name in "bcdef")
    outputs = ("w.r", "w.q", "f")
    assert late(mm("a"), *launches, *rest, outputs=outputs) == "a r q b c w.r d e w.q f"
    launches = (*launches[:2], evolve(launches[2], group="1"), launches[3])
    assert late(mm("a"), *launches, *rest, outputs=outputs) == "a r q b c w.r w.q d e f"


@pytest.mark.parametrize(
    "user",
    [opaque("u", "w.r"), opaque("u", "k"), gather("u", "k"), reduce_scatter("u", "k")],
    ids=lambda node: f"{node.kind} of {node.reads[0]}",
)
def test_a_wait_stays_before_its_first_user_that_cannot_sink(user: Node) -> None:
    nodes = (mm("a"), reduce_scatter("r", "a"), wait("r"), cast("k", "w.r"), mm("b", ns=10))
    behind = (user, mm("c"), mm("d", "u"))
    reads_the_cast = user.reads == ("k",)
    expected = "a r w.r k b u c d" if reads_the_cast else "a r b w.r k u c d"
    assert late(*nodes, *behind, slack_ns=None) == expected


def test_the_oldest_is_waited_for_to_keep_the_bound() -> None:
    nodes: list[Node] = []
    for name in "123":
        grad, launch = sized(mm(f"a{name}"), 100), sized(reduce_scatter(f"r{name}", f"a{name}"), 20)
        nodes += [grad, launch, wait(launch.name)]
    program = "a1 r1 w.r1 a2 r2 w.r2 a3 r3 w.r3"
    assert late(*nodes, slack_ns=None) == "a1 r1 a2 r2 a3 r3 w.r1 w.r2 w.r3"
    assert late(*nodes, slack_ns=None, bound_bytes=360) == "a1 r1 a2 r2 a3 r3 w.r1 w.r2 w.r3"
    assert late(*nodes, slack_ns=None, bound_bytes=359) == "a1 r1 a2 r2 a3 w.r1 r3 w.r2 w.r3"
    assert late(*nodes, slack_ns=None, bound_bytes=239) == "a1 r1 a2 w.r1 r2 a3 w.r2 r3 w.r3"
    assert late(*nodes, slack_ns=None, bound_bytes=119) == program


def test_a_wait_for_what_was_launched_last_may_come_first() -> None:
    nodes = (
        sized(mm("a"), 100),
        reduce_scatter("r", "a"),
        reduce_scatter("q", "a"),
        wait("q"),
        wait("r"),
        sized(mm("b"), 100),
        reduce_scatter("s", "b"),
        wait("s"),
    )
    # Both read one gradient, and each counts it.
    assert late(*nodes, slack_ns=None, bound_bytes=200) == "a r q b w.r s w.q w.s"


def test_a_collective_of_unknown_cost_keeps_its_wait_unless_time_means_nothing() -> None:
    nodes = (mm("a"), reduce_scatter("r", "a", ns=None), wait("r"), mm("b"), mm("c"))
    assert late(*nodes, slack_ns=1_000) == "a r w.r b c"
    assert late(*nodes, slack_ns=None) == "a r b c w.r"


def test_waits_for_weights_keep_their_places() -> None:
    nodes = (gather("g"), wait("g"), mm("a"), mm("b", "w.g"))
    assert late(*nodes, slack_ns=None) == "g w.g a b"
    both = evolve(wait("r"), reads=("r", "g"), writes=("w.r", "w.g"))
    nodes = (mm("x1"), gather("g"), reduce_scatter("r", "x1"), both, mm("a"), mm("b", "w.g"))
    assert late(*nodes, slack_ns=None) == "x1 g r w.r a b"


def test_an_order_that_exposes_more_is_not_taken() -> None:
    """The product behind the reduction is what hides the gather."""
    nodes = (
        mm("a"),
        reduce_scatter("r", "a", ns=100, group="1"),
        gather("g", ns=300),
        wait("r"),
        mm("k", "w.r", ns=300),
        wait("g"),
        mm("u", "w.g"),
    )
    assert late(*nodes, outputs=("k", "u")) == "a r g w.r k w.g u"


def test_who_changes_the_gradient_in_place_stays_behind_the_wait() -> None:
    zero = Node(name="z", kind=NodeKind.COMPUTE, op="aten.zero_", mutates=("a",))
    nodes = (mm("a"), reduce_scatter("r", "a"), wait("r"), mm("b"), zero, mm("c"))
    assert late(*nodes, slack_ns=None, outputs=("w.r", "c")) == "a r b c w.r z"
    nodes = (*nodes, mm("d", "a"), opaque("o", "d"))
    assert late(*nodes, slack_ns=None, outputs=("w.r", "o")) == "a r b w.r z c d o"


def test_all_waits_for_a_coalesced_collective_must_be_done_to_free_its_bytes() -> None:
    launch = evolve(sized(reduce_scatter("r", "a"), 20), op="mylib.reduce_scatter_coalesced")

    def member(name: str) -> Node:
        return Node(
            name=name, kind=NodeKind.COMPUTE, op="multi_output", reads=("r",), writes=(name,)
        )

    nodes = (
        sized(mm("a"), 100),
        launch,
        member("m"),
        member("n"),
        wait("m"),
        wait("n"),
        sized(mm("b"), 100),
        reduce_scatter("q", "b"),
        wait("q"),
    )
    outputs = ("w.m", "w.n", "w.q")
    assert late(*nodes, slack_ns=None, outputs=outputs) == "a r m n b q w.m w.n w.q"
    bounded = late(*nodes, slack_ns=None, bound_bytes=150, outputs=outputs)
    assert bounded == "a r m n b w.m w.n q w.q"


def test_a_wait_that_keeps_its_input_alive_is_no_wait_for_that() -> None:
    """The second collective reduces further what the first one made; the bytes of that are free."""
    nodes = (
        sized(mm("a"), 100),
        sized(reduce_scatter("r", "a"), 20),
        wait("r"),
        sized(reduce_scatter("q", "w.r"), 4),
        evolve(wait("q"), reads=("q", "w.r")),
        sized(mm("b"), 100),
        reduce_scatter("s", "b"),
        wait("s"),
    )
    outputs = ("w.q", "w.s")
    order = "a r w.r q b s w.q w.s"
    assert late(*nodes, slack_ns=None, bound_bytes=124, outputs=outputs) == order
    order = "a r w.r q b w.q s w.s"
    assert late(*nodes, slack_ns=None, bound_bytes=123, outputs=outputs) == order


# A backward pass


def backward(layers: int, reduce_ns: int) -> OverlapGraph:
    """Of each layer: gather, wait, two products, cast, reduce-scatter, wait, cast."""
    nodes: list[Node] = []
    grad = "grad"
    for layer in range(layers):
        weight, dw = f"g{layer}", f"dw{layer}"
        nodes += [
            gather(weight, ns=60),
            wait(weight),
            mm(dw, grad, f"saved{layer}", ns=100),
            mm(f"dx{layer}", grad, f"w.{weight}", ns=100),
            cast(f"c{layer}", dw),
            reduce_scatter(f"r{layer}", f"c{layer}", ns=reduce_ns),
            wait(f"r{layer}"),
            cast(f"k{layer}", f"w.r{layer}"),
        ]
        grad = f"dx{layer}"
    outputs = (grad, *(f"k{layer}" for layer in range(layers)))
    return graph_of(*nodes, outputs=outputs)


def test_a_backward_pass_exposes_less_with_each_step() -> None:
    graph = backward(layers=4, reduce_ns=80)
    program = tuple(range(len(graph.nodes)))
    assert exposed_ns(graph, program) == 4 * (60 + 80)
    order = launch_early(graph, skeleton_of(graph))
    assert words(graph, order[:8]) == "g0 w.g0 dw0 c0 r0 dx0 w.r0 k0"
    assert exposed_ns(graph, order) == 4 * 60
    ready = permuted(graph, order)
    placed = place_gathers(ready)
    assert exposed_ns(ready, placed) < 4 * 60
    final = sink(ready, placed)
    # The head of the graph has nothing to hide the first gather behind.
    assert exposed_ns(ready, final) == 60
    assert exposed_ns(ready, final) < exposed_ns(ready, placed)


def test_long_reductions_sink_over_several_layers() -> None:
    graph = backward(layers=4, reduce_ns=180)
    assert exposed_ns(graph, range(len(graph.nodes))) == 4 * (60 + 180)
    ready = permuted(graph, launch_early(graph, skeleton_of(graph)))
    placed = place_gathers(ready)
    assert exposed_ns(ready, sink(ready, placed)) < exposed_ns(ready, placed) - 100


# Any graph


margins = st.tuples(
    st.none() | st.integers(0, 100_000),
    st.none() | st.sampled_from((0, 20_000, 10**9)),
    st.sampled_from((1, 1.15, 3)),
)
"""Bound in bytes, slack in nanoseconds, contention."""


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[OverlapGraph, Order]:
    """A graph in which launches left early, or not, and gathers were placed, or not."""
    graph = draw(graphs() | training_graphs())
    if draw(st.booleans()):
        graph = permuted(graph, launch_early(graph, skeleton_of(graph)))
    program = tuple(range(len(graph.nodes)))
    return graph, place_gathers(graph) if draw(st.booleans()) else program


@given(placed_graphs(), margins)
def test_late_waits_are_legal_and_leave_the_sequence(
    placed: tuple[OverlapGraph, Order], margin: tuple[int | None, int | None, float]
) -> None:
    graph, given_order = placed
    order = sink(graph, given_order, *margin)
    event("moved" if order != given_order else "still")
    assert_legal(graph, [graph.nodes[position].name for position in order])
    assert communication(graph, order) == communication(graph, given_order)


@given(placed_graphs(), margins)
def test_only_waits_and_what_follows_them_come_later(
    placed: tuple[OverlapGraph, Order], margin: tuple[int | None, int | None, float]
) -> None:
    """All else keeps its order, and what sinks is compute or a wait for no weights.

    Behind a wait is also who changes the collective's input in place.
    """
    graph, given_order = placed
    order = sink(graph, given_order, *margin)
    behind = {w for group in skeleton_of(graph).gathers for w in group.waits}
    inputs = {buffer for launch in reductions(graph) for buffer in graph.nodes[launch].reads}
    free: set[int] = set()
    for position, node in enumerate(graph.nodes):
        after_wait = not free.isdisjoint(graph.predecessors[position])
        after_wait |= not inputs.isdisjoint(node.mutates)
        if (node.kind is NodeKind.WAIT and position not in behind) or (
            node.kind is NodeKind.COMPUTE and after_wait
        ):
            free.add(position)
    still = [position for position in given_order if position not in free]
    assert [position for position in order if position not in free] == still


@given(placed_graphs(), margins)
def test_sinking_twice_changes_nothing(
    placed: tuple[OverlapGraph, Order], margin: tuple[int | None, int | None, float]
) -> None:
    graph, given_order = placed
    order = sink(graph, given_order, *margin)
    assert sink(graph, order, *margin) == order
    again = permuted(graph, order)
    assert sink(again, range(len(order)), *margin) == tuple(range(len(order)))


@given(placed_graphs(), margins)
def test_late_waits_expose_no_more(
    placed: tuple[OverlapGraph, Order], margin: tuple[int | None, int | None, float]
) -> None:
    graph, given_order = placed
    assert exposed_ns(graph, sink(graph, given_order, *margin)) <= exposed_ns(graph, given_order)


@given(placed_graphs(), st.integers(0, 100_000), st.sampled_from((None, 0, 50_000)))
def test_the_bound_is_kept_where_the_given_order_keeps_it(
    placed: tuple[OverlapGraph, Order], bound_bytes: int, slack_ns: int | None
) -> None:
    graph, given_order = placed
    launches = reductions(graph)
    order = sink(graph, given_order, bound_bytes, slack_ns)
    allowed = max(bound_bytes, bytes_around(graph, given_order, launches))
    assert bytes_around(graph, order, launches) <= allowed
