"""What the README shows is run, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from overlap_core.testing import run_torchrun

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def readme(repo_root: Path) -> str:
    return (repo_root / "README.md").read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.ranks
def test_the_example_runs_under_torchrun(readme: str, tmp_path: Path) -> None:
    (example,) = [block for block in python_blocks(readme) if "init_process_group" in block]
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 15
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    status, output, errors = run_torchrun(script)
    if status and re.search(r"exitcode +: -(6|11)", errors):
        # gloo's memory fault, as `run_ranks` describes it.
        status, output, errors = run_torchrun(script)
    assert status == 0, errors
    # Forward and backward on two ranks, whose lines may run into each other.
    assert output.count("identical") == 4, output
    assert "hidden" in output


def test_the_other_examples_run(readme: str) -> None:
    others = [block for block in python_blocks(readme) if "init_process_group" not in block]
    assert others
    for block in others:
        subprocess.run([sys.executable, "-c", block], check=True, timeout=300)


def test_links_lead_somewhere(repo_root: Path) -> None:
    for page in (repo_root / "README.md", *sorted((repo_root / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
