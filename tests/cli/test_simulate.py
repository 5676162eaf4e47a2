"""`overlap-core simulate`: formats, refusals, exit status; the pipeline has tests of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from click.testing import CliRunner, Result

import overlap_core
from overlap_core.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

GATHER = "_c10d_functional.all_gather_into_tensor.default"
WAIT = "_c10d_functional.wait_tensor.default"


def graph_data(
    rank: int = 0, *, extra: int = 0, groups: tuple[int, ...] = (0, 1), world_size: int = 2
) -> dict[str, Any]:
    """Two matmuls, each behind a weight gather, and `extra` nodes of compute before them."""

    def matmul(name: str, left: str, right: str, out: str) -> dict[str, Any]:
        return {
            "name": name,
            "kind": "compute",
            "op": "aten.mm.out",
            "reads": [left, right],
            "writes": [out],
            "sizes": [["64", "64"]],
            "dtypes": ["float32"],
            "cost_ns": 500_000,
        }

    nodes = [matmul(f"extra{i}", "x", "x", f"unused{i}") for i in range(extra)]
    previous = "x"
    for layer in range(2):
        nodes += [
            {
                "name": f"gather{layer}",
                "kind": "collective",
                "op": GATHER,
                "reads": [f"shard{layer}"],
                "writes": [f"launched{layer}"],
                "sizes": [["64", "64"]],
                "dtypes": ["float32"],
                "group": "0",
                "group_ranks": list(groups),
                "nbytes": 16_384,
                "cost_ns": 100_000,
            },
            {
                "name": f"wait{layer}",
                "kind": "wait",
                "op": WAIT,
                "reads": [f"launched{layer}"],
                "writes": [f"weight{layer}"],
            },
            matmul(f"mm{layer}", previous, f"weight{layer}", f"y{layer}"),
        ]
        previous = f"y{layer}"
    return {
        "version": 1,
        "rank": rank,
        "world_size": world_size,
        "symbols": {},
        "inputs": ["x", "shard0", "shard1"],
        "outputs": ["y1"],
        "nodes": nodes,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a graph file, named after its rank; return its path."""

    def write_graph(data: dict[str, Any], name: str = "") -> str:
        path = tmp_path / (name or f"rank{data['rank']}.json")
        path.write_text(json.dumps(data))
        return str(path)

    return write_graph


def run(*args: str, columns: int = 120) -> Result:
    env = {"COLUMNS": str(columns)}
    return CliRunner().invoke(main, ["simulate", *args], env=env, catch_exceptions=False)


