"""Memory along an order: known cases, and any graph against a second reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given

from overlap_core import Node, NodeKind
from overlap_core.placement.liveness import (
    build_memory,
    in_flight_bytes,
    live_bytes,
    peak_bytes,
    timeline_of_bytes,
)
from overlap_core.placement.reductions import launch_early
from overlap_core.report import Report
from overlap_core.simulation import simulate
from overlap_core.testing.strategies import RankSet, graphs, rank_sets

from ..oracles import bytes_in_flight
from ..small_graphs import cast, gather, graph_of, mm, reduce_scatter, skeleton_of, wait
from .byte_oracle import live_by_looking

if TYPE_CHECKING:
    from overlap_core import OverlapGraph


def sized(node: Node, nbytes: int) -> Node:
    """The node with one output of so many bytes."""
    return evolve(node, sizes=((nbytes // 4,),), dtypes=("float32",), nbytes=None)


def live(*nodes: Node, **more: object) -> tuple[int, ...]:
    graph = graph_of(*nodes, **more)
    return live_bytes(graph, range(len(nodes)))


def test_a_buffer_lives_from_its_writer_to_its_last_reader() -> None:
    a, b, c, d = mm("a"), mm("b", "a"), mm("c"), mm("d", "b")
    assert live(sized(a, 100), sized(b, 40), sized(c, 4), sized(d, 8)) == (100, 140, 44, 48)


def test_an_output_lives_to_the_end_and_what_nobody_reads_is_gone_at_once() -> None:
    nodes = (sized(mm("a"), 100), sized(mm("b"), 40), sized(mm("c"), 4))
    assert live(*nodes, outputs=("a",)) == (100, 140, 104)


def test_the_caller_s_buffers_count_as_nothing() -> None:
    update = Node(name="u", kind=NodeKind.COMPUTE, op="aten.copy_", reads=("a",), mutates=("p",))
    assert live(sized(mm("a", "p"), 100), sized(update, 60), outputs=("p",)) == (100, 100)


def test_a_wait_is_another_name_for_what_the_collective_makes() -> None:
    nodes = (sized(gather("g"), 80), wait("g"), mm("x1"), mm("a", "w.g"), mm("b"))
    assert live(*nodes) == (80, 80, 80, 80, 0)
    in_place = evolve(wait("g"), writes=(), mutates=("g",))
    nodes = (sized(gather("g"), 80), in_place, mm("x1"), mm("a", "g"), mm("b"))
    assert live(*nodes) == (80, 80, 80, 80, 0)


def test_the_input_of_a_collective_lives_until_its_wait() -> None:
    grad, launch = sized(mm("a"), 100), sized(reduce_scatter("r", "a"), 20)
    nodes = (grad, launch, mm("x1"), wait("r"), sized(cast("c", "w.r"), 8), mm("b"))
    assert live(*nodes) == (100, 120, 120, 120, 28, 0)
    # Inductor's waits read the input as well: that keeps it no longer.
    reading = evolve(wait("r"), reads=("r", "a"))
    assert live(*nodes[:3], reading, *nodes[4:]) == (100, 120, 120, 120, 28, 0)


def test_the_input_of_a_coalesced_collective_lives_until_the_last_of_its_waits() -> None:
    members = [
        Node(name=name, kind=NodeKind.COMPUTE, op="multi_output", reads=("r",), writes=(name,))
        for name in "mn"
    ]
    nodes = (sized(mm("a"), 100), reduce_scatter("r", "a"), *members, wait("m"), wait("n"), mm("b"))
    assert live(*nodes) == (100, 100, 100, 100, 100, 100, 0)


@pytest.mark.parametrize(
    "launch",
    [
        Node(
            name="r",
            kind=NodeKind.COLLECTIVE,
            op="_c10d_functional.all_reduce_.default",
            reads=("a",),
            writes=("r", "r_changed"),
            sizes=((25,),),
            dtypes=("float32",),
            nbytes=100,
        ),
        Node(
            name="r",
            kind=NodeKind.COLLECTIVE,
            op="mylib.reduce.default",
            reads=("a",),
            mutates=("a",),
            writes=("r",),
            nbytes=100,
        ),
    ],
    ids=["by the op's name", "by what it changes"],
)
def test_a_collective_in_place_allocates_nothing(launch: Node) -> None:
    nodes = (sized(mm("a"), 100), launch, wait("r"), mm("b", "w.r"), mm("c"))
    assert live(*nodes) == (100, 100, 100, 100, 0)


def test_outputs_of_a_fused_node_live_apart() -> None:
    fused = Node(
        name="f",
        kind=NodeKind.COMPUTE,
        op="fused",
        writes=("f0", "f1"),
        sizes=((25,), (10,)),
        dtypes=("float32", "float32"),
    )
    assert live(fused, mm("a", "f0"), mm("b", "f1"), mm("c")) == (140, 140, 40, 0)


def test_what_unpacks_a_node_takes_its_part_of_that_node_s_memory() -> None:
    made = Node(
        name="o",
        kind=NodeKind.OPAQUE,
        op="mylib::attn",
        writes=("o",),
        sizes=((25,), (10,)),
        dtypes=("float32", "float32"),
    )

    def part(name: str, nbytes: int) -> Node:
        unpack = Node(
            name=name, kind=NodeKind.COMPUTE, op="multi_output", reads=("o",), writes=(name,)
        )
        return sized(unpack, nbytes)

    nodes = (made, part("big", 100), part("small", 40), mm("a", "big"), mm("b", "small"))
    assert live(*nodes) == (140, 140, 140, 140, 40)


def test_symbols_count_by_their_hints_and_what_is_unknown_counts_as_nothing() -> None:
    node = evolve(mm("a"), sizes=(("s0 + 1", 4),), dtypes=("bfloat16",))
    assert live(node, symbols={"s0": 9}) == (80,)
    assert live(node, symbols={"s0": None}) == (0,)
    assert live(evolve(node, dtypes=()), symbols={"s0": 9}) == (0,)
    assert live(evolve(node, dtypes=("mystery",)), symbols={"s0": 9}) == (0,)


def test_a_generated_kernel_writes_over_an_input_of_the_same_size_that_ends_there() -> None:
    gelu = evolve(mm("b", "a"), op="ComputedBuffer")
    nodes = (sized(mm("a"), 100), sized(gelu, 100), sized(mm("c", "b"), 8))
    assert live(*nodes) == (100, 100, 108)
    # Another size, an input that is read once more or that the caller gets, and another's kernel.
    assert live(nodes[0], sized(gelu, 96), nodes[2]) == (100, 196, 104)
    assert live(*nodes, sized(mm("d", "a"), 4)) == (100, 200, 208, 104)
    assert live(*nodes, outputs=("a",)) == (100, 200, 208)
    assert live(nodes[0], sized(mm("b", "a"), 100), nodes[2]) == (100, 200, 108)


def test_a_fused_kernel_writes_over_one_input_for_each_output() -> None:
    fused = evolve(
        mm("f", "a", "b"),
        op="fused",
        writes=("f", "f1", "f2"),
        sizes=((25,), (25,), (10,)),
        dtypes=("float32",) * 3,
    )
    nodes = (sized(mm("a"), 100), sized(mm("b"), 100), fused, sized(mm("c", "f", "f1", "f2"), 4))
    assert live(*nodes) == (100, 200, 240, 244)
    assert live(*nodes, outputs=("b",)) == (100, 200, 340, 344)


def test_workspaces_are_there_while_their_node_runs() -> None:
    graph = graph_of(sized(mm("a"), 100), sized(mm("b"), 40), sized(mm("c", "a"), 8))
    memory = build_memory(graph).with_workspaces({1: 1_000})
    assert live_bytes(graph, (0, 1, 2), memory) == (100, 1_140, 108)
    assert live_bytes(graph, (1, 0, 2), memory) == (1_040, 100, 108)
    swapped = evolve(graph, nodes=tuple(graph.nodes[p] for p in (1, 0, 2)))
    assert live_bytes(swapped, (0, 1, 2), memory.in_order((1, 0, 2))) == (1_040, 100, 108)


def test_the_peak_depends_on_the_order() -> None:
    nodes = (
        sized(mm("a"), 100),
        sized(mm("b"), 100),
        sized(cast("c", "a"), 4),
        sized(cast("d", "b"), 4),
    )
    graph = graph_of(*nodes, outputs=("c", "d"))
    assert peak_bytes(graph, (0, 1, 2, 3)) == 204
    assert peak_bytes(graph, (0, 2, 1, 3)) == 108
    assert peak_bytes(graph_of(), ()) == 0


def test_gathers_are_in_flight_from_launch_to_first_wait() -> None:
    nodes = (
        gather("g", nbytes=10),
        gather("h", nbytes=30),
        mm("a"),
        wait("g"),
        mm("b", "w.g"),
        wait("h"),
        reduce_scatter("r", "b", nbytes=7),
        wait("r"),
        mm("c", "w.h", "w.r"),
    )
    graph = graph_of(*nodes)
    order, communicates = range(len(nodes)), (0, 1, 6)
    assert in_flight_bytes(graph, order, [0, 1], communicates) == (10, 40, 40, 30, 30, 0, 0, 0, 0)
    steps = timeline_of_bytes(graph, order, [0, 1], communicates)
    assert steps == ((0, 10), (1, 40), (3, 30), (5, 0))
    assert in_flight_bytes(graph, order, [6], communicates) == (0, 0, 0, 0, 0, 0, 7, 0, 0)
    late = (0, 3, 2, 4, 6, 1, 5, 7, 8)
    steps = timeline_of_bytes(graph, late, [0, 1], communicates)
    assert steps == ((0, 10), (1, 0), (5, 30), (6, 0))


def test_a_gather_of_unknown_bytes_counts_by_its_sizes() -> None:
    nodes = (gather("g", nbytes=None), wait("g"), mm("a", "w.g"))
    graph = graph_of(*nodes)
    assert timeline_of_bytes(graph, (0, 1, 2), [0], (0,)) == ((0, 1024), (1, 0))


def generated(node: Node) -> Node:
    """The node as a kernel that Inductor makes, if it makes one buffer and nothing else."""
    is_kernel = node.kind is NodeKind.COMPUTE and len(node.writes) == 1 and "multi" not in node.op
    return evolve(node, op="ComputedBuffer") if is_kernel else node


@given(graphs())
def test_a_second_reading_finds_the_same_bytes(graph: OverlapGraph) -> None:
    for order in (tuple(range(len(graph.nodes))), launch_early(graph, skeleton_of(graph))):
        assert live_bytes(graph, order) == live_by_looking(graph, order)
    graph = evolve(graph, nodes=tuple(map(generated, graph.nodes)))
    for order in (tuple(range(len(graph.nodes))), launch_early(graph, skeleton_of(graph))):
        assert live_bytes(graph, order) == live_by_looking(graph, order)
        assert peak_bytes(graph, order) == max(live_by_looking(graph, order), default=0)


@given(rank_sets())
def test_the_report_s_peaks_are_those_of_a_second_reading(ranks: RankSet) -> None:
    for outcome in simulate(ranks.graphs):
        report, graph = Report.of(outcome), outcome.graph
        assert graph is not None
        names = [node.name for node in graph.nodes]
        gathers = [gather.name for gather in outcome.gathers]
        if all(graph.nodes[graph.index[name]].nbytes for name in gathers):
            assert report.most_bytes_before == bytes_in_flight(graph, names, gathers)
            assert report.most_bytes_after == bytes_in_flight(graph, outcome.order, gathers)
