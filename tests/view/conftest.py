"""A headless Chromium for tests of pages, where one is installed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium as the system installed it; Playwright's own builds are not needed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium is installed (Debian's package `chromium`)")
    with api.sync_playwright() as playwright:
        # Its sandbox needs rights that containers lack; the page is our own.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
