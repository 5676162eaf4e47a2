"""What is said of long work: on a terminal, on rank 0, and only where it takes long."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlap_core.cli import _progress
from overlap_core.testing.demo import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

REPORT = Path(__file__).parents[1] / "report" / "report-v3.json"


def on_terminal(program: str, *arguments: str | Path, **env: str) -> tuple[str, str]:
    """Standard output of a Python program, and what it wrote on the terminal of its errors."""
    mine, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", **env},
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        shown = b""
        while True:
            try:
                piece = os.read(mine, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        output = process.stdout.read()
    os.close(mine)
    assert process.returncode == 0, shown.decode()
    return output, shown.decode()


COMMAND = """
import importlib, sys
from overlap_core.cli import main
command = importlib.import_module(f"overlap_core.cli.{sys.argv[1]}")
command.QUICK_BYTES = int(sys.argv[2])
main(sys.argv[1:2] + sys.argv[3:])
"""


def cases(folder: Path) -> dict[str, tuple[Sequence[str | Path], Sequence[str]]]:
    traces = Path(__file__).parents[1] / "traces"
    trace, report = traces / "h200-forward.json.gz", traces / "h200-forward-report.json"
    graph = folder / "graph.json"
    return {
        "view": (
            [REPORT, "-o", folder / "view.html"],
            ["reading report 1 of 1", "predicting 2 timelines", "drawing "],
        ),
        "profile": (
            [trace, report],
            ["reading ", "reading the reports", "finding the gathers"],
        ),
        "simulate": ([graph], ["reading the graphs", "deciding for 1 rank"]),
    }


@pytest.mark.parametrize("command", ["view", "profile", "simulate"])
def test_long_work_is_told_on_a_terminal(tmp_path: Path, command: str) -> None:
    from overlap_core.testing import GraphBuilder

    g = GraphBuilder(rank=0, ranks=1)
    g.mm("x", g.gather("g", ns=100), ns=10)
    g.build().save(tmp_path / "graph.json")
    arguments, phases = cases(tmp_path)[command]
    output, shown = on_terminal(COMMAND, command, "0", *arguments)
    assert output
    for phase in phases:
        assert phase in shown
        assert phase not in output
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))  # the line is gone
    assert on_terminal(COMMAND, command, str(1 << 40), *arguments) == (output, "")
    assert on_terminal(COMMAND, command, "0", *arguments, RANK="1") == (output, "")


NAMES = """
from overlap_core.cli._progress import progress
with progress() as say:
    say("looking [red]x :smile:")
print("done")
"""
DEMO = """
import threading
import overlap_core.testing
from overlap_core.cli import main
from overlap_core.testing import demo

looks = [0, 0]
shown = threading.Event()

def slowest_phase(*_):
    looks.pop()
    if not looks:  # the second look: what the first one found is shown
        shown.set()
    return 0

def run_ranks(*_, **__):
    shown.wait()
    raise SystemExit(0)

demo.slowest_phase = slowest_phase
overlap_core.testing.run_ranks = run_ranks
main(["demo"])
"""


def test_the_demo_tells_which_phase_it_is_in() -> None:
    output, shown = on_terminal(DEMO)
    assert PHASES[0] in shown
    assert PHASES[0] not in output


def test_names_are_shown_as_they_are() -> None:
    output, shown = on_terminal(NAMES)
    assert output == "done\n"
    assert "looking [red]x :smile:" in shown


def test_nothing_is_written_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.progress() as say:
        say("anything")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_sizes_of_files_that_are_not_there_count_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"12345")
    assert _progress.size_of([tmp_path / "one", tmp_path / "none", "\0"]) == 5
