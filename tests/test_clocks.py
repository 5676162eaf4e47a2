"""No test is decided by how busy the machine is: clocks are injected, real deadlines are long."""

from __future__ import annotations

import ast
from functools import partial
from typing import TYPE_CHECKING

import pytest

from .virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAITS = {"time.sleep", "time.monotonic", "time.monotonic_ns", "time.time", "time.time_ns"}
"""What code that waits gets from an `overlap_core._clock.Clock`. `time.perf_counter` may be used:
it measures, and decides nothing."""

ALLOWED_WAITS = {
    "_clock.py": "the one place",
    "testing/processes.py": "ends real processes that hang",
}
"""Path in the package -> why."""

DEADLINES = ("deadline_s", "timeout", "timeout_s", "patience_s", "budget_s")
"""How names of arguments end that are limits of a wait."""

LONG_S = 60.0
"""A limit that no machine reaches by being busy."""

ALLOWED_LIMITS = {
    ("tests/test_config.py", "OverlapConfig(deadline_s=5)"): "waits for nothing",
    ("tests/doctor/test_job.py", "connect(timeout_s=1)"): "passes: nobody ever listens there",
    (
        "tests/host/test_host.py",
        "OverlapConfig(plugin_timeout_s=0.05)",
    ): "passes: the hook blocks until it has passed",
    (
        "tests/docs/test_hook_pages.py",
        "complaint(timeout_s=0.05)",
    ): "passes: the hook blocks until it has passed",
    (
        "tests/inductor/test_order_check.py",
        "check_collective_order(deadline_s=1)",
    ): "passes: the collective is kept back until it has passed",
    (
        "tests/inductor/test_order_check.py",
        "check_collective_order(deadline_s=0)",
    ): "is refused",
}
"""(file, call) -> why a limit below `LONG_S` doesn't decide anything there."""

UNDER_TEST = ("tests/testing/", "tests/fault_cases.py", "tests/test_fault_matrix.py")
"""Real processes that are late, hang or die, and the limits that end them."""


def dotted(node: ast.AST) -> str:
    """`a.b` of an expression of names; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def waits_in(tree: ast.AST) -> set[str]:
    """What a module uses of `WAITS`, also if it is imported by name."""
    found = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found & WAITS


def short_limits(tree: ast.Module) -> Iterator[str]:
    """Calls with a real limit below `LONG_S`, such as "connect(timeout_s=1)"."""
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        given = [*call.args, *(word.value for word in call.keywords)]
        if any(ast.unparse(value).lower().endswith(("clock", "clock()")) for value in given):
            continue  # in virtual time
        for word in call.keywords:
            value = constants.get(dotted(word.value), word.value)
            if not (isinstance(value, ast.Constant) and isinstance(value.value, (int, float))):
                continue
            if (word.arg or "").endswith(DEADLINES) and value.value < LONG_S:
                name = dotted(call.func).rpartition(".")[2]
                yield f"{name}({word.arg}={value.value:g})"


def test_whatever_waits_has_its_clock_injected(package_root: Path) -> None:
    found = {
        path.relative_to(package_root).as_posix(): used
        for path in sorted(package_root.rglob("*.py"))
        if (used := waits_in(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert {path: used for path, used in found.items() if path not in ALLOWED_WAITS} == {}


def test_real_limits_in_tests_are_long(repo_root: Path) -> None:
    short = set()
    for pattern in ("tests/**/*.py", "plugins/*/tests/**/*.py", "examples/**/*.py"):
        for path in repo_root.glob(pattern):
            where = path.relative_to(repo_root).as_posix()
            if not where.startswith(UNDER_TEST):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                short |= {(where, call) for call in short_limits(tree)}
    assert sorted(short - ALLOWED_LIMITS.keys()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.sleep(1)", {"time.sleep"}),
        ("from time import monotonic", {"time.monotonic"}),
        ("def f(clock=time.monotonic): ...", {"time.monotonic"}),
        ("time.perf_counter()", set()),
        ("self.clock.sleep(1)", set()),
    ],
)
def test_waits(source: str, found: set[str]) -> None:
    assert waits_in(ast.parse(source)) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a.f(deadline_s=5)", ["f(deadline_s=5)"]),
        ("f(plugin_timeout_s=0.05)", ["f(plugin_timeout_s=0.05)"]),
        ("SHORT = 0.5\ndef g(): f(timeout=SHORT)", ["f(timeout=0.5)"]),
        ("f(deadline_s=5, clock=clock)", []),
        ("f(store, self.clock, deadline_s=5)", []),
        ("f(timeout_s=5, clock=VirtualClock())", []),
        ("f(deadline_s=60); f(timeout=limit)", []),
    ],
)
def test_short_limits(source: str, found: list[str]) -> None:
    assert list(short_limits(ast.parse(source))) == found


def test_virtual_time_passes_once_all_sleep() -> None:
    clock = VirtualClock()
    clock.sleep(3600)
    assert clock.now() == 3600
    woke: list[tuple[float, int]] = []

    def sleeper(number: int) -> None:
        for _ in range(3):
            clock.sleep(number)
            woke.append((clock.now(), number))

    clock.run([partial(sleeper, number) for number in (2, 5)])
    assert [number for _, number in sorted(woke)] == [2, 2, 5, 2, 5, 5]
    assert woke == sorted(woke)
    assert clock.now() == 3600 + 15
    clock.sleep(0)
    assert clock.now() == 3600 + 15


def test_a_call_that_fails_in_virtual_time_is_a_result() -> None:
    clock = VirtualClock()

    def fail() -> float:
        raise ValueError

    def wait() -> float:
        clock.sleep(60)
        return clock.now()

    failed, waited = clock.run([fail, wait])
    assert isinstance(failed, ValueError)
    assert waited == 60
