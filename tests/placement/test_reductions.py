"""Reduce-scatters out early and waited for late: known cases, and what holds for any graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

from overlap_core import Node, NodeKind, OverlapConfig, OverlapGraph
from overlap_core.costs import resolve_costs
from overlap_core.placement import TimelineModel, build_frame, propose, rebuild_order
from overlap_core.placement.reductions import launch_early, wait_late
from overlap_core.testing import assert_legal
from overlap_core.testing.strategies import costs, graphs

from ..small_graphs import cast, gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait
from .byte_oracle import bytes_around

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.costs import Cost

Order = tuple[int, ...]


def early(*nodes: Node, **more: Any) -> str:
    graph = graph_of(*nodes, **more)
    return words(graph, launch_early(graph, skeleton_of(graph)))


def late(
    *nodes: Node,
    bound_bytes: int | None = None,
    slack_ns: int | None = 0,
    contention: float = 1,
    **more: Any,
) -> str:
    graph = graph_of(*nodes, **more)
    return words(graph, sink(graph, range(len(nodes)), bound_bytes, slack_ns, contention))


def words(graph: OverlapGraph, order: Sequence[int]) -> str:
    return " ".join(graph.nodes[position].name for position in order)


def sink(
    graph: OverlapGraph,
    order: Sequence[int],
    bound_bytes: int | None = None,
    slack_ns: int | None = 0,
    contention: float = 1,
) -> Order:
    return wait_late(
        graph,
        skeleton_of(graph),
        costs_of(graph),
        order,
        bound_bytes=bound_bytes,
        slack_ns=slack_ns,
        contention=contention,
    )


def exposed_ns(graph: OverlapGraph, order: Sequence[int]) -> int:
    """Over all collectives."""
    return sum(model_of(graph).run(order).exposed_ns.values())


def total_ns(graph: OverlapGraph, order: Sequence[int]) -> int:
    return model_of(graph).run(order).total_ns


def model_of(graph: OverlapGraph) -> TimelineModel:
    return TimelineModel(graph, skeleton_of(graph), costs_of(graph))


def costs_of(graph: OverlapGraph) -> tuple[Cost, ...]:
    """As the nodes say, and else unknown."""
    return resolve_costs(graph, lambda request: None)


def permuted(graph: OverlapGraph, order: Sequence[int]) -> OverlapGraph:
    """The graph as if it had come in that order."""
    return evolve(graph, nodes=tuple(graph.nodes[position] for position in order))


def sized(node: Node, nbytes: int) -> Node:
    """The node with one output of so many bytes."""
    return evolve(node, sizes=((nbytes // 4,),), dtypes=("float32",), nbytes=None)


# Launches


def test_a_launch_goes_right_behind_what_it_needs() -> None:
    nodes = (mm("a"), mm("b"), mm("d"), reduce_scatter("r", "a"), wait("r"), mm("e", "w.r"))
    assert early(*nodes) == "a r b d w.r e"


def test_a_cast_that_serves_it_alone_goes_along() -> None:
    nodes = (mm("a"), mm("b"), cast("c", "a"), mm("d"), reduce_scatter("r", "c"), wait("r"))
    assert early(*nodes) == "a c r b d w.r"
    # Inductor's waits read the collective's input too.
    assert early(*nodes[:5], evolve(wait("r"), reads=("r", "c"))) == "a c r b d w.r"


@pytest.mark.parametrize(
    ("other", "more"),
    [
        (mm("d", "c"), {}),
        (mm("d"), {"outputs": ("c", "w.r")}),
    ],
    ids=["another node reads it", "the caller gets it"],
)
def test_what_serves_others_too_keeps_its_place(other: Node, more: dict[str, Any]) -> None:
    nodes = (mm("a"), mm("b"), cast("c", "a"), other, reduce_scatter("r", "c"), wait("r"))
    assert early(*nodes, **more) == "a b c r d w.r"


def test_products_of_two_tensors_keep_their_places() -> None:
    nodes = (mm("a"), mm("dx", "a", "y"), mm("dw", "a", "z"), mm("b"), reduce_scatter("r", "dw"))
    assert early(*nodes, wait("r")) == "a dx dw r b w.r"


def test_copies_into_a_bucket_go_along() -> None:
    bucket = Node(
        name="bucket",
        kind=NodeKind.COMPUTE,
        op="aten.empty.memory_format",
        writes=("bucket",),
    )

    def copy(name: str, source: str) -> Node:
        return Node(
            name=name,
            kind=NodeKind.COMPUTE,
            op="aten.copy_",
            reads=(source,),
            mutates=("bucket",),
        )

    launch = reduce_scatter("r", "bucket")
    nodes = (mm("a"), bucket, copy("c1", "a"), mm("b"), mm("d"), copy("c2", "b"), launch)
    assert early(*nodes, wait("r"), mm("e", "w.r")) == "a bucket c1 b c2 r d w.r e"


def test_no_launch_passes_other_communication() -> None:
    nodes = (mm("a"), gather("g"), mm("b"), opaque("o", "b"), mm("d"), reduce_scatter("r", "a"))
    assert early(*nodes, wait("g"), wait("r"), mm("e", "w.g")) == "a g b o r d w.g w.r e"
    grads = (mm("a", "x", "y"), mm("b", "x", "z"))
    nodes = (*grads, mm("d"), reduce_scatter("r", "b"), reduce_scatter("q", "a"))
    assert early(*nodes) == "a b r q d"


def test_a_launch_in_place_stays_behind_earlier_readers() -> None:
    launch = Node(
        name="r",
        kind=NodeKind.COLLECTIVE,
        op="_c10d_functional.all_reduce_.default",
        reads=("a",),
        mutates=("a",),
        writes=("r",),
    )
    assert early(mm("a"), mm("b"), mm("d", "a"), mm("e"), launch, wait("r")) == "a b d r e w.r"


def test_without_reductions_nothing_moves() -> None:
    assert early(mm("a"), cast("c", "p"), gather("g", "c"), wait("g"), mm("b", "w.g")) == (
        "a c g w.g b"
    )
    assert early() == ""


# Waits


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


def place_gathers(graph: OverlapGraph) -> Order:
    """What one rank alone would make of the gathers."""
    skeleton = skeleton_of(graph)
    frame = build_frame(graph, skeleton)
    config = OverlapConfig(contention=1, slack_ns=0)
    plan = propose(graph, skeleton, frame, costs_of(graph), config)
    return rebuild_order(frame, [p.boundary for p in plan.placements])


# Any graph


def on_group_zero(node: Node) -> Node:
    issues = node.kind is NodeKind.COLLECTIVE or node.issues_collective
    return evolve(node, group="0" if issues else None, group_ranks=None)


@st.composite
def training_graphs(draw: st.DrawFn) -> OverlapGraph:
    """A graph in which some results are gradients: reduced, waited for, and cast for the caller."""
    graph = draw(graphs())
    nodes: list[Node] = []
    outputs = list(graph.outputs)
    for position, node in enumerate(graph.nodes):
        nodes.append(node)
        if node.kind is not NodeKind.COMPUTE or not node.sizes or not draw(st.booleans()):
            continue
        name, group = f"grad{position}", draw(st.sampled_from(("0", "0", "1", None)))
        launch = reduce_scatter(name, node.writes[0], ns=draw(costs()), group=group)
        nodes += [
            evolve(launch, sizes=node.sizes, dtypes=node.dtypes, group_ranks=None),
            wait(name),
        ]
        outputs.append(f"w.{name}")
        if draw(st.booleans()):
            nodes.append(cast(f"cast{position}", f"w.{name}", ns=draw(costs())))
            outputs.append(f"cast{position}")
    return evolve(graph, nodes=tuple(nodes), outputs=tuple(outputs))


def reductions(graph: OverlapGraph) -> list[int]:
    gathers = {group.launch for group in skeleton_of(graph).gathers}
    return [
        position
        for position, node in enumerate(graph.nodes)
        if node.kind is NodeKind.COLLECTIVE and position not in gathers
    ]


def communication(graph: OverlapGraph, order: Sequence[int]) -> list[int]:
    issuing = set(skeleton_of(graph).positions)
    return [position for position in order if position in issuing]


def assert_keeps_what_matters(graph: OverlapGraph, order: Order) -> None:
    assert_legal(graph, [graph.nodes[position].name for position in order])
    assert communication(graph, order) == list(skeleton_of(graph).positions)


def renamed(graph: OverlapGraph) -> OverlapGraph:
    """The same structure under other names, with other costs and no byte counts."""
    buffers = {b: f"z{b}" for node in graph.nodes for b in (*node.reads, *node.writes)}

    def other(node: Node) -> Node:
        return evolve(
            node,
            name=f"z{node.name}",
            reads=tuple(buffers[b] for b in node.reads),
            writes=tuple(buffers[b] for b in node.writes),
            mutates=tuple(buffers.get(b, b) for b in node.mutates),
            after=tuple(f"z{name}" for name in node.after),
            group=node.group and f"z{node.group}",
            cost_ns=7,
            network_ns=None,
            nbytes=None,
        )

    return evolve(
        graph,
        nodes=tuple(map(other, graph.nodes)),
        inputs=tuple(buffers.get(b, b) for b in graph.inputs),
        constants=tuple(buffers.get(b, b) for b in graph.constants),
        outputs=tuple(buffers.get(b, b) for b in graph.outputs),
        symbols=dict.fromkeys(graph.symbols),
    )


@given(graphs() | training_graphs())
def test_early_launches_are_legal_and_in_the_same_sequence(graph: OverlapGraph) -> None:
    order = launch_early(graph, skeleton_of(graph))
    assert_keeps_what_matters(graph, order)
    event("moved" if order != tuple(range(len(order))) else "still")


@given(graphs() | training_graphs())
def test_no_launch_could_leave_one_place_earlier(graph: OverlapGraph) -> None:
    order = launch_early(graph, skeleton_of(graph))
    place = {position: spot for spot, position in enumerate(order)}
    issuing = set(skeleton_of(graph).positions)
    for launch in reductions(graph):
        assert place[launch] <= launch or order[place[launch] - 1] in issuing
        if place[launch] > 0:
            before = order[place[launch] - 1]
            assert before in issuing or before in graph.predecessors[launch]


@given(graphs() | training_graphs())
def test_leaving_early_twice_changes_nothing(graph: OverlapGraph) -> None:
    again = permuted(graph, launch_early(graph, skeleton_of(graph)))
    assert launch_early(again, skeleton_of(again)) == tuple(range(len(graph.nodes)))


@given(graphs() | training_graphs())
def test_only_structure_decides_on_launches(graph: OverlapGraph) -> None:
    other = renamed(graph)
    assert launch_early(other, skeleton_of(other)) == launch_early(graph, skeleton_of(graph))


@given(graphs() | training_graphs())
def test_early_launches_make_no_graph_of_one_group_longer(graph: OverlapGraph) -> None:
    """Of two groups, the one that is served earlier can take bandwidth from the other."""
    graph = evolve(graph, nodes=tuple(map(on_group_zero, graph.nodes)))
    order = launch_early(graph, skeleton_of(graph))
    assert total_ns(graph, order) <= total_ns(graph, range(len(order)))


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
