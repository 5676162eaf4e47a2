"""The page about `view` and `profile` does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..docs.pages import blocks_of, missing_lines

if TYPE_CHECKING:
    from ..docs.pages import Block

PAGE = Path(__file__).parents[2] / "docs" / "view.md"
_FAULT = re.compile(r"exitcode: -(?:6|7|11)\b|exitcode\s*: -(?:6|7|11)\b")
"""torch's gloo dies of a memory fault at times, in plain eager code as well."""
_TRIES = 3


def run(command: str, folder: Path) -> str:
    """A command's standard output, with this environment's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    for _ in range(_TRIES):
        done = subprocess.run(
            command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        if not _FAULT.search(done.stderr):
            break
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def follow_console(block: Block, folder: Path) -> None:
    for part in block.text.split("$ ")[1:]:
        command, _, expected = part.partition("\n")
        assert missing_lines(expected, run(command, folder)) == []


@pytest.mark.ranks
@pytest.mark.full
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    kinds = []
    for block in blocks_of(PAGE):
        kinds.append(block.file or block.language)
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            follow_console(block, tmp_path)
    assert kinds == ["reports.py", "console", "console", "record.py", "console", "text"]


def test_its_picture_is_there() -> None:
    (name,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    picture = (PAGE.parent / name).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
