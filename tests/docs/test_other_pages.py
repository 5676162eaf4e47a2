"""The blocks of the other pages run in a fresh environment, and all links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING

import pytest

from overlap_core import verdicts
from overlap_core.placement import Verdict
from overlap_core.ranks import Mode

from ..wheels import CORE, REPO_ROOT, FreshEnvironment, fresh_environment, wheels
from .faulty import HOOKS
from .pages import PAGES, blocks_of, follow, missing_lines

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

READING = REPO_ROOT / "docs" / "reading-a-report.md"
LINKING = (REPO_ROOT / "README.md", READING, *sorted(PAGES.rglob("*.md")))


@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["index", "registering-ops", "testing"])
def test_blocks_run(fresh_environment: FreshEnvironment, name: str) -> None:
    environment = fresh_environment(CORE)
    page = PAGES / f"{name}.md"
    assert blocks_of(page)
    follow(page, environment, environment.work / name, timeout=200)


@pytest.mark.timeout(400)
def test_a_report_reads_as_its_page_shows(fresh_environment: FreshEnvironment) -> None:
    environment = fresh_environment(CORE)
    follow(READING, environment, environment.work / "reading", timeout=100)


def test_the_page_about_reports_has_every_mode_verdict_and_reason() -> None:
    text = READING.read_text(encoding="utf-8")
    for word in (*Mode, *Verdict):
        assert f"| `{word}` |" in text or f"`{word}`, `" in text, word
    function = ast.parse(inspect.getsource(verdicts._judge)).body[0]
    doc = ast.get_docstring(function, clean=False)
    said = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
    reasons = [
        one.strip(" :()=") for one in said if isinstance(one, str) and one != doc and one[:1] != "."
    ]
    assert len(reasons) > 10
    flat = " ".join(text.split())
    assert [reason for reason in reasons if reason not in flat] == []


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
