"""The command group: finds commands by name, and turns errors into one line and an exit status.

Commands are imported when they are called for, and import what they need when they run, so that
`overlap-core --help` answers without torch.

Exit status: 0 done, 1 a check failed, 2 bad usage or bad input.
"""

from __future__ import annotations

import importlib
import platform
from importlib import metadata
from typing import Any

import click

from overlap_core.errors import OverlapError

__all__ = ["main"]

_COMMANDS = ("demo", "doctor", "explain", "plugins", "profile", "simulate", "view")
"""Each is a module of this package with a `click.Command` of the same name."""


class _BadInput(click.ClickException):
    """An `OverlapError` as the command line shows it: one line, and exit status 2."""

    exit_code = 2

    def __init__(self, error: OverlapError) -> None:
        super().__init__(" ".join(str(error).split()))


class _CommandGroup(click.Group):
    """A group whose commands live in one module each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f".{cmd_name}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OverlapError as error:
            raise _BadInput(error) from None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(
            f"overlap-core {_version('overlap-core')}, torch {_version('torch')}, "
            f"Python {platform.python_version()}"
        )
        ctx.exit()


@click.group(cls=_CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions of overlap-core, torch and Python.",
)
def main() -> None:
    """Hide FSDP weight all-gathers behind compute, also when the ranks' graphs differ.

    Exit status: 0 done, 1 a check failed, 2 bad usage or bad input.
    """