def test_json_has_the_documented_form(write: Callable[..., str]) -> None:
    result = run(write(graph_data(1)), write(graph_data(0)), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert list(data) == ["mode", "scopes", "ranks"]
    assert data["mode"] == "identical"
    (scope,) = data["scopes"]
    assert list(scope) == ["ranks", "mode", "why"]
    assert scope["ranks"] == [0, 1]
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    names = [node["name"] for node in graph_data()["nodes"]]
    for rank in data["ranks"]:
        assert list(rank) == ["rank", "order", "collectives", "gathers", "legal"]
        assert rank["legal"] is True
        assert sorted(rank["order"]) == sorted(names)
        assert rank["collectives"] == ["gather0", "gather1"]
        for gather in rank["gathers"]:
            assert list(gather) == [
                "name",
                "from",
                "to",
                "slot",
                "verdict",
                "why",
                "exposed_ns_before",
                "exposed_ns_after",
            ]
            assert names[gather["from"]] == gather["name"]
            assert rank["order"][gather["to"]] == gather["name"]


def test_a_gather_moves_behind_compute(write: Callable[..., str]) -> None:
    data = json.loads(run(write(graph_data(0)), write(graph_data(1)), "--json").stdout)
    first, second = data["ranks"][0]["gathers"]
    assert second["verdict"] == "hidden"
    assert second["to"] < second["from"]
    assert second["exposed_ns_after"] < second["exposed_ns_before"]
    assert first["verdict"] != "hidden"


def test_mode_is_null_where_scopes_differ(write: Callable[..., str]) -> None:
    files = [
        write(graph_data(0, world_size=4, groups=(0, 1))),
        write(graph_data(1, world_size=4, groups=(0, 1))),
        write(graph_data(2, world_size=4, groups=(2, 3))),
        write(graph_data(3, world_size=4, groups=(2, 3), extra=1)),
    ]
    data = json.loads(run(*files, "--json").stdout)
    assert data["mode"] is None
    assert [(scope["ranks"], scope["mode"]) for scope in data["scopes"]] == [
        ([0, 1], "identical"),
        ([2, 3], "slot"),
    ]


@pytest.mark.parametrize("columns", [80, 160])
def test_summary_says_mode_reason_and_each_gather(write: Callable[..., str], columns: int) -> None:
    result = run(write(graph_data(0)), write(graph_data(1, extra=1)), columns=columns)
    assert result.exit_code == 0, result.output
    assert "ranks 0, 1: slot" in result.stdout
    assert result.stdout.count("gather1") == 2
    assert "hidden" in result.stdout
    assert "100.0" in result.stdout  # µs exposed before
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "\x1b" not in result.stdout


def test_summary_shows_names_as_they_are(write: Callable[..., str]) -> None:
    text = json.dumps(graph_data(0)).replace("gather1", "[bold]gather[/]")
    result = run(write(json.loads(text)))
    assert "[bold]gather[/]" in result.stdout


def test_summary_says_which_ranks_are_missing(write: Callable[..., str]) -> None:
    result = run(write(graph_data(0)))
    assert result.exit_code == 0, result.output
    assert "1 of 2 ranks have a file" in result.stdout


def test_a_graph_without_gathers(write: Callable[..., str]) -> None:
    data = graph_data(0)
    data["nodes"] = [
        {"name": "add", "kind": "compute", "op": "aten.add", "reads": ["x"], "writes": ["y1"]}
    ]
    result = run(write(data))
    assert result.exit_code == 0, result.output
    assert "no weight gathers" in result.stdout


def break_version(data: dict[str, Any]) -> None:
    data["version"] = 7


def break_kind(data: dict[str, Any]) -> None:
    data["nodes"][0]["kind"] = "magic"


def break_cost(data: dict[str, Any]) -> None:
    data["nodes"][0]["cost_ns"] = -1


def break_read(data: dict[str, Any]) -> None:
    data["nodes"][0]["reads"] = ["nowhere"]


def break_order(data: dict[str, Any]) -> None:
    data["nodes"][0]["after"] = ["mm1"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (break_version, "version"),
        (break_kind, "magic"),
        (break_cost, "-1"),
        (break_read, "nowhere"),
        (break_order, "gather0"),
    ],
)
def test_a_bad_file_is_one_line_with_the_place_and_status_2(
    write: Callable[..., str], spoil: Callable[[dict[str, Any]], None], reason: str
) -> None:
    bad = graph_data(1)
    spoil(bad)
    result = run(write(graph_data(0)), write(bad, "bad.json"), "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "bad.json" in line
    assert reason in line


@pytest.mark.parametrize("content", [None, "not JSON", "[]", "{}", "\x00"])
def test_a_file_that_is_no_graph(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    result = run(str(path))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "file.json" in line


def test_two_files_of_one_rank_are_refused(write: Callable[..., str]) -> None:
    result = run(write(graph_data(0)), write(graph_data(0), "again.json"))
    assert result.exit_code == 2
    assert "again.json: rank 0 is the rank of" in result.stderr
    assert "rank0.json" in result.stderr


def test_a_file_that_is_given_twice_is_named_once(write: Callable[..., str]) -> None:
    path = write(graph_data(0))
    result = run(path, path)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {path}: is given twice; give one file for each rank\n"


REPORT = Path(__file__).parents[1] / "report" / "report-v1.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "not a graph file: the file is empty"),
        (REPORT.read_bytes(), "a report, not a graph file: `overlap-core explain` reads it"),
    ],
    ids=["missing", "empty", "a report"],
)
def test_an_error_names_the_file_once(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "rank0.json"
    if content is not None:
        path.write_bytes(content)
    result = run(str(path))
    assert result.exit_code == 2
    assert result.stderr == f"Error: {path}: {message}\n"


def test_no_file_is_bad_usage() -> None:
    assert run().exit_code == 2


def test_an_illegal_order_is_status_1(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = overlap_core.simulate

    def spoiled(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        outcomes = simulate(*args, **kwargs)
        return (attrs.evolve(outcomes[0], legal=False), *outcomes[1:])

    monkeypatch.setattr(overlap_core, "simulate", spoiled)
    files = [write(graph_data(0)), write(graph_data(1))]
    result = run(*files)
    assert result.exit_code == 1
    assert "rank 0: the order is not legal" in result.stdout
    result = run(*files, "--json")
    assert result.exit_code == 1
    assert [rank["legal"] for rank in json.loads(result.stdout)["ranks"]] == [False, True]


POLICY = """
import overlap_core


@overlap_core.hookimpl
def overlap_classify_node(node):
    raise RuntimeError("the module was asked")


class Policy:
    @overlap_core.hookimpl
    def overlap_classify_node(self, node):
        raise RuntimeError("the attribute was asked")


policy = Policy()
"""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("policy_for_simulate", "the module was asked"),
        ("policy_for_simulate:policy", "the attribute was asked"),
    ],
)
def test_a_policy_is_added_by_import_path(
    write: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    why: str,
) -> None:
    (tmp_path / "policy_for_simulate.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    files = [write(graph_data(0)), write(graph_data(1))]
    result = run(*files, "--json", "--plugins", path)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["mode"] == "abort"
    assert why in data["scopes"][0]["why"]


LADDER = """
import overlap_core
from overlap_core.ranks.votes import Mode, ModeDecision


@overlap_core.hookimpl(specname="overlap_choose_mode")
def careful(votes):
    return ModeDecision(mode=Mode.PINNED, why="the ladder was asked")
"""


def test_a_ladder_of_a_plugin_decides_where_it_is_named(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ladder_for_simulate.py").write_text(LADDER)
    monkeypatch.syspath_prepend(tmp_path)
    files = [write(graph_data(0)), write(graph_data(1))]
    arguments = [*files, "--json", "--plugins", "ladder_for_simulate"]
    assert json.loads(run(*arguments).stdout)["mode"] == "identical"
    data = json.loads(run(*arguments, "--ladder", "careful").stdout)
    assert data["mode"] == "pinned"
    assert data["scopes"][0]["why"] == "the ladder was asked"
    result = run(*files, "--ladder", "careful")
    assert result.exit_code == 2
    assert "careful" in result.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module_anywhere", "cannot import 'no_such_module_anywhere'"),
        ("json:no_such_name", "'json' has no 'no_such_name'"),
        ("json, no_such_module_anywhere", "no_such_module_anywhere"),
    ],
)
def test_a_policy_that_cannot_be_found(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    result = run(write(graph_data(0)), "--plugins", path)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert reason in line
