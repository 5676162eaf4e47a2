"""What all tests share: paths, and an environment without our variables."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start from defaults, whatever the shell that runs them has set."""
    for name in ("OVERLAP_CORE", "OVERLAP_CORE_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout: the folder that holds pyproject.toml."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def package_root(repo_root: Path) -> Path:
    """The folder of the package `overlap_core`."""
    return repo_root / "overlap_core"
