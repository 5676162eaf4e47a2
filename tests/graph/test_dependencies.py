"""Orderings that come from data, from changes in place, and by request."""

from __future__ import annotations

from overlap_core import Node, NodeKind, OverlapGraph
from overlap_core.graph import first_violation

from ..small_graphs import cast, graph_of, mm


def change(name: str, *buffers: str, reads: tuple[str, ...] = ()) -> Node:
    """A node that changes buffers in place and makes nothing new."""
    return Node(name=name, kind=NodeKind.COMPUTE, op="aten.mul_", reads=reads, mutates=buffers)


def before(graph: OverlapGraph, name: str, *, data: bool = False) -> list[str]:
    edges = graph.data_predecessors if data else graph.predecessors
    return [graph.nodes[p].name for p in edges[graph.index[name]]]


def test_a_reader_follows_the_writer() -> None:
    graph = graph_of(mm("a"), mm("b", "a"), mm("c", "a", "b"))
    assert before(graph, "c") == ["a", "b"]
    assert [graph.nodes[p].name for p in graph.successors[0]] == ["b", "c"]


def test_a_change_in_place_follows_earlier_readers_and_precedes_later_ones() -> None:
    graph = graph_of(mm("a"), mm("reader", "a"), change("change", "a"), mm("later", "a"))
    assert before(graph, "change") == ["a", "reader"]
    assert before(graph, "change", data=True) == ["a"]
    assert before(graph, "later") == ["change"]


def test_two_changes_keep_their_order() -> None:
    graph = graph_of(mm("a"), change("one", "a"), change("two", "a"))
    assert before(graph, "two") == ["one"]


def test_a_graph_input_may_be_changed_after_its_readers() -> None:
    graph = graph_of(cast("cast", "shard"), change("change", "shard"), cast("again", "shard"))
    assert before(graph, "change") == ["cast"]
    assert before(graph, "again") == ["change"]


def test_a_node_that_reads_what_it_changes_does_not_follow_itself() -> None:
    graph = graph_of(mm("a"), change("change", "a", reads=("a",)), mm("b", "a"))
    assert before(graph, "change") == ["a"]
    assert before(graph, "b") == ["change"]


def test_after_orders_without_data() -> None:
    graph = graph_of(mm("a"), mm("b", after=("a",)))
    assert before(graph, "b") == ["a"]
    assert before(graph, "b", data=True) == []


def test_first_violation_names_the_pair() -> None:
    graph = graph_of(mm("a"), mm("b", "a"), mm("c", "b"))
    assert first_violation(graph.predecessors, (0, 1, 2)) is None
    assert first_violation(graph.predecessors, (0, 2, 1)) == (1, 2)
