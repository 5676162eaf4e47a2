"""Reduce-scatters launched early: known cases, and what holds for any graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import event, given, settings
from hypothesis import strategies as st

from overlap_core import Node, NodeKind, OverlapConfig, OverlapGraph
from overlap_core.costs import IDEAL, Machine
from overlap_core.host import PluginHost
from overlap_core.placement import TimelineModel
from overlap_core.placement.reductions import launch_early
from overlap_core.simulation import simulate_views
from overlap_core.testing import assert_legal
from overlap_core.testing.strategies import graphs
from overlap_core.views import prepare, with_costs

from ..small_graphs import cast, gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait
from .reduction_graphs import communication, permuted, reductions, total_ns, training_graphs, words

if TYPE_CHECKING:
    from .reduction_graphs import Order


def early(*nodes: Node, **more: Any) -> str:
    graph = graph_of(*nodes, **more)
    return words(graph, launch_early(graph, skeleton_of(graph)))


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


# Any graph


def on_group_zero(node: Node) -> Node:
    issues = node.kind is NodeKind.COLLECTIVE or node.issues_collective
    return evolve(node, group="0" if issues else None, group_ranks=None)


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


BUSY = Machine(
    kernel_host_ns=10,
    opaque_host_ns=30,
    collective_host_ns=40,
    wait_host_ns=10,
    gather_slowdown=1.2,
    compute_slowdown=1.1,
    waits_for_kernel=True,
    measured=True,
)


@settings(max_examples=settings.default.max_examples * 5 // 2)  # few graphs lose by it
@given(training_graphs(), st.sampled_from([IDEAL, BUSY]))
def test_no_backward_graph_is_committed_that_takes_longer(
    graph: OverlapGraph, machine: Machine
) -> None:
    """Where early launches alone cost time, and nothing else may move, they stay as well."""
    config = OverlapConfig(contention=1, slack_ns=0)
    view = prepare(graph, config, PluginHost.discover(config), is_backward=True)
    view = with_costs(view, view.costs, machine)
    [outcome] = simulate_views([view])
    event(str(outcome.mode))
    model = TimelineModel(graph, skeleton_of(graph), view.costs, machine)
    assert model.run(outcome.positions).total_ns <= model.program_order.total_ns
