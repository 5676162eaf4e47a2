"""N ranks in memory, without processes or torch, each with plugins and configuration of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from overlap_core.config import OverlapConfig
from overlap_core.simulation import simulate_views
from overlap_core.testing.graphs import on_ranks
from overlap_core.testing.hosts import host_with
from overlap_core.views import prepare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlap_core.graph import OverlapGraph
    from overlap_core.outcome import RankOutcome
    from overlap_core.views import RankView

__all__ = ["FakeRanks"]


@frozen(kw_only=True)
class FakeRanks:
    """The ranks of a job as plain values; `run` sends them through the whole pipeline.

        outcomes = FakeRanks.of(graph, 4).with_plugins(my_plugin).run()

    Only the plugins that are given take part (and the built-ins), whatever is installed.
    """

    graphs: Sequence[OverlapGraph] = field(repr=False)
    """One a rank, in any order."""
    plugins: tuple[object, ...] = ()
    """Modules, instances, or names of installed plugins."""
    config: OverlapConfig = field(factory=OverlapConfig)
    own_plugins: Mapping[int, tuple[object, ...]] = field(factory=dict)
    """By rank, instead of `plugins`."""
    own_configs: Mapping[int, OverlapConfig] = field(factory=dict)
    """By rank, instead of `config`."""

    @classmethod
    def of(cls, graph: OverlapGraph, ranks: int) -> FakeRanks:
        """The same graph on every rank, with groups that hold all of them."""
        return cls(graphs=on_ranks(graph, ranks))

    def with_plugins(self, *plugins: object, rank: int | None = None) -> FakeRanks:
        """The same ranks, of which all, or one, have these plugins instead."""
        if rank is None:
            return evolve(self, plugins=plugins)
        return evolve(self, own_plugins={**self.own_plugins, self._known(rank): plugins})

    def with_config(self, config: OverlapConfig, rank: int | None = None) -> FakeRanks:
        """The same ranks, of which all, or one, have this configuration instead."""
        if rank is None:
            return evolve(self, config=config)
        return evolve(self, own_configs={**self.own_configs, self._known(rank): config})

    def run(self) -> tuple[RankOutcome, ...]:
        """One outcome a rank, in the order of `graphs`.

        Raises:
            GraphFormatError: two graphs are of one rank, or of worlds of different sizes.
            PluginError: a plugin cannot be loaded.
        """
        return simulate_views([self._view(graph) for graph in self.graphs])

    def _view(self, graph: OverlapGraph) -> RankView:
        config = self.own_configs.get(graph.rank, self.config)
        plugins = self.own_plugins.get(graph.rank, self.plugins)
        return prepare(graph, config, host_with(*plugins, config=config))

    def _known(self, rank: int) -> int:
        ranks = [graph.rank for graph in self.graphs]
        if rank not in ranks:
            raise ValueError(f"no graph is of rank {rank}; there are graphs of ranks {ranks}")
        return rank
