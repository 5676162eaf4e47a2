"""How Hypothesis searches in all tests of this repository, what coverage sees, how workers share.

`same`, which every run has unless it asks for another profile, gives the same answer each time, on
every machine: what a test tries follows from its own source. `quick` tries the first of the same
examples, `thorough` more. `fuzz` tries what a seed says, for `tests/fuzz.py`; nothing is kept from
run to run, so that the seed alone decides.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import coverage
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# No deadlines: tests share their cores with compilers and with each other.
settings.register_profile(
    "same",
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("same"), max_examples=15)
settings.register_profile("thorough", settings.get_profile("same"), max_examples=200)
settings.register_profile("fuzz", settings.get_profile("same"), derandomize=False, max_examples=100)
settings.load_profile("same")

# Hypothesis mixes in the literals of all modules that are loaded, so a test would try other things
# alone than among others. Versions that don't, or no longer do it here, need nothing.
if hasattr(providers, "_get_local_constants"):
    _nothing: Any = type(providers._local_constants)()
    providers._get_local_constants = lambda: _nothing


# Processes that tests start run without coverage, which makes a compile half as long again.
_COVERAGE = "COVERAGE_PROCESS_CONFIG"
_config = os.environ.pop(_COVERAGE, "") if "PYTEST_XDIST_WORKER" in os.environ else ""


@pytest.fixture
def covered_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts run with coverage, if this one does."""
    if _config:
        monkeypatch.setenv(_COVERAGE, _config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Most properties run without coverage: they take twice as long, and examples suffice.

    Those of the test kit have it, as they draw what all others draw.
    """
    running = coverage.Coverage.current()
    if running is None or not _is_property(item) or "tests/testing/" in item.nodeid:
        return (yield)
    running.stop()
    try:
        return (yield)
    finally:
        running.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is long comes first: ranks that live, other ranks, properties."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    is_pooled = "pooled_ranks" in getattr(item, "fixturenames", ())
    has_ranks = item.get_closest_marker("ranks") is not None
    return [is_pooled, has_ranks, _is_property(item), True].index(True)


def _is_property(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has each file, and one all the files whose tests share living ranks."""
    from xdist.scheduler import LoadScopeScheduling

    # Not `--dist loadgroup`: pytest-xdist 3.8 cannot name groups to pytest 9.2.
    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "pool" if _shares_ranks(config.rootpath / file) else file

    return ByFile(config, log)


@cache
def _shares_ranks(file: Path) -> bool:
    return "pooled_ranks" in file.read_text(encoding="utf-8")
