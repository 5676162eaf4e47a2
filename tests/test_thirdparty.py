"""A model library that ships its own registrations, installed like any user would install it."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import overlap_core

from .small_graphs import graph_of, opaque
from .wheels import PROJECTS, Environment, FreshEnvironment, fresh_environment, wheels

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

LIBRARY = "thirdparty-model-lib"
FOLDER = PROJECTS[LIBRARY].folder
OPS = ["video_blocks.attn_cp.default", "video_blocks.dispatch.default"]

SKELETON = """
import sys, overlap_core as oc
print(*(entry.op for entry in oc.skeleton(oc.OverlapGraph.load(sys.argv[1]))))
"""

WITHOUT_CORE = """
import importlib.util, torch, video_blocks.model
rows = torch.ops.video_blocks.dispatch(torch.ones(3, 2, device="meta"), [1, 2], [4], "group")
print(*rows.shape, importlib.util.find_spec("overlap_core"))
"""

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(fresh_environment: FreshEnvironment) -> Environment:
    """Everything in this repository."""
    return fresh_environment(*PROJECTS)


@pytest.fixture(scope="module")
def results(environment: Environment) -> list[dict[str, Any]]:
    """What `run.py` prints, one object a rank."""
    # A copy, so that no folder of the checkout is on the ranks' path.
    script = shutil.copy(FOLDER / "run.py", environment.work)
    output = environment.run(["python", script], timeout=500)
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.ranks
def test_two_ranks_end_in_slot_with_measured_costs(results: list[dict[str, Any]]) -> None:
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        assert result["mode"] == "slot", result["why"]
        assert result["committed"]
        assert result["costs"] == {op: ["measured"] for op in OPS}, result["notes"]


@pytest.mark.ranks
def test_its_ops_are_in_the_skeleton_and_gathers_move(results: list[dict[str, Any]]) -> None:
    for result in results:
        mine = [op for op in result["skeleton"] if "video_blocks" in op]
        assert len(mine) == 6  # one attention and two exchanges in each of two blocks
        assert result["hoisted"] > 0


@pytest.mark.ranks
def test_outputs_equal_those_without_the_pass(results: list[dict[str, Any]]) -> None:
    assert [result["equal"] for result in results] == [True, True]


@pytest.mark.ranks
def test_it_ran_as_installed(results: list[dict[str, Any]], environment: Environment) -> None:
    for result in results:
        assert "video_blocks 1.0.0" in result["plugins"]
        for file in (result["core"], result["library"]):
            assert Path(file).is_relative_to(environment.folder)


@pytest.mark.ranks
def test_its_own_tests_pass(environment: Environment) -> None:
    tests = shutil.copytree(FOLDER / "tests", environment.work / "tests", dirs_exist_ok=True)
    environment.run(["python", "-m", "pytest", "-q", tests], timeout=300)


def test_without_its_plugin_the_ops_are_not_declared(
    environment: Environment, tmp_path: Path
) -> None:
    graph = tmp_path / "graph.json"
    node = opaque("attention", "x", group=None, issues_collective=False)
    graph_of(evolve(node, op=OPS[0])).save(graph)
    command = ["python", "-c", SKELETON, graph]
    assert "attn_cp" in environment.run(command, timeout=300)
    left_out = {"OVERLAP_CORE_DISABLE_PLUGINS": "video_blocks"}
    assert environment.run(command, env=left_out, timeout=300).strip() == ""


def test_the_library_works_where_the_core_is_not_installed(
    fresh_environment: FreshEnvironment,
) -> None:
    alone = fresh_environment(LIBRARY)
    output = alone.run(["python", "-c", WITHOUT_CORE], timeout=300)
    assert output.split() == ["4", "2", "None"]


def test_it_knows_nothing_but_the_public_names_of_the_core() -> None:
    used = set()
    for path in (FOLDER / "video_blocks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] != "overlap_core", path
            elif isinstance(node, ast.Import):
                assert not any(a.name.startswith("overlap_core.") for a in node.names), path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id == "overlap_core" else set()
    assert used == {"hookimpl"}
    assert used <= {*overlap_core.__all__}


def test_its_readme_shows_what_it_has() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|toml)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks] == ["python", "toml", "python"]
    files = {"python": "video_blocks/overlap.py", "toml": "pyproject.toml"}
    for language, block in blocks:
        assert block in (FOLDER / files[language]).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (FOLDER / target).exists(), target
