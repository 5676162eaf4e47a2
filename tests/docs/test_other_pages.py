"""The blocks of the other pages run in a fresh environment, and all links lead somewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ..wheels import CORE, REPO_ROOT, FreshEnvironment, fresh_environment, wheels
from .faulty import HOOKS
from .pages import PAGES, blocks_of, follow, missing_lines

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

LINKING = (REPO_ROOT / "README.md", *sorted(PAGES.rglob("*.md")))


@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["index", "registering-ops", "testing"])
def test_blocks_run(fresh_environment: FreshEnvironment, name: str) -> None:
    environment = fresh_environment(CORE)
    page = PAGES / f"{name}.md"
    assert blocks_of(page)
    follow(page, environment, environment.work / name, timeout=200)


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
