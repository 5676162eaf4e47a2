"""The page in a real browser: it draws, zooms, finds, and says nothing on the console."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from click.testing import CliRunner

from overlap_core.cli import main
from overlap_core.costs import Machine
from overlap_core.report import bytes_in_words

from .reports import layered_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overlap_core.report import Report

DISTINCT_COLOURS = """() => {
    const canvas = document.getElementById("timeline");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const count = {};
    for (let i = 0; i < data.length; i += 4) {
        const key = `${data[i]},${data[i + 1]},${data[i + 2]}`;
        count[key] = (count[key] || 0) + 1;
    }
    return count;
}"""
ARTIFACTS = "OVERLAP_CORE_TEST_ARTIFACTS"
"""Names the folder in which screenshots are kept; else pytest's own folder has them."""
EXPOSED, HIDDEN, ISSUING = "213,94,0", "0,158,115", "195,204,214"
MEMORY = "123,111,176"
NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Write a page with the command, open it, and afterwards check that it was quiet."""
    said: list[str] = []
    asked: list[str] = []
    pages = []

    def open_reports(reports: Sequence[Report], **options: Any) -> Any:
        paths = [tmp_path / f"rank{index}.json" for index in range(len(reports))]
        for report, path in zip(reports, paths, strict=True):
            report.save(path)
        target = tmp_path / "view.html"
        arguments = ["view", *map(str, paths), "-o", str(target)]
        CliRunner().invoke(main, arguments, catch_exceptions=False)
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 720}, **options})
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(target.as_uri())
        page.evaluate(NEXT_FRAME)
        return page

    yield open_reports
    for page in pages:
        page.close()
    assert said == []
    assert all(url.startswith("file:") for url in asked)


def colours(page: Any) -> dict[str, int]:
    page.evaluate(NEXT_FRAME)
    found: dict[str, int] = page.evaluate(DISTINCT_COLOURS)
    return found


def range_of(page: Any) -> str:
    page.evaluate(NEXT_FRAME)
    text: str = page.inner_text("#range")
    return text


def blocks(page: Any) -> int:
    page.evaluate(NEXT_FRAME)
    return int(page.get_attribute("#timeline", "data-blocks"))


def test_it_draws_exposed_and_hidden_gathers(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = open_page(layered_reports(6, (0, 2)))
    seen = colours(page)
    assert seen[EXPOSED] > 1000
    assert seen[HIDDEN] > 1000
    folder = Path(os.environ.get(ARTIFACTS, tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / "view.png")
    assert "rank 1: mode slot" in page.inner_text(".ranks")


def test_it_draws_a_host_that_takes_time(open_page: Callable[..., Any]) -> None:
    (report,) = layered_reports(6)
    assert ISSUING not in colours(open_page([report]))
    machine = Machine(kernel_host_ns=20_000, collective_host_ns=30_000)
    assert colours(open_page([evolve(report, machine=machine)]))[ISSUING] > 1000


def test_it_zooms_and_moves(open_page: Callable[..., Any]) -> None:
    page = open_page(layered_reports(6))
    everything, all_blocks = range_of(page), blocks(page)
    page.mouse.move(700, 300)
    page.mouse.wheel(0, -1200)
    page.wait_for_function(
        "text => document.getElementById('range').value !== text", arg=everything
    )
    zoomed = range_of(page)
    assert blocks(page) < all_blocks / 2
    page.mouse.down()
    page.mouse.move(500, 300, steps=4)
    page.mouse.up()
    moved = range_of(page)
    assert moved != zoomed
    page.keyboard.press("ArrowLeft")
    assert range_of(page) != moved
    page.keyboard.press("0")
    assert range_of(page) == everything
    page.keyboard.press("+")
    assert range_of(page) != everything
    page.click("#fit")
    assert range_of(page) == everything


def test_it_finds_a_gather_by_a_part_of_its_name(open_page: Callable[..., Any]) -> None:
    page = open_page(layered_reports(6, (0, 2)))
    everything = range_of(page)
    page.keyboard.press("/")
    page.keyboard.type("R_2_UP")
    assert page.inner_text("#found") == "1 of 8"  # launch and wait, two orders, two ranks
    details = page.inner_text("#details")
    assert "gather_2_up: exposed, rank 0 before (program order)" in details
    assert "verdict hidden" in details
    assert "why launched 5 nodes earlier, behind enough compute" in details
    assert range_of(page) != everything
    page.keyboard.press("Enter")
    assert page.inner_text("#found") == "2 of 8"
    page.keyboard.press("Shift+Enter")
    assert page.inner_text("#found") == "1 of 8"
    page.fill("#search", "no such node")
    assert page.inner_text("#found") == "not found"


def test_the_reason_shows_on_hover(open_page: Callable[..., Any]) -> None:
    page = open_page(layered_reports(6))
    page.fill("#search", "gather_2_up")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")  # in the final order
    page.evaluate(NEXT_FRAME)
    assert "weight gather, hidden" in page.inner_text("#details")
    # A found block is in the middle; which lane it lies on is for the pointer to find out.
    box = page.locator("#timeline").bounding_box()
    x = box["x"] + 150 + (box["width"] - 150) / 2
    for y in range(int(box["y"]) + 24, int(box["y"] + box["height"]), 6):
        page.mouse.move(x, y)
        if page.is_visible("#tip") and "gather_2_up" in page.inner_text("#tip"):
            break
    tip = page.inner_text("#tip")
    assert "why launched 5 nodes earlier, behind enough compute" in tip
    assert "exposed before 90.0 µs" in tip
    page.mouse.move(x, 5)
    assert not page.is_visible("#tip")


def test_bytes_in_flight_are_drawn_and_told_on_hover(open_page: Callable[..., Any]) -> None:
    (report,) = layered_reports(2)
    page = open_page([report])
    assert colours(page)[MEMORY] > 1000
    box = page.locator("#timeline").bounding_box()
    x, seen = box["x"] + 150 + (box["width"] - 150) / 8, set()
    for y in range(int(box["y"]) + 24, int(box["y"] + box["height"]), 6):
        page.mouse.move(x, y)
        if page.is_visible("#tip") and "in flight" in page.inner_text("#tip"):
            seen.add(page.inner_text("#tip").splitlines()[0])
    assert {text.partition(" of ")[2] for text in seen} == {
        "gathered weights in flight, rank 0 before (program order)",
        "gathered weights in flight, rank 0 after (final order)",
    }
    steps = (*report.in_flight_before, *report.in_flight_after)
    assert {text.partition(" of ")[0] for text in seen} <= {bytes_in_words(n) for _, n in steps}
    page.mouse.click(x, y)  # nothing to choose there


def test_5000_nodes(open_page: Callable[..., Any]) -> None:
    (report,) = layered_reports(200)
    assert report.graph is not None
    assert len(report.graph.nodes) > 5000
    page = open_page([report])
    assert colours(page)
    everything = blocks(page)
    page.fill("#search", "gather_150_up")
    assert page.inner_text("#found") == "1 of 4"
    # Only what is in sight is drawn.
    assert blocks(page) < everything / 20


def test_a_name_is_never_markup(open_page: Callable[..., Any], tmp_path: Path) -> None:
    (report,) = layered_reports(1)
    report.save(tmp_path / "plain.json")
    name = "</script><img src=x onerror=console.log('out')>"
    text = (tmp_path / "plain.json").read_text()
    hostile = name.replace("'", "\\u0027")
    (tmp_path / "plain.json").write_text(text.replace("gather_0_up", hostile))
    page = open_page([type(report).load(tmp_path / "plain.json")])
    page.fill("#search", name)
    assert name in page.inner_text("#details")
    assert page.locator("img").count() == 0


def test_dark_pages_are_dark(open_page: Callable[..., Any]) -> None:
    page = open_page(layered_reports(1), color_scheme="dark")
    assert max(colours(page).items(), key=lambda item: item[1])[0] == "23,25,28"
