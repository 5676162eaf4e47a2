"""`GraphBuilder` makes the graphs that its calls say, with waits where they are needed."""

from __future__ import annotations

import pytest

import overlap_core as oc
from overlap_core import NodeKind
from overlap_core.errors import GraphFormatError
from overlap_core.testing import FakeRanks, GraphBuilder, graphs_for_ranks, on_ranks


def names(graph: oc.OverlapGraph) -> str:
    return " ".join(node.name for node in graph.nodes)


def test_the_example_of_the_docstring() -> None:
    g = GraphBuilder(rank=0, ranks=2)
    w = g.gather("w0", ns=100_000)
    y = g.mm("x", w)
    g.opaque("mylib::attn", y, group="cp")
    graph = g.build()
    assert names(graph) == "w0 wait_w0 mm0 attn0"
    assert (graph.rank, graph.world_size) == (0, 2)
    assert graph.inputs == ("shard_w0", "x")
    assert graph.outputs == ("attn0",)
    launch, wait, mm, attention = graph.nodes
    assert (launch.kind, launch.group, launch.group_ranks) == ("collective", "fsdp", (0, 1))
    assert (launch.nbytes, launch.cost_ns) == (1024 * 256 * 2, 100_000)
    assert (wait.kind, wait.reads, mm.reads) == (NodeKind.WAIT, ("w0",), ("x", "wait_w0"))
    assert (attention.op, attention.issues_collective) == ("mylib::attn", True)
    assert [entry.weight_gather for entry in oc.skeleton(graph)] == [True, False]


def test_a_wait_is_made_once_and_where_it_is_asked_for() -> None:
    g = GraphBuilder()
    w = g.gather("w0")
    g.wait(w)
    g.mm()
    g.mm(w)
    g.mm(w)
    assert names(g.build()) == "w0 wait_w0 mm0 mm1 mm2"


def test_what_is_given_goes_before_the_defaults() -> None:
    g = GraphBuilder(ranks=4, groups={"tp": (0, 2)}, symbols={"s0": 5})
    y = g.all_reduce("x", group="tp", name="r", sizes=("s0", 8), dtype="float32", ns=None)
    g.compute("aten.copy_", y, mutates=("cache",), writes=(), after=("r",))
    g.output("r")
    graph = g.build()
    launch = graph.nodes[0]
    assert (launch.group_ranks, launch.sizes, launch.dtypes) == ((0, 2), (("s0", 8),), ("float32",))
    assert (launch.nbytes, launch.cost_ns) == (None, None)
    assert names(graph) == "r wait_r copy0"
    assert graph.nodes[2].mutates == ("cache",)
    assert graph.inputs == ("x", "cache")
    assert graph.outputs == ("wait_r",)
    assert graph.symbols == {"s0": 5}


def test_a_gather_of_a_constant_or_an_activation_is_not_of_weights() -> None:
    g = GraphBuilder()
    g.mm(g.gather("sizes", g.constant("c")), g.gather("a", g.mm()))
    graph = g.build()
    assert graph.constants == ("c",)
    assert [entry.weight_gather for entry in oc.skeleton(graph)] == [False, False]


def test_an_empty_graph() -> None:
    assert GraphBuilder().build().nodes == ()


def test_ranks_that_differ_in_compute() -> None:
    def fill(g: GraphBuilder) -> None:
        g.extra_compute(g.rank)
        y = g.mm("x", g.gather("w0"))
        g.mm(y, g.gather("w1"))

    graphs = graphs_for_ranks(3, fill)
    extra = [[n.name for n in g.nodes if n.name.startswith("extra")] for g in graphs]
    assert extra == [[], ["extra0"], ["extra0", "extra1"]]
    outcomes = FakeRanks(graphs=graphs).run()
    assert {outcome.mode for outcome in outcomes} == {"slot"}


def test_one_graph_on_all_ranks() -> None:
    g = GraphBuilder()
    g.mm("x", g.gather("w0"), g.gather("w1", group=None))
    graphs = on_ranks(g.build(), 3)
    assert [graph.rank for graph in graphs] == [0, 1, 2]
    assert [node.group_ranks for node in graphs[1].nodes] == [(0, 1, 2), None, None, None, None]


def test_errors_say_what_to_do() -> None:
    g = GraphBuilder()
    w = g.gather("w0")
    with pytest.raises(GraphFormatError, match="the name 'w0' is taken: give this one another"):
        g.gather("w0")
    y = g.mm(w)
    with pytest.raises(GraphFormatError, match=r"wait\('mm0'\): 'mm0' is no collective"):
        g.wait(y)
    with pytest.raises(GraphFormatError, match="no node is named 'w9'; nodes so far: w0, wait_w0,"):
        g.wait("w9")
    g.mm("later")
    with pytest.raises(GraphFormatError, match="'later' was read before and so became an input"):
        g.mm(name="later")
    with pytest.raises(GraphFormatError, match="mutates='cache': expected a tuple of names"):
        g.mm(mutates="cache")
    g.mm(after=("nobody",))
    with pytest.raises(GraphFormatError, match="is to come after 'nobody', which is not a node"):
        g.build()
