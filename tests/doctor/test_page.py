"""docs/doctor.md: every kind of finding is there, under its severity, and its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from overlap_core.doctor import KINDS, Severity

if TYPE_CHECKING:
    from pathlib import Path

TITLES = {
    Severity.PROBLEM: "Problems",
    Severity.WARNING: "Warnings",
    Severity.NOTE: "Notes",
    Severity.OK: "As it should be",
}


@pytest.fixture
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("severity", Severity)
def test_each_kind_has_a_row_under_its_severity(page: str, severity: Severity) -> None:
    _, _, rest = page.partition(f"\n## {TITLES[severity]}\n")
    section, _, _ = rest.partition("\n## ")
    rows = re.findall(r"^\| `([\w-]+)` \|", section, flags=re.MULTILINE)
    assert rows == sorted(kind for kind, other in KINDS.items() if other is severity)


def test_what_to_do_is_said_of_all_but_what_is_well(page: str) -> None:
    for line in page.splitlines():
        match = re.match(r"\| `([\w-]+)` \|", line)
        if match and match[1] in KINDS:
            columns = 2 if KINDS[match[1]] is Severity.OK else 3
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == columns, line
            assert all(cells), line


@pytest.mark.slow
def test_its_program_runs(page: str) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert "no-process-group" in done.stdout
    assert done.stdout.splitlines()[-1] == "overlap would be off"
