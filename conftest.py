"""How Hypothesis searches in all tests of this repository, what coverage sees, how workers share.

`same`, which every run has unless it asks for another profile, gives the same answer each time, on
every machine: what a test tries follows from its own source. `quick` tries the first of the same
examples. `fuzz` tries what a seed says, for `tests/fuzz.py`; nothing is kept from run to run, so
that the seed alone decides.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import coverage
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from collections.abc import Iterator

# No deadlines: tests share their cores with compilers and with each other.
settings.register_profile(
    "same",
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("same"), max_examples=25)
settings.register_profile("fuzz", settings.get_profile("same"), derandomize=False)
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
    """Properties run without coverage: they take twice as long with it, and examples suffice."""
    running = coverage.Coverage.current()
    if running is None or not _is_property(item):
        return (yield)
    running.stop()
    try:
        return (yield)
    finally:
        running.start()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in a hook of its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each file on one worker, and all that share living ranks on one; what is long is first.

    For `--dist loadgroup --no-loadscope-reorder` of pytest-xdist.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    items.sort(key=_place)
    for item in items:
        group = "pool" if _is_pooled(item) else item.path.relative_to(config.rootpath).as_posix()
        item.add_marker(pytest.mark.xdist_group(group))


def _place(item: pytest.Item) -> int:
    has_ranks = item.get_closest_marker("ranks") is not None
    return [_is_pooled(item), has_ranks, _is_property(item), True].index(True)


def _is_property(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def _is_pooled(item: pytest.Item) -> bool:
    return "pooled_ranks" in getattr(item, "fixturenames", ())
