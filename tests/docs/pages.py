"""Reading the pages for plugin authors, and running their commands in an environment.

A block whose first line is a comment with a file name is that file. A `console` block holds
commands, each after a `$`, with lines that they print; `...` stands for lines left out.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from attrs import frozen

from ..wheels import REPO_ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from ..wheels import Environment

__all__ = [
    "PAGES",
    "Block",
    "add_pip",
    "blocks_of",
    "follow",
    "install",
    "missing_lines",
    "run_commands",
]

PAGES = REPO_ROOT / "docs" / "plugins"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")

_OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this option's value the wrong way round
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "COLUMNS": "100",
}


@frozen
class Block:
    """One block of a page."""

    language: str
    text: str
    """Without the comment that names the file."""
    file: str
    """Empty: the block is no file."""


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page in order."""
    found = []
    for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        match = _FILE.match(text)
        file = match[1] if match else ""
        found.append(Block(language, text[match.end() :] if match else text, file))
    return found


def follow(page: Path, environment: Environment, folder: Path, timeout: float) -> None:
    """Do what a page says from top to bottom: write its files, run its commands and its code.

    Args:
        page: its python blocks that are no file run one by one; TOML blocks are all files.
        environment: in which everything runs.
        folder: for the files, and where commands run; made if it isn't there.
        timeout: of each command, in seconds.

    Raises:
        AssertionError: a command failed, or did not print a line that the page shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for block in blocks_of(page):
        if block.language == "console":
            run_commands(block, environment, folder, timeout)
        elif block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        else:
            assert block.language == "python", f"neither a file, commands nor code:\n{block.text}"
            environment.run(["python", "-c", block.text], timeout=timeout)


def run_commands(block: Block, environment: Environment, folder: Path, timeout: float) -> None:
    """Run a console block's commands in a folder, and expect the lines that it shows.

    Raises:
        AssertionError: a command failed, or did not print a line that the page shows.
    """
    for chunk in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = chunk.partition("\n")
        output = environment.run(
            ["/bin/bash", "-c", f"cd '{folder}' && {command} 2>&1"],
            env={**_OFFLINE, "PATH": f"{environment.bin}{os.pathsep}{os.environ['PATH']}"},
            timeout=timeout,
        )
        lost = missing_lines(shown, output)
        assert not lost, f"$ {command}\ndid not print {lost}, but:\n{output}"


def missing_lines(shown: str, output: str) -> list[str]:
    """Lines of a page that a command did not print in this order; spaces and times don't count."""
    printed = iter(_plain(output))
    return [line for line in _plain(shown) if line != "..." and line not in printed]


def _plain(text: str) -> list[str]:
    text = re.sub(r"\d+\.\d+s( \(\d+:\d\d:\d\d\))?", "0s", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]


def add_pip(environment: Environment) -> None:
    """Give an environment the command `pip`: it borrows the package alone."""
    command = environment.bin / "pip"
    command.write_text(f'#!/bin/sh\nexec "{environment.python}" -m pip "$@"\n', encoding="utf-8")
    command.chmod(0o755)


def install(environment: Environment, folder: Path) -> None:
    """Install the distribution in a folder, as its author would."""
    add_pip(environment)
    command = Block("console", f"$ pip install --quiet '{folder}'\n", "")
    run_commands(command, environment, environment.work, timeout=300)
