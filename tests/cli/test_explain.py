"""`overlap-core explain`: what it prints is pinned, at 80 columns and without colour.

The report is `example_report()` of tests/report, as a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .pinned import plain, run_command

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "report"
REPORT = DATA / "report-v1.json"


run = partial(run_command, "explain")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write the report with changes; return its path."""

    def write_report(**changes: Any) -> Path:
        path = tmp_path / "report.json"
        path.write_text(json.dumps({**json.loads(REPORT.read_text()), **changes}))
        return path

    return write_report


def with_names(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The report with other names of nodes."""
    text = json.dumps(data)
    for old, new in names.items():
        text = text.replace(f'"{old}"', json.dumps(new))
    renamed: dict[str, Any] = json.loads(text)
    return renamed


@pytest.mark.parametrize(
    ("snapshot", "arguments"),
    [("explain.txt", [REPORT, "--costs"]), ("explain-help.txt", ["--help"])],
)
def test_the_output_is_pinned(snapshot: str, arguments: list[str | Path]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert plain(result.stdout) == (DATA / snapshot).read_text(encoding="utf-8")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_first_line_sums_up() -> None:
    first = run(REPORT, columns=120).stdout.splitlines()[0]
    assert first == (
        "mode pinned: exposed 1,430.0 -> 1,340.0 µs, 1 of 3 gathers hidden, "
        "1 compute-limited, 1 pinned"
    )


def test_costs_are_shown_on_request() -> None:
    assert "mm ~4096x3072 by 3072x3072 bfloat16" not in run(REPORT).stdout
    assert "mm ~4096x3072 by 3072x3072 bfloat16" in run(REPORT, "--costs").stdout


def test_no_colour_without_a_terminal_or_where_it_is_not_wanted() -> None:
    assert "\x1b" not in run(REPORT, "--costs").stdout
    coloured = run(REPORT, FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[32mhidden" in coloured
    without = run(REPORT, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm").stdout
    assert "\x1b[32m" not in without


def test_json_has_everything() -> None:
    result = run(REPORT, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert list(data) == [
        *("rank", "scope", "mode", "why", "committed", "legal"),
        *("exposed_ns_before", "exposed_ns_after", "hidden", "total", "calls", "limits"),
        *("in_flight_bytes_before", "in_flight_bytes_after"),
        *("in_flight_before", "in_flight_after"),
        *("votes", "notes", "gathers", "costs", "sections"),
    ]
    assert (data["mode"], data["hidden"], data["total"]) == ("pinned", 1, 3)
    assert data["limits"] == {"compute-limited": 1, "pinned": 1}
    assert (data["exposed_ns_before"], data["exposed_ns_after"]) == (1_430_000, 1_340_000)
    weight, large = 18 * 1024**2, 72 * 1024**2
    assert data["in_flight_bytes_after"] == large
    ends = [[8, large], [9, 0]]
    assert data["in_flight_after"] == [[0, weight], [1, 0], [2, weight], [4, 0], *ends]
    assert data["gathers"][1] == {
        "name": "gather1",
        "from": 3,
        "to": 2,
        "slot": 0,
        "verdict": "hidden",
        "why": "launched early enough",
        "exposed_ns_before": 90_000,
        "exposed_ns_after": 0,
    }
    assert data["costs"][1] == {
        "key": "mm ~4096x3072 by 3072x3072 bfloat16",
        "source": "measured",
        "why": "",
        "ns": 240_500,
        "nodes": 3,
    }
    assert data["sections"] == {"probe": {"held back": 1, "rows": [1, None]}}


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (None, ["gather0", "gather1", "gather2"]),
        ("from", ["gather0", "gather1", "gather2"]),
        ("to", ["gather0", "gather1", "gather2"]),
        ("gather", ["gather0", "gather1", "gather2"]),
        ("slot", ["gather0", "gather1", "gather2"]),
        ("verdict", ["gather0", "gather1", "gather2"]),
        ("before", ["gather2", "gather0", "gather1"]),
        ("after", ["gather2", "gather0", "gather1"]),
    ],
)
def test_gathers_are_sorted(key: str | None, names: list[str]) -> None:
    arguments = [] if key is None else ["--sort", key]
    data = json.loads(run(REPORT, "--json", *arguments).stdout)
    assert [gather["name"] for gather in data["gathers"]] == names
    lines = run(REPORT, *arguments).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("gather")][1:] == names


@pytest.mark.parametrize(
    ("key", "column", "values"),
    [
        (None, "ns", [1_250_000, 240_500, 90_000, 98_000, 0, None]),
        ("total", "nodes", [1, 3, 2, 1, 3, 1]),
        ("time", "ns", [1_250_000, 240_500, 98_000, 90_000, 0, None]),
        ("nodes", "nodes", [3, 3, 2, 1, 1, 1]),
        ("source", "source", [*["analytical"] * 3, *["measured"] * 2, "unknown"]),
    ],
)
def test_costs_are_sorted(key: str | None, column: str, values: list[Any]) -> None:
    arguments = [] if key is None else ["--sort", key]
    data = json.loads(run(REPORT, "--json", *arguments).stdout)
    assert [entry[column] for entry in data["costs"]] == values


def test_costs_are_sorted_by_key() -> None:
    keys = [e["key"] for e in json.loads(run(REPORT, "--json", "--sort", "key").stdout)["costs"]]
    assert keys == sorted(keys)


def test_rows_are_filtered_by_any_text_in_them() -> None:
    result = run(REPORT, "--costs", "--filter", "HIDDEN")
    assert "Weight gathers: 1 of 3" in result.stdout
    assert "Costs: 0 of 6" in result.stdout
    assert "gather1 " in result.stdout
    assert "gather0 " not in result.stdout
    data = json.loads(run(REPORT, "--json", "--filter", "all-gather").stdout)
    assert data["gathers"] == []
    assert len(data["costs"]) == 2
    assert data["total"] == 3  # the summary is of all


@pytest.mark.parametrize("name", ["[red]x", "[/]", ":smile:", "\x1b[31mx", "a\nb", "\ud800"])
def test_names_are_shown_as_they_are(write: Callable[..., Path], name: str) -> None:
    """Neither as markup, nor as an emoji, nor as something that a terminal obeys."""
    data = with_names(json.loads(REPORT.read_text()), {"gather1": name})
    data |= {"notes": [name], "why": name}
    result = run(write(**data), columns=120)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    shown = name if name.isprintable() else name.encode("unicode_escape").decode()
    assert f"\n{shown} " in result.stdout
    assert f"why: {shown}\n" in result.stdout
    assert f"\n  {shown}\n" in result.stdout


def test_what_the_report_says_already_is_not_repeated_for_every_gather(
    write: Callable[..., Path],
) -> None:
    why = "rank 1 cannot: PluginError: boom"
    data = json.loads(REPORT.read_text())
    for gather in data["gathers"]:
        gather |= {"verdict": "unmoved", "why": f"program order was kept: {why}"}
    changes = {"mode": "abort", "why": why, "committed": False, "gathers": data["gathers"]}
    result = run(write(**changes), columns=120)
    assert result.exit_code == 0
    assert result.stdout.count(why) == 1
    assert "rank 0, decided together with ranks 1-2; program order was kept" in result.stdout
    assert result.stdout.count("unmoved: program order was kept\n") <= 3


def test_many_votes_are_cut(write: Callable[..., Path]) -> None:
    (vote, *_) = json.loads(REPORT.read_text())["votes"]
    votes = [{**vote, "rank": rank, "fingerprint": f"{rank:08}"} for rank in range(20)]
    path = write(votes=votes)
    result = run(path, columns=120)
    assert result.stdout.count("can; graph") == 8
    assert "and 12 more: see --json" in result.stdout
    assert len(json.loads(run(path, "--json").stdout)["votes"]) == 20


def test_a_graph_without_weight_gathers(write: Callable[..., Path]) -> None:
    result = run(write(gathers=[], costs=[]), "--costs")
    assert result.exit_code == 0
    assert result.stdout.startswith("mode pinned: no weight gathers\n")
    assert "Weight gathers" not in result.stdout


def test_an_order_that_is_not_legal_is_status_1(write: Callable[..., Path]) -> None:
    path = write(legal=False)
    result = run(path)
    assert result.exit_code == 1
    assert "the order is not legal" in result.stdout
    assert run(path, "--json").exit_code == 1


@pytest.mark.parametrize(
    "text", ["", "{}", "no report", REPORT.read_text()[:5000], '{"version": 2}']
)
def test_what_is_no_report_is_one_line_and_status_2(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    result = run(path)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {path}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'REPORT'"),
        (["none.json"], "none.json: cannot be read: No such file or directory"),
        ([REPORT, "--sort", "colour"], "'colour' is not one of 'from', 'to', 'slot'"),
        ([REPORT, "--sort", "total"], "--sort total sorts the cost table: add --costs"),
    ],
)
def test_bad_usage_is_status_2(arguments: list[str | Path], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_report_is_explained_without_loading_torch() -> None:
    program = (
        "import sys\n"
        "from overlap_core.cli import main\n"
        "main(['explain', sys.argv[1]], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(REPORT)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert result.stdout.splitlines()[-1] == "False"
