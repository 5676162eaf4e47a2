"""The whole pipeline for any number of ranks, in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import OverlapConfig
from .errors import GraphFormatError
from .host import PluginHost
from .pipeline import negotiate
from .ranks import connected_scopes, run_in_memory
from .views import prepare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .graph import OverlapGraph
    from .outcome import RankOutcome
    from .views import RankView

__all__ = ["group_ranks", "reach", "simulate", "simulate_views"]


def simulate(
    graphs: Iterable[OverlapGraph],
    config: OverlapConfig | None = None,
    plugins: Iterable[object] = (),
) -> tuple[RankOutcome, ...]:
    """Run the whole pipeline for one graph a rank, without processes or torch.

    Ranks that communicate with each other form a scope and decide together.

    Args:
        graphs: one a rank, in any order.
        config: the same for all ranks; None: the defaults.
        plugins: further plugins, loaded beside the installed ones.

    Returns:
        One outcome a graph, in the order given.

    Raises:
        ConfigError: `config` is no `OverlapConfig`, or no plugin offers its ladder.
        GraphFormatError: two graphs are of the same rank, or of worlds of different sizes.
        PluginError: a plugin cannot be loaded.
    """
    config = OverlapConfig() if config is None else config
    host = PluginHost.discover(config, plugins=plugins)
    return simulate_views([prepare(graph, config, host) for graph in graphs])


def simulate_views(views: Sequence[RankView]) -> tuple[RankOutcome, ...]:
    """As `simulate`, from views that may differ in plugins and configuration."""
    by_rank: dict[int, RankView] = {}
    for view in views:
        rank = view.graph.rank
        if rank in by_rank:
            raise GraphFormatError(f"two graphs are of rank {rank}; give one graph a rank")
        if view.graph.world_size != views[0].graph.world_size:
            raise GraphFormatError(
                f"rank {rank} is of a world of {view.graph.world_size} ranks, rank "
                f"{views[0].graph.rank} of one of {views[0].graph.world_size}"
            )
        by_rank[rank] = view
    outcomes: dict[int, RankOutcome] = {}
    for scope in connected_scopes({r: reach(view) for r, view in by_rank.items()}):
        results = run_in_memory([negotiate(by_rank[rank], scope) for rank in scope])
        outcomes.update(zip(scope, results, strict=True))
    return tuple(outcomes[view.graph.rank] for view in views)


def reach(view: RankView) -> tuple[tuple[int, ...], ...]:
    """As `group_ranks`, with the communication that only a plugin or a registration knows of."""
    graph, skeleton = view.graph, view.skeleton
    found = group_ranks(graph)
    if skeleton and any(graph.nodes[p].group_ranks is None for p in skeleton.positions):
        found = (*found, tuple(range(graph.world_size)))
    return found


def group_ranks(graph: OverlapGraph) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group that a graph communicates on, the own rank always among them.

    Communication on a group that nobody named may reach any rank of the world.
    """
    found: set[tuple[int, ...]] = set()
    for node in graph.nodes:
        if node.group_ranks is not None:
            found.add(node.group_ranks)
        elif node.kind == "collective" or node.issues_collective:
            found.add(tuple(range(graph.world_size)))
    return tuple(sorted(found))
