"""`make fuzz` finds what a seed leads to and says how to repeat it; `make test` never varies."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from pathlib import Path

PROPERTIES = """
import json, os
from hypothesis import given, strategies as st

TRIED = {"fails": [], "sound": []}

@given(st.integers(0, 10**6))
def test_fails(n: int) -> None:
    TRIED["fails"].append(n)
    assert n % 50 != 7, "seven"

@given(st.integers(0, 10**6), st.text())
def test_sound(n: int, text: str) -> None:
    TRIED["sound"].append((n, text))

def test_no_property() -> None:
    assert False, "not asked for"

def teardown_module() -> None:
    with open(f"tried-{os.environ['PYTHONHASHSEED']}.json", "w") as file:
        json.dump(TRIED, file)
"""
LITERALS = "NUMBERS = [1234, 4321, 98765]\nTEXTS = ['one', 'two', 'three']\n"


@pytest.fixture
def project(tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with our profiles, a module with literals, and tests of which one can fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    shutil.copy(repo_root / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(PROPERTIES)
    (tmp_path / "literals.py").write_text(LITERALS)
    (tmp_path / "test_other.py").write_text("import literals\n")
    return tmp_path


@pytest.fixture
def script(repo_root: Path) -> list[str]:
    return [sys.executable, str(repo_root / "tests/fuzz.py")]


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    return done.returncode, done.stdout + done.stderr


def take_tried(project: Path, number: int) -> dict[str, Any]:
    """What the tests of a run were called with."""
    path = project / f"tried-{number}.json"
    tried: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return tried


@pytest.mark.slow
def test_a_finding_is_shown_and_repeated(project: Path, script: list[str]) -> None:
    rc, out = run(*script, "--seed", "10", "--seeds", "3", "--jobs", "2")
    assert rc == 1, out
    assert out.startswith("seeds from 10 on, 2 at once\n")
    lines = dict(re.findall(r"^seed (\d+): (.*) in \d+ s$", out, re.MULTILINE))
    assert sorted(lines) == ["10", "11", "12"]
    assert set(lines.values()) <= {"2 passed", "1 failed, 1 passed"}
    tried = {number: take_tried(project, number) for number in (10, 11, 12)}
    assert len({str(one["sound"]) for one in tried.values()}) == 3, "the seed decides"
    assert "not asked for" not in out
    [where] = re.findall(r"^at (.*), seed (\d+)$", out, re.MULTILINE)
    assert where[0] == f"{project / 'test_it.py'}:10"
    assert lines[where[1]] == "1 failed, 1 passed"
    assert re.search(
        r"^AssertionError: seven\n(.*\n)*.*: test_fails\(\n    n=\d+,\n\)$", out, re.MULTILINE
    )
    [repeat] = re.findall(r"^repeat: python (.*)$", out, re.MULTILINE)
    assert repeat.endswith(f"--seed {where[1]} test_it.py::test_fails")
    rc, again = run(sys.executable, *shlex.split(repeat))
    assert rc == 1
    assert re.findall(r"\n    n=\d+,\n", again)[0] in out
    assert take_tried(project, int(where[1]))["fails"] == tried[int(where[1])]["fails"]


def test_nothing_found(project: Path, script: list[str]) -> None:
    rc, out = run(*script, "--minutes", "0", "--jobs", "1", "-k", "sound")
    assert rc == 0, out
    assert re.match(r"seeds from \d+ on, 1 at once\nseed \d+: 1 passed in \d+ s\n", out)
    assert out.endswith("nothing found\n")


def test_a_run_that_breaks_is_no_success(project: Path, script: list[str]) -> None:
    rc, out = run(*script, "--seed", "1", "--jobs", "1", "no_such_file.py")
    assert rc == 2
    assert "pytest ended with 4" in out
    assert "no_such_file.py" in out


@pytest.mark.slow
def test_a_test_tries_the_same_each_time_alone_and_among_others(project: Path) -> None:
    tried = []
    for number, more in enumerate(([], ["test_other.py"], [])):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", *more, "test_it.py"]
        run("env", f"PYTHONHASHSEED={number}", "CI=" + "true" * (number == 2), *command)
        tried.append(take_tried(project, number))
        assert len(tried[0]["sound"]) == settings.get_profile("same").max_examples
        assert tried[number] == tried[0]
    assert not (project / ".hypothesis/examples").exists()
