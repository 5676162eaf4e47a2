"""The page as text: nothing from outside, and no name gets out of its place."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from overlap_core.report import report_from_json
from overlap_core.view import build_timelines, render_page

from .reports import layered_reports

EXAMPLE = Path(__file__).parents[1] / "report" / "report-v1.json"
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "'\"&amp;",
    "\u2028\ud800\x00",
    "]]>",
)


class Elements(HTMLParser):
    """Start tags with attributes, and the text of script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data


def page_with(name: str) -> str:
    text = json.dumps(json.loads(EXAMPLE.read_text()))
    data: dict[str, Any] = json.loads(text.replace('"gather1"', json.dumps(name)))
    data |= {"why": name}
    return render_page(build_timelines([(name, report_from_json(data))] * 2))


def test_nothing_comes_from_outside() -> None:
    page = render_page(build_timelines([("report", layered_reports(1)[0])]))
    elements = Elements(page)
    assert "http://" not in page.replace("http-equiv", "")
    assert "https://" not in page
    assert not {tag for tag, _ in elements.tags} & {"link", "img", "iframe", "object", "base"}
    for _, attributes in elements.tags:
        assert not {"src", "href", "srcset", "action"} & set(attributes)
    policy = next(a["content"] for tag, a in elements.tags if "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none';")


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_what_they_are(name: str) -> None:
    plain, page = Elements(page_with("plain")), Elements(page_with(name))
    assert page.tags == plain.tags
    data = json.loads(page.scripts[0])
    assert name in [node["node"] for node in data["ranks"][0]["nodes"]]
    assert data["ranks"][0]["label"] == f"rank 0, {name}"
    assert page.scripts[1:] == plain.scripts[1:]


def test_every_kind_of_block_has_a_colour_and_words() -> None:
    page = render_page(build_timelines([("report", layered_reports(1)[0])]))
    data = json.loads(Elements(page).scripts[0])
    for kind in data["kinds"]:
        assert f"--{kind['name']}: #" in page
        assert kind["words"]
