"""The pytest plugin `overlap_core`, which comes with the package: fixtures and a leak check.

pytest loads it in every run of an environment in which overlap_core is installed, so nothing
heavy is imported before a test asks for it. `-p no:overlap_core` leaves it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from overlap_core.testing.hosts import HookRecorder
    from overlap_core.testing.processes import RunRanks

__all__ = ["gloo_ranks", "hook_recorder", "no_leaks", "pooled_ranks"]

_INI = "overlap_leak_check"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting that checks every test for leaks."""
    parser.addini(
        _INI,
        "fail tests that leave torch's configuration, the environment, registered ops or the "
        "installed pass other than they found it",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line("markers", "ranks: starts real processes that talk through gloo; slow")
    config.addinivalue_line(
        "markers",
        "allow_leaks(*checks): the leak check leaves these out (torch config, environment, "
        "op registry, installed pass); without arguments, all",
    )


@pytest.fixture
def gloo_ranks() -> RunRanks:
    """Run a function on real ranks: `gloo_ranks(fn, world_size, *args, deadline_s=300)`.

    Calls `fn(rank, world_size, *args)` in one new process a rank, each with a gloo process group,
    and returns the results by rank. At the deadline every rank is killed, and the error shows
    where each one was. Further options are those of `overlap_core.testing.run_ranks`.
    """
    from overlap_core.testing.processes import run_ranks

    def run(
        fn: Callable[..., Any], world_size: int, *args: Any, deadline_s: float = 300.0, **more: Any
    ) -> list[Any]:
        return run_ranks(fn, world_size, *args, deadline_s=deadline_s, **more)

    return run


@pytest.fixture(scope="session")
def pooled_ranks() -> Iterator[RunRanks]:
    """Run a function on real ranks that stay alive: `pooled_ranks(fn, world_size, *args, ...)`.

    As `gloo_ranks`, but calls with one number of ranks share their processes for the whole
    session, which saves the imports and what Inductor does once in a process. Each call is a job
    of its own; see `overlap_core.testing.RankPool` for what it finds and what stays.
    """
    from overlap_core.testing.processes import RankPool

    pools: dict[int, RankPool] = {}

    def run(
        fn: Callable[..., Any], world_size: int, *args: Any, deadline_s: float = 300.0, **more: Any
    ) -> list[Any]:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size].run(fn, *args, deadline_s=deadline_s, **more)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture
def hook_recorder() -> HookRecorder:
    """A fresh `HookRecorder`, to be given to `host_with` beside the plugin under test."""
    from overlap_core.testing.hosts import HookRecorder

    return HookRecorder()


@pytest.fixture
def no_leaks() -> None:
    """Fail the test that leaves torch's configuration, the environment (OVERLAP_*, TORCH*),
    registered ops or the installed pass other than it found them.

    `overlap_leak_check = true` in the configuration file asks for it in every test.
    """


# An autouse fixture is set up before all others of its scope and torn down after them, so what
# `monkeypatch` sets and takes back is no leak, in whatever order a test names its fixtures.
@pytest.fixture(autouse=True)
def _overlap_leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    wanted = request.config.getini(_INI) or "no_leaks" in request.fixturenames
    marker = request.node.get_closest_marker("allow_leaks")
    if not wanted or (marker is not None and not marker.args):
        yield
        return
    from overlap_core.testing.leaks import ProcessState, find_leaks

    before = ProcessState.now()
    yield
    found = find_leaks(before, ProcessState.now(), ignore=() if marker is None else marker.args)
    if found:
        pytest.fail("the test left traces:\n" + "\n".join(found), pytrace=False)
