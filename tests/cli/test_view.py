"""`overlap-core view`: what it writes, and how it refuses; the page itself is in tests/view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from overlap_core.cli import main

DATA = Path(__file__).parents[1] / "view"
REPORT = Path(__file__).parents[1] / "report" / "report-v1.json"


def run(*args: str | Path, columns: int = 80) -> Result:
    return CliRunner().invoke(
        main,
        ["view", *map(str, args)],
        prog_name="overlap-core",
        terminal_width=columns,
        catch_exceptions=False,
    )


def test_the_help_is_pinned() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert result.stdout == (DATA / "view-help.txt").read_text(encoding="utf-8")


def test_a_page(tmp_path: Path) -> None:
    target = tmp_path / "view.html"
    result = run(REPORT, "-o", target)
    assert (result.exit_code, result.stdout) == (0, f"{target}: 1 report\n")
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_trace(tmp_path: Path) -> None:
    target = tmp_path / "view.json"
    result = run(REPORT, REPORT, "--format", "perfetto", "-o", target)
    assert (result.exit_code, result.stdout) == (0, f"{target}: 2 reports\n")
    events = json.loads(target.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3, 4}


def test_a_report_is_not_written_over(tmp_path: Path) -> None:
    source, link = tmp_path / "report.json", tmp_path / "link.json"
    source.write_bytes(REPORT.read_bytes())
    link.symlink_to(source)
    result = run(REPORT, source, "-o", link)
    assert result.exit_code == 2
    assert f"{link}: is a report to be read; give another file" in " ".join(result.stderr.split())
    assert source.read_bytes() == REPORT.read_bytes()


@pytest.mark.parametrize("kind", ["html", "perfetto"])
@pytest.mark.parametrize("name", ["\ud800", "</script>", "a\nb"])
def test_any_name_can_be_written(tmp_path: Path, kind: str, name: str) -> None:
    source, target = tmp_path / "report.json", tmp_path / "view"
    text = json.dumps({**json.loads(REPORT.read_text()), "why": name})
    source.write_text(text.replace('"gather1"', json.dumps(name)))
    assert run(source, "--format", kind, "-o", target).exit_code == 0
    target.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text", ["", "{}", "no report", REPORT.read_text()[:5000], '{"traceEvents": []}']
)
def test_what_is_no_report_is_one_line_and_status_2(tmp_path: Path, text: str) -> None:
    path, target = tmp_path / "report.json", tmp_path / "view.html"
    path.write_text(text)
    result = run(path, "-o", target)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {path}: ")
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "view.html"], "Missing argument 'REPORT...'"),
        ([REPORT], "Missing option '-o'"),
        (["none.json", "-o", "view.html"], "none.json: cannot be read: No such file or directory"),
        ([REPORT, "-o", "/no/such/folder/v"], "/no/such/folder/v: cannot be written: No such"),
        ([REPORT, "-o", "v", "--format", "pdf"], "'pdf' is not one of 'html', 'perfetto'"),
    ],
)
def test_bad_usage_is_status_2(arguments: list[str | Path], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_report_is_drawn_without_loading_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from overlap_core.cli import main\n"
        "main(['view', *sys.argv[1:]], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    arguments = [str(REPORT), "-o", str(tmp_path / "view.html")]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert result.stdout.splitlines()[-1] == "False"
