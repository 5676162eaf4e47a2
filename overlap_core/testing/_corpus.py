"""What the conformance suite asks a plugin about: graphs, votes, tensors, calls of hooks."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from overlap_core.ranks.votes import Mode, Vote
from overlap_core.replay.types import TensorSpec
from overlap_core.report import Report
from overlap_core.testing.fake_ranks import FakeRanks
from overlap_core.testing.graphs import GraphBuilder, graphs_for_ranks, on_ranks
from overlap_core.testing.hosts import HookRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.costs.types import CostRequest
    from overlap_core.graph import Node, OverlapGraph
    from overlap_core.placement.plan import Plan

__all__ = ["FREEST_FIRST", "Corpus", "collect", "corpus_graphs", "votes"]

FREEST_FIRST = tuple(Mode)

OPAQUE = "overlap_conformance::attention"
"""A custom op that no plugin knows."""


@frozen(kw_only=True)
class Corpus:
    """Arguments of hooks, as the pipeline itself makes them from graphs."""

    nodes: tuple[Node, ...]
    requests: tuple[CostRequest, ...]
    plans: tuple[tuple[Plan, OverlapGraph], ...]
    reports: tuple[Report, ...]


def corpus_graphs() -> tuple[tuple[OverlapGraph, ...], ...]:
    """The graphs of several jobs, by rank: one for each way in which ranks may differ, and more."""
    return (
        graphs_for_ranks(2, _layers),
        graphs_for_ranks(2, _divergent_layers, symbols={"s0": 512, "s1": 384}),
        graphs_for_ranks(3, _divergent_communication),
        graphs_for_ranks(2, _other_styles),
        graphs_for_ranks(1, lambda g: g.mm()),
        (GraphBuilder(ranks=1).build(),),
    )


def _layers(g: GraphBuilder) -> None:
    y = "x"
    for i in range(3):
        y = g.mm(y, g.gather(f"w{i}"))
        g.cast(y)
    g.output(g.reduce_scatter(y))


def _divergent_layers(g: GraphBuilder) -> None:
    g.extra_compute(2 * g.rank)
    y = g.mm("x", g.gather("w0"), sizes=(f"s{g.rank}", 256))
    y = g.opaque(OPAQUE, y, group="cp", network_ns=100_000)
    w = g.gather("w1", g.cast("shard_w1"))
    g.opaque(OPAQUE, y)
    g.output(g.mm(y, w, sizes=("s0 + s1", 256)))


def _divergent_communication(g: GraphBuilder) -> None:
    y = g.mm("x", g.gather("w0"))
    if g.rank == 1:
        y = g.all_reduce(y)
    g.output(g.mm(y, g.gather("w1")))


def _other_styles(g: GraphBuilder) -> None:
    """A gather of a constant, one of an activation, one on a group without a name."""
    sizes = g.gather("sizes", g.constant("constant0"), sizes=(2,), dtype="int64")
    y = g.mm("x", g.gather("w0", group=None), sizes=(1, 256))
    g.compute("aten.copy_", y, mutates=("cache",), writes=())
    g.output(g.mm(g.gather("activations", y), sizes))


def votes() -> tuple[tuple[Vote, ...], ...]:
    """Ballots that allow each mode, and some that are odd in other ways."""
    one = Vote(
        rank=0,
        can=True,
        config="c",
        plugins="p",
        plugin_names=("a 1.0",),
        fingerprint="f",
        skeleton="s",
        entries=3,
        weight_gathers=2,
    )
    changes: tuple[dict[str, object], ...] = (
        {},
        {"fingerprint": "g"},
        {"fingerprint": "g", "skeleton": "t", "entries": 4},
        {"fingerprint": "g", "skeleton": "t"},
        {"weight_gathers": 1},
        {"can": False, "why": "no luck"},
        {"plugins": "q", "plugin_names": ("b 1.0",)},
        {"config": "d"},
        {"fingerprint": "", "skeleton": ""},
        {"entries": 0, "weight_gathers": 0},
    )
    pairs = tuple((one, evolve(one, rank=1, **change)) for change in changes)  # type: ignore[arg-type]
    many = tuple(evolve(one, rank=rank) for rank in range(65))
    mixed = tuple(evolve(one, rank=rank, fingerprint="fg"[rank % 2]) for rank in (3, 4, 7))
    return ((one,), *pairs, mixed, many)


def specs() -> tuple[TensorSpec, ...]:
    """Tensors of usual and unusual dtypes and layouts, on the CPU."""
    dtypes = ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "float8_e5m2", "no_such")
    layouts = (((8, 4), (4, 1)), ((8, 4), (1, 8)), ((0, 4), (4, 1)), ((), ()))
    return tuple(
        TensorSpec(shape=shape, stride=stride, dtype=dtype, device="cpu")
        for dtype in dtypes
        for shape, stride in layouts
    )


@cache
def _collect_own() -> Corpus:
    return _run([list(graphs) for graphs in corpus_graphs()])


def collect(more: Sequence[OverlapGraph] = ()) -> Corpus:
    """The calls that the pipeline makes for the corpus, and for more graphs on two ranks each."""
    own = _collect_own()
    if not more:
        return own
    extra = _run([on_ranks(graph, 2) for graph in more])
    return Corpus(
        nodes=own.nodes + extra.nodes,
        requests=own.requests + extra.requests,
        plans=own.plans + extra.plans,
        reports=own.reports + extra.reports,
    )


def _run(jobs: Sequence[Sequence[OverlapGraph]]) -> Corpus:
    recorder, reports = HookRecorder(), []
    for graphs in jobs:
        # With the costs that the graph knows, and with none: then cost sources are asked.
        for known in (graphs, [_without_costs(graph) for graph in graphs]):
            outcomes = FakeRanks(graphs=known, plugins=(recorder,)).run()
            reports.append(Report.of(outcomes[-1]))

    def seen(hook: str, *names: str) -> list[Any]:
        return [tuple(call.arguments[name] for name in names) for call in recorder.of(hook)]

    return Corpus(
        nodes=tuple(dict.fromkeys(node for (node,) in seen("overlap_classify_node", "node"))),
        requests=tuple(dict.fromkeys(r for (r,) in seen("overlap_measure_cost", "request"))),
        plans=tuple(seen("overlap_adjust_plan", "plan", "graph")),
        reports=tuple(reports),
    )


def _without_costs(graph: OverlapGraph) -> OverlapGraph:
    return evolve(graph, nodes=tuple(evolve(node, cost_ns=None) for node in graph.nodes))
