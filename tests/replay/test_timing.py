"""How often things are called while they are timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.replay.timing import (
    LOCKSTEP_ITERATIONS,
    calls_in_flight,
    lockstep_calls,
    time_calls,
    time_in_lockstep,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

sizes = st.one_of(st.none(), st.integers(0, 1 << 40))
MIB = 1 << 20


@given(sizes)
def test_calls_of_a_batch_and_those_in_flight_are_bounded(nbytes: int | None) -> None:
    calls, flying = lockstep_calls(nbytes), calls_in_flight(nbytes)
    assert 1 <= flying <= calls <= 16
    assert flying == 1 or (nbytes is not None and flying * nbytes <= 200 * MIB)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_smaller_collectives_are_called_at_least_as_often(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert lockstep_calls(small) >= lockstep_calls(large)
    assert calls_in_flight(small) >= calls_in_flight(large)


@pytest.mark.parametrize(
    ("nbytes", "calls", "flying"),
    [
        (None, 4, 1),  # an opaque op waits inside
        (16 << 10, 16, 16),
        (1 * MIB, 16, 16),
        (19 * MIB, 4, 4),
        (88 * MIB, 4, 2),
        (1024 * MIB, 4, 1),
    ],
)
def test_calls_by_bytes(nbytes: int | None, calls: int, flying: int) -> None:
    assert (lockstep_calls(nbytes), calls_in_flight(nbytes)) == (calls, flying)


@pytest.mark.parametrize("nbytes", [None, 16 << 10, 88 * MIB])
def test_on_a_cpu_a_collective_is_waited_for_before_the_next(nbytes: int | None) -> None:
    events: list[str] = []

    def launch() -> int:
        events.append("launch")
        return len(events)

    def wait(number: int) -> None:
        assert number == len(events)
        events.append("wait")

    timing = time_in_lockstep(launch, wait, "cpu", nbytes=nbytes)
    assert timing.ns > 0
    assert timing.host_ns is None
    assert events == ["launch", "wait"] * (2 + LOCKSTEP_ITERATIONS)


def test_a_failure_of_a_timed_call_is_the_callers() -> None:
    def fails() -> Iterator[None]:
        yield
        yield
        raise RuntimeError("the third call fails")

    calls = fails()
    with pytest.raises(RuntimeError, match="third"):
        time_calls(lambda: next(calls), "cpu")
