"""Views of ranks for tests of the pipeline: graphs that end in each mode, and ranks that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from overlap_core import OverlapConfig, hookimpl
from overlap_core.host import PluginHost
from overlap_core.placement import Timeline, TimelineModel
from overlap_core.views import RankView, prepare

from .small_graphs import gather, graph_of, mm, on_ranks, reduce_scatter, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlap_core import OverlapGraph

__all__ = ["EXACT", "Failing", "hosted", "same", "skewed", "slower_unless_pinned", "two_layers"]

EXACT = OverlapConfig(contention=1, slack_ns=0)


def two_layers(*, extra: int = 0, gathers: int = 2, scatter: bool = False) -> OverlapGraph:
    """Matmuls behind gathers; `extra` matmuls at the head, a reduce-scatter in the middle."""
    nodes = [mm(f"extra{i}", ns=100) for i in range(extra)]
    before = "x"
    for i in range(2):
        weight = [gather(f"g{i}"), wait(f"g{i}")] if i < gathers else []
        reads = (before, f"w.g{i}") if weight else (before,)
        nodes += [mm(f"a{i}", before), *weight, mm(f"b{i}", *reads)]
        before = f"b{i}"
        if scatter and i == 0:
            nodes += [reduce_scatter("r", before), wait("r")]
    return graph_of(*nodes, outputs=(before,))


def hosted(graph: OverlapGraph, config: OverlapConfig = EXACT, *plugins: object) -> RankView:
    """A view with plugins of its own."""
    return prepare(graph, config, PluginHost.discover(config, plugins=plugins))


def same(ranks: int, **values: Any) -> list[RankView]:
    """One graph on all ranks."""
    return [hosted(graph) for graph in on_ranks(two_layers(**values), ranks)]


def skewed(*values: dict[str, Any]) -> list[RankView]:
    """Another `two_layers` on each rank."""
    ranks = len(values)
    return [hosted(on_ranks(two_layers(**v), ranks)[rank]) for rank, v in enumerate(values)]


class _Pessimist(TimelineModel):
    """Predicts that a gather before the reduce-scatter `r` makes things worse."""

    def __init__(self, view: RankView) -> None:
        assert view.skeleton is not None
        super().__init__(view.graph, view.skeleton, view.costs)
        self._r = view.graph.index["r"]
        self._last = view.skeleton.gathers[-1].launch
        self.program_order = Timeline(exposed_ns={}, total_ns=0)

    def run(self, order: Sequence[int]) -> Timeline:
        order = list(order)
        worse = order.index(self._last) < order.index(self._r)
        return Timeline(exposed_ns={self._last: 7 if worse else 0}, total_ns=0)


def slower_unless_pinned(view: RankView) -> RankView:
    """The view of a rank that predicts a loss unless gathers keep to their place."""
    return evolve(view, model=_Pessimist(view))


class Failing:
    """A plugin that raises in one hook, on one rank."""

    overlap_plugin_name = "failing"

    def __init__(
        self, hook: str = "", active: bool = False, wait: Callable[[], object] = int
    ) -> None:
        self.hook, self.active, self.wait = hook, active, wait

    def _fail(self, hook: str) -> None:
        if self.active and hook == self.hook:
            self.wait()
            raise RuntimeError(f"no {hook} today")

    @hookimpl
    def overlap_classify_node(self, node: Any) -> None:
        self._fail("overlap_classify_node")

    @hookimpl
    def overlap_measure_cost(self, request: Any) -> None:
        self._fail("overlap_measure_cost")

    @hookimpl(specname="overlap_choose_mode")
    def careful(self, votes: Any) -> None:
        self._fail("overlap_choose_mode")

    @hookimpl
    def overlap_adjust_plan(self, plan: Any, graph: Any) -> None:
        self._fail("overlap_adjust_plan")
