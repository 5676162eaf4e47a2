"""The blocks of the other pages run in a fresh environment, and all links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING

import pytest
from attrs import fields

from overlap_core import OverlapConfig, verdicts
from overlap_core.placement import GatherPlacement, Verdict
from overlap_core.ranks import Mode

from ..wheels import CORE, REPO_ROOT, FreshEnvironment, fresh_environment, wheels
from .faulty import HOOKS
from .pages import PAGES, blocks_of, follow, missing_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

READING = REPO_ROOT / "docs" / "reading-a-report.md"
LINKING = (REPO_ROOT / "README.md", *sorted((REPO_ROOT / "docs").rglob("*.md")))


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["index", "registering-ops", "testing"])
def test_blocks_run(fresh_environment: FreshEnvironment, name: str) -> None:
    environment = fresh_environment(CORE)
    page = PAGES / f"{name}.md"
    assert blocks_of(page)
    follow(page, environment, environment.work / name, timeout=300)


@pytest.mark.full
def test_a_report_reads_as_its_page_shows(fresh_environment: FreshEnvironment) -> None:
    environment = fresh_environment(CORE)
    follow(READING, environment, environment.work / "reading", timeout=300)


def test_the_page_about_reports_has_every_mode_verdict_and_reason() -> None:
    text = READING.read_text(encoding="utf-8")
    for word in (*Mode, *Verdict):
        assert f"| `{word}` |" in text or f"`{word}`, `" in text, word
    reasons = [*said_by(verdicts._judge), *said_by(verdicts._company)]
    assert len(reasons) > 10
    flat = " ".join(text.split())
    assert [reason for reason in reasons if reason not in flat] == []


def said_by(function: Callable[..., object]) -> list[str]:
    """The texts in a function, without its docstring and formats."""
    tree = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    doc = ast.get_docstring(tree, clean=False)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [
        one.strip(" :()=;")
        for one in texts
        if isinstance(one, str) and one not in (doc, "") and one[:1] != "."
    ]


def test_the_page_of_the_policy_has_every_attribute_of_a_placement() -> None:
    text = (PAGES / "hooks" / "overlap_adjust_plan.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| attribute of a placement .*?\n\n", text, flags=re.DOTALL)
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row)}
    assert {attribute.name for attribute in fields(GatherPlacement)} <= named


@pytest.mark.parametrize(
    "name",
    [
        "coalesce",
        "contention",
        "costs",
        "max_in_flight_bytes",
        "max_peak_growth",
        "mode_ladder",
        "slack_ns",
    ],
)
def test_the_readme_has_the_default_of_an_option(name: str) -> None:
    text = (REPO_ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^\| `{name}` \| `(.*?)` \|", text, flags=re.MULTILINE)
    assert ast.literal_eval(shown) == getattr(OverlapConfig(), name)


def test_the_index_lists_every_hook_and_every_page() -> None:
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(overlap_\w+)\]", text, flags=re.MULTILINE) == list(HOOKS)
    linked = set(re.findall(r"\]\(([\w./-]+\.md)", text))
    pages = {str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")}
    assert pages - {"index.md"} <= linked


def test_a_line_that_a_command_did_not_print_is_found() -> None:
    assert not missing_lines("a\n...\n1 passed in 0.02s", "a  \nb\n1 passed in 97.55s (0:01:37)")
    assert missing_lines("b\na", "a\nb") == ["a"]
    assert missing_lines("2 passed in 0.02s", "1 passed in 0.02s") == ["2 passed in 0s"]


def anchors(page: Path) -> set[str]:
    """What a link may name in a page, as GitHub makes it from headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(REPO_ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target, _, anchor in (link.partition("#") for link in links):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"
