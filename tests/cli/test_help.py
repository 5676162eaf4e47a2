"""What `--help` of every command prints is pinned, at 80 columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from overlap_core.cli import main

from .pinned import plain

FOLDER = Path(__file__).with_name("help")
ELSEWHERE = {
    "explain": "report/explain-help.txt",
    "profile": "traces/profile-help.txt",
    "view": "view/view-help.txt",
}
"""Commands whose pinned help lies beside their pinned output."""
COMMANDS = ("", *sorted(main.list_commands(None)))  # type: ignore[arg-type]


def pinned(command: str) -> Path:
    if command in ELSEWHERE:
        return FOLDER.parents[1] / ELSEWHERE[command]
    return FOLDER / f"{command or 'overlap-core'}.txt"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_pinned(command: str) -> None:
    result = CliRunner().invoke(
        main,
        [*filter(None, [command]), "--help"],
        prog_name="overlap-core",
        terminal_width=80,
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert plain(result.stdout) == pinned(command).read_text(encoding="utf-8")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_no_help_is_pinned_of_a_command_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == (
        {command or "overlap-core" for command in COMMANDS} - set(ELSEWHERE)
    )
