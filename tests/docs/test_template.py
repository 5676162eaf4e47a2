"""The template works when it is copied and renamed, as its README says."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from ..wheels import CORE, Environment, FreshEnvironment, Project, fresh_environment, wheels
from .pages import PAGES, add_pip, blocks_of, run_commands

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

TEMPLATE = PAGES / "template"


@pytest.fixture(scope="module")
def environment(fresh_environment: FreshEnvironment) -> Environment:
    made = fresh_environment(CORE)
    add_pip(made)
    return made


@pytest.fixture(scope="module")
def renamed(environment: Environment) -> Path:
    """A copy, in which all commands of the README's second part were run."""
    made_here = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    folder = shutil.copytree(TEMPLATE, environment.work / "mine", ignore=made_here)
    _, *commands = blocks_of(TEMPLATE / "README.md")
    for block in commands:
        assert block.language == "console"
        run_commands(block, environment, folder, timeout=300)
    return folder


@pytest.mark.full
def test_a_renamed_copy_is_installed_and_passes_its_tests(
    environment: Environment, renamed: Path
) -> None:
    listed = json.loads(environment.run(["overlap-core", "plugins", "--json"], timeout=300))
    (plugin,) = (one for one in listed if not one["builtin"])
    assert (plugin["name"], plugin["distribution"]) == ("video", "overlap-video")


@pytest.mark.full
def test_nothing_in_a_renamed_copy_has_the_old_name(renamed: Path) -> None:
    files = [path for path in renamed.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(files) == 3
    for path in files:
        assert "template" not in path.read_text(encoding="utf-8"), path


def test_it_needs_the_versions_that_our_own_plugins_need() -> None:
    text = (TEMPLATE / "pyproject.toml").read_text(encoding="utf-8")
    assert '"overlap-core>=0.1,<0.2"' in text
    assert Project.load(TEMPLATE).plugins == ("template",)
