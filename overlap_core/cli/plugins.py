"""`overlap-core plugins`: which plugins take part, in the order in which their hooks are called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.host import PluginInfo

__all__ = ["plugins"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def plugins(as_json: bool) -> None:
    """List the plugins: name, version, hooks, in calling order.

    Reads OVERLAP_CORE_DISABLE_PLUGINS like a compile does.
    """
    from overlap_core.config import OverlapConfig
    from overlap_core.host import PluginHost

    found = PluginHost.discover(OverlapConfig()).plugins()
    if as_json:
        click.echo(json.dumps([_to_json(plugin) for plugin in found], indent=2))
    else:
        _print_table(found)


def _to_json(plugin: PluginInfo) -> dict[str, object]:
    return {
        "name": plugin.name,
        "version": plugin.version,
        "distribution": plugin.distribution,
        "builtin": plugin.builtin,
        "essential": plugin.essential,
        "hooks": list(plugin.hooks),
    }


def _kind(plugin: PluginInfo) -> str:
    if plugin.essential:
        return "essential"
    return "built in" if plugin.builtin else str(plugin.distribution)


def _print_table(found: Sequence[PluginInfo]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("plugin", "version", "from", "hooks", title="Plugins in calling order")
    table.columns[0].no_wrap = table.columns[3].no_wrap = True
    table.columns[2].overflow = "fold"
    for plugin in found:
        table.add_row(plugin.name, plugin.version, _kind(plugin), "\n".join(plugin.hooks))
    Console(markup=False, highlight=False).print(table)
