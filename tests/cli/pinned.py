"""Running a command so that what it prints can be pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from click.testing import CliRunner, Result

from overlap_core.cli import main

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["plain", "run_command"]


def run_command(command: str, *args: str | Path, columns: int = 80, **env: str) -> Result:
    """At a width of `columns`; exceptions are not caught."""
    return CliRunner().invoke(
        main,
        [command, *map(str, args)],
        env={"COLUMNS": str(columns), **env},
        prog_name="overlap-core",
        terminal_width=columns,
        catch_exceptions=False,
    )


def plain(output: str) -> str:
    """Without the spaces that fill lines up."""
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())
