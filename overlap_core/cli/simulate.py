"""`overlap-core simulate`: the pipeline for one graph file a rank, without torch or processes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_core._words import counted
from overlap_core.errors import GraphFileError, PluginError

from ._format import format_us, gather_to_json
from ._progress import QUICK_BYTES, progress, size_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlap_core.graph import OverlapGraph
    from overlap_core.outcome import RankOutcome

__all__ = ["simulate"]


@click.command()
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--plugins",
    "plugin_paths",
    metavar="MODULE[:NAME]",
    multiple=True,
    help="A plugin to add, by import path. May be repeated, or name several with commas.",
)
@click.option(
    "--ladder", default="default", show_default=True, help="The mode ladder to decide with."
)
def simulate(
    files: tuple[Path, ...], as_json: bool, plugin_paths: tuple[str, ...], ladder: str
) -> None:
    """Run the whole pipeline in memory: one graph FILE for each rank.

    Nothing is computed unless all files are good. Exit status 1: an order is not legal.
    """
    import overlap_core

    with progress(wanted=size_of(files) > QUICK_BYTES) as say:
        say("reading the graphs")
        graphs = _load_graphs(files)
        plugins = _import_plugins(plugin_paths)
        config = overlap_core.OverlapConfig(mode_ladder=ladder)
        say(f"deciding for {counted(len(graphs), 'rank')}")
        outcomes = sorted(
            overlap_core.simulate(graphs, config=config, plugins=plugins),
            key=lambda outcome: outcome.rank,
        )
    if as_json:
        click.echo(json.dumps(_to_json(outcomes), indent=2))
    else:
        _print_summary(outcomes, world_size=max(graph.world_size for graph in graphs))
    if not all(outcome.legal for outcome in outcomes):
        sys.exit(1)


def _load_graphs(files: Iterable[Path]) -> list[OverlapGraph]:
    from overlap_core.graph import OverlapGraph

    graphs: list[OverlapGraph] = []
    by_rank: dict[int, Path] = {}
    for file in files:
        graph = OverlapGraph.load(file)
        if graph.rank in by_rank:
            first = by_rank[graph.rank]
            problem = (
                "is given twice"
                if file == first
                else f"rank {graph.rank} is the rank of {first} too"
            )
            raise GraphFileError(f"{file}: {problem}; give one file for each rank")
        by_rank[graph.rank] = file
        graphs.append(graph)
    return graphs


def _import_plugins(paths: Iterable[str]) -> list[object]:
    names = [name.strip() for path in paths for name in path.split(",")]
    if names:
        # Last, so that a policy under development in this folder can't shadow what is installed.
        sys.path.append(str(Path.cwd()))
    return [_import_plugin(name) for name in names if name]


def _import_plugin(path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # a plugin may raise anything while it is imported
        raise PluginError(
            f"--plugins {path}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from None
    for name in filter(None, attribute.split(".")):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise PluginError(f"--plugins {path}: {module_name!r} has no {attribute!r}") from None
    return found


def _scopes(outcomes: Iterable[RankOutcome]) -> list[RankOutcome]:
    """One outcome for each scope; the ranks of a scope share mode and reason."""
    return list({outcome.scope: outcome for outcome in reversed(list(outcomes))}.values())[::-1]


def _to_json(outcomes: Sequence[RankOutcome]) -> dict[str, Any]:
    scopes = _scopes(outcomes)
    modes = {str(scope.mode) for scope in scopes}
    return {
        "mode": modes.pop() if len(modes) == 1 else None,
        "scopes": [
            {"ranks": list(scope.scope), "mode": str(scope.mode), "why": scope.why}
            for scope in scopes
        ],
        "ranks": [
            {
                "rank": outcome.rank,
                "order": list(outcome.order),
                "collectives": list(outcome.collectives),
                "gathers": [gather_to_json(gather) for gather in outcome.gathers],
                "legal": outcome.legal,
            }
            for outcome in outcomes
        ],
    }


def _print_summary(outcomes: Sequence[RankOutcome], *, world_size: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False)
    for scope in _scopes(outcomes):
        ranks = ", ".join(map(str, scope.scope))
        console.print(
            Text.assemble(f"ranks {ranks}: ", (str(scope.mode), "bold"), f" - {scope.why}")
        )
    if len(outcomes) < world_size:
        console.print(f"{len(outcomes)} of {world_size} ranks have a file")
    table = Table(title="Weight gathers", caption="exposed: before and after, in µs")
    for name in ("rank", "gather", "from", "to", "slot", "verdict", "before", "after"):
        justify: Any = "left" if name in ("gather", "verdict") else "right"
        table.add_column(name, justify=justify, overflow="fold")
    for outcome in outcomes:
        for gather in outcome.gathers:
            table.add_row(
                str(outcome.rank),
                gather.name,
                str(gather.source),
                str(gather.target),
                str(gather.slot),
                gather.verdict,
                format_us(gather.exposed_ns_before),
                format_us(gather.exposed_ns_after),
            )
    if table.row_count:
        console.print(table)
    else:
        console.print("no weight gathers")
    for outcome in outcomes:
        if not outcome.legal:
            console.print(f"rank {outcome.rank}: the order is not legal", style="bold red")
