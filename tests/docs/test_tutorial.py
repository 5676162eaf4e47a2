"""The tutorial is followed word for word: from an empty folder to an installed plugin."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from zipfile import ZipFile

import pytest

from ..wheels import CORE, Environment, FreshEnvironment, fresh_environment, wheels
from .pages import PAGES, add_pip, follow

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

pytestmark = [pytest.mark.full, pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(fresh_environment: FreshEnvironment) -> Environment:
    made = fresh_environment(CORE)
    add_pip(made)
    return made


@pytest.fixture(scope="module")
def folder(environment: Environment) -> Path:
    """The tutorial's folder, after all of its blocks were followed in order."""
    folder = environment.work / "tutorial"
    follow(PAGES / "tutorial.md", environment, folder, timeout=300)
    return folder


def test_each_step_does_what_it_shows(environment: Environment, folder: Path) -> None:
    listed = json.loads(environment.run(["overlap-core", "plugins", "--json"], timeout=300))
    (plugin,) = (one for one in listed if one["name"] == "spread_mean")
    assert plugin["hooks"] == ["overlap_classify_node", "overlap_register_ops"]


def test_the_second_step_lists_the_plugin() -> None:
    text = (PAGES / "tutorial.md").read_text(encoding="utf-8")
    steps = text.split("\n## ")[1:]
    assert [step.partition(".")[0] for step in steps] == [str(n) for n in range(1, 8)]
    assert "$ overlap-core plugins\n" in steps[1]


def test_left_out_it_is_not_listed(environment: Environment, folder: Path) -> None:
    left_out = {"OVERLAP_CORE_DISABLE_PLUGINS": "spread_mean"}
    listed = environment.run(["overlap-core", "plugins"], env=left_out, timeout=300)
    assert "spread_mean" not in listed


def test_what_ships_holds_the_package_and_no_tests(folder: Path) -> None:
    (wheel,) = (folder / "dist").glob("*.whl")
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert names == ["overlap_spread_mean/__init__.py", "overlap_spread_mean/ops.py"]
