"""What all tests share: Hypothesis profiles, paths, and an environment without our variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: tests share their cores with compilers and with each other.
settings.register_profile(
    "dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=100, derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")


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
