"""`overlap-core profile`: what it prints is pinned, at 80 columns and without colour."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import pytest

from .pinned import plain, run_command

DATA = Path(__file__).parents[1] / "traces"
TRACE, REPORT = DATA / "h200-forward.json.gz", DATA / "h200-forward-report.json"


run = partial(run_command, "profile")


@pytest.mark.parametrize(
    ("snapshot", "arguments"),
    [("profile.txt", [TRACE, REPORT]), ("profile-help.txt", ["--help"])],
)
def test_the_output_is_pinned(snapshot: str, arguments: list[str | Path]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert plain(result.stdout) == (DATA / snapshot).read_text(encoding="utf-8")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_has_everything() -> None:
    data = json.loads(run(TRACE, REPORT, "--json").stdout)
    assert list(data) == [
        *("device", "steps", "incomplete_steps"),
        *("exposed_ns_before", "exposed_ns_after", "exposed_ns", "gathers"),
    ]
    assert (data["device"], data["steps"], len(data["gathers"])) == ("cuda", 3, 16)
    first = data["gathers"][0]
    assert list(first) == [
        *("report", "name", "gathers", "group", "cost_ns", "took_ns"),
        *("exposed_ns_before", "exposed_ns_after", "exposed_ns", "ratio"),
    ]
    assert first["report"] == "h200-forward-report"
    assert first["ratio"] == pytest.approx(first["exposed_ns"] / first["exposed_ns_after"])
    assert data["exposed_ns"] == sum(gather["exposed_ns"] for gather in data["gathers"])


def test_what_is_far_off_is_coloured() -> None:
    coloured = run(TRACE, REPORT, FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[31m881.2" in coloured
    assert "\x1b" not in run(TRACE, REPORT).stdout


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    text = json.dumps(json.loads(REPORT.read_text()))
    path.write_text(text.replace('"op0"', json.dumps("[red]\x1b[31m:smile:")))
    result = run(TRACE, path)
    assert result.exit_code == 0
    assert "[red]\\x1b[31m:smile:" in result.stdout.replace("\n", "")
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no trace",
        b"[]",
        b'{"traceEvents": 3}',
        b"\xff\xfe\x00",
        gzip.decompress(TRACE.read_bytes())[:5000],
        TRACE.read_bytes()[:2000],
        REPORT.read_bytes(),
        b'{"traceEvents": [{"ph": "X"}, 4, {"ph": "X", "ts": 1, "dur": 2, "args": 3}]}',
    ],
)
def test_what_is_no_trace_is_one_line_and_status_2(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    result = run(path, REPORT)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'TRACE'"),
        ([TRACE], "Missing argument 'REPORT...'"),
        (["none.json", REPORT], "none.json: cannot be read: No such file or directory"),
        ([TRACE, "none.json"], "none.json: cannot be read: No such file or directory"),
        ([TRACE, TRACE], "not a report"),
        ([TRACE, REPORT, REPORT], "a step has 16 on '0', the graphs have 32 on '0'"),
    ],
)
def test_bad_usage_is_status_2(arguments: list[str | Path], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
