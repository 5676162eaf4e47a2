"""`OverlapGraph` refuses what no program can be."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve

from overlap_core import Node, NodeKind, OverlapGraph
from overlap_core.errors import GraphFormatError

from ..small_graphs import gather, graph_of, mm, wait


def test_an_index_and_producers_by_name() -> None:
    graph = graph_of(gather("g"), wait("g"), mm("a", "w.g"))
    assert graph.index == {"g": 0, "w.g": 1, "a": 2}
    assert graph.producers == {"g": 0, "w.g": 1, "a": 2}
    assert graph.inputs == ("shard_g",)
    assert graph.outputs == ("a",)


def test_a_graph_is_compared_by_its_content() -> None:
    assert graph_of(mm("a")) == graph_of(mm("a"))
    assert graph_of(mm("a")) != graph_of(mm("a", ns=7))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((mm("a"), mm("a")), "nodes[1] ('a', aten.mm.out): the name is taken by nodes[0]"),
        ((mm("a", "b"), mm("b", "a")), "nodes[0] ('a', aten.mm.out): lies on a cycle: a -> b -> a"),
        ((mm("a", "a"),), "nodes[0] ('a', aten.mm.out): lies on a cycle: a -> a"),
        (
            (mm("a", "b"), mm("b")),
            "nodes[0] ('a', aten.mm.out): reads 'b', from 'b' further down; nodes must stand in",
        ),
        ((mm("a", after=("b",)),), "is to come after 'b', which is not a node"),
        ((mm("a", after=("b",)), mm("b")), "is to come after 'b', from 'b' further down"),
        ((mm("a", after=("b",)), mm("b", "a")), "lies on a cycle: a -> b -> a"),
        (
            (mm("a"), mm("b", writes=("a",))),
            "writes 'a', which 'a' writes already (list it under 'mutates' if it is changed in",
        ),
        ((mm("a", ns=-5),), "nodes[0] ('a', aten.mm.out): cost_ns is negative (-5)"),
        ((gather("a", nbytes=-1),), "nbytes is negative (-1)"),
        ((mm("a", network_ns=-1),), "network_ns is negative (-1)"),
        ((evolve(gather("a"), group_ranks=(0, 0)),), "group_ranks names a rank twice: [0, 0]"),
        (
            (evolve(gather("a"), group_ranks=(0, 2)),),
            "group_ranks has 2, outside a world of 2 ranks",
        ),
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_node(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(GraphFormatError, match=re.escape(message)):
        graph_of(*nodes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"outputs": ("z",)}, "outputs: 'z' is written by nothing"),
        ({"rank": 2}, "rank 2 does not lie in a world of 2 ranks"),
        ({"inputs": ()}, "nodes[0] ('a', aten.mm.out): reads 'x', which nothing writes"),
        ({"inputs": ("x", "a")}, "writes 'a', which is an input of the graph"),
    ],
)
def test_a_graph_whose_frame_is_wrong_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphFormatError, match=re.escape(message)):
        graph_of(mm("a"), **values)


def test_a_mutation_of_something_unknown_is_refused() -> None:
    node = Node(name="a", kind=NodeKind.COMPUTE, op="aten.mul_", mutates=("b",))
    with pytest.raises(GraphFormatError, match="mutates 'b', which nothing writes"):
        OverlapGraph(nodes=(node,))
