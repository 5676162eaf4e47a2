"""How long a call takes on its device and on its host: events on a GPU, a monotonic clock else."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import torch
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

__all__ = [
    "LOCKSTEP_ITERATIONS",
    "Timing",
    "calls_in_flight",
    "host_ns_of_call",
    "lockstep_calls",
    "time_calls",
    "time_in_lockstep",
]

LOCKSTEP_ITERATIONS = 8
"""Timed calls of a collective on a CPU between two barriers; the same on all ranks, always."""
_BATCHES = 3
"""Batches of timed calls on a GPU, each after one call that is not timed."""
_FEWEST_CALLS, _MOST_CALLS, _BATCH_BYTES = 4, 16, 64 << 20
_IN_FLIGHT_BYTES = 192 << 20
_HOST_CALLS = 8
_WARM_UP = 2
_TARGET_NS = 20_000_000
_LEAST, _MOST = 3, 20


@frozen(kw_only=True)
class Timing:
    """One call, in nanoseconds."""

    ns: int
    """Between two calls that follow each other on the device, or wall time on a CPU."""
    host_ns: int | None = None
    """Host time to issue it; None: on a CPU, or the host had to wait for the device."""


def time_calls(
    call: Callable[[], object],
    device: str,
    *,
    hold: Callable[[], None] | None = None,
    calls: int | None = None,
) -> int:
    """Nanoseconds of one call that does not communicate, without the host's share on a GPU.

    Args:
        call: what to time; called twice before, to load and to choose kernels.
        device: where it runs, for instance `cpu` or `cuda:0`.
        hold: keeps the device busy while calls are queued, so that short kernels are timed back
            to back and not the host.
        calls: how many to time; None: as fit into 20 ms, between 3 and 20.
    """
    cuda = device.startswith("cuda")
    for _ in range(_WARM_UP - 1):
        call()
    if cuda:
        torch.cuda.synchronize(device)
    start_ns = time.perf_counter_ns()
    call()
    if cuda:
        torch.cuda.synchronize(device)
    once_ns = max(1, time.perf_counter_ns() - start_ns)
    iterations = calls or min(_MOST, max(_LEAST, _TARGET_NS // once_ns))
    if not cuda:
        return _median_wall_ns(call, iterations)
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if hold is not None:
            hold()
        start.record()
        for _ in range(iterations):
            call()
        end.record()
        end.synchronize()
        total_ms: float = start.elapsed_time(end)
        return round(total_ms * 1e6 / iterations)


def lockstep_calls(nbytes: int | None) -> int:
    """Timed calls of a collective in one batch on a GPU.

    It depends on the bytes alone, which are part of the key that ranks agree on: they all do the
    same number of calls. Small ones need more, since what starting and ending a batch costs is
    spread over its calls.
    """
    if nbytes is None:
        return _FEWEST_CALLS
    return max(_FEWEST_CALLS, min(_MOST_CALLS, _BATCH_BYTES // max(1, nbytes)))


def calls_in_flight(nbytes: int | None) -> int:
    """How many of the calls in a batch are launched before the first of them is waited for."""
    if nbytes is None:
        return 1
    return max(1, min(lockstep_calls(nbytes), _IN_FLIGHT_BYTES // max(1, nbytes)))


def time_in_lockstep(
    launch: Callable[[], T],
    wait: Callable[[T], None],
    device: str,
    *,
    nbytes: int | None,
    hold: Callable[[], None] | None = None,
) -> Timing:
    """Time of one call that communicates. All ranks are here now, for the same key.

    On a GPU several calls are in flight, as in a step, so that the network is timed and not the
    way from the launch to the end of the wait over two streams. Ranks come out of `hold` at
    different times, by more than a small collective takes: one untimed call before each batch lets
    all devices start it together.

    Args:
        launch: issues the communication.
        wait: makes the current stream, or a CPU, wait for what `launch` gave.
        device: where it runs, for instance `cpu` or `cuda:0`.
        nbytes: of the output on one rank, as in the key; None: unknown. The number of calls
            depends on it.
        hold: keeps the device busy while calls are queued.
    """
    for _ in range(_WARM_UP):
        wait(launch())
    if not device.startswith("cuda"):
        return Timing(ns=_median_wall_ns(lambda: wait(launch()), LOCKSTEP_ITERATIONS))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        if hold is not None:
            hold()
        held = torch.cuda.Event()
        held.record()
        batches = [_issue_batch(launch, wait, nbytes, held) for _ in range(_BATCHES)]
        torch.cuda.synchronize()
    # A batch that was still being queued when the load was over has timed the host.
    ahead = [batch for batch in batches if batch.ahead]
    return Timing(
        ns=round(statistics.median(batch.ns for batch in ahead or batches)),
        host_ns=min((batch.host_ns for batch in ahead), default=None),
    )


@frozen(kw_only=True)
class _Batch:
    """Calls in a row on a GPU; the events can be read when the device has come by."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    calls: int
    host_ns: int
    """Host time of one call."""
    ahead: bool
    """The device was busy with earlier work while they were queued."""

    @property
    def ns(self) -> float:
        return float(self.start.elapsed_time(self.end)) * 1e6 / self.calls


def _issue_batch(
    launch: Callable[[], T], wait: Callable[[T], None], nbytes: int | None, held: torch.cuda.Event
) -> _Batch:
    calls, depth = lockstep_calls(nbytes), calls_in_flight(nbytes)
    wait(launch())
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    began_ns = time.perf_counter_ns()
    flying: deque[T] = deque()
    for _ in range(calls):
        if len(flying) == depth:
            wait(flying.popleft())
        flying.append(launch())
    while flying:
        wait(flying.popleft())
    host_ns = (time.perf_counter_ns() - began_ns) // calls
    end.record()
    return _Batch(start=start, end=end, calls=calls, host_ns=host_ns, ahead=not held.query())


def host_ns_of_call(
    call: Callable[[], object], device: str, hold: Callable[[], None]
) -> int | None:
    """Host nanoseconds to issue a call on a GPU that is busy; None: the call waits for the device.

    Args:
        call: does not communicate; called once before.
        device: for instance `cuda:0`.
        hold: keeps the device busy for longer than the calls take the host.
    """
    call()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        hold()
        held = torch.cuda.Event()
        held.record()
        host_ns = _median_wall_ns(call, _HOST_CALLS)
        waited = held.query()
        torch.cuda.synchronize()
    return None if waited else host_ns


def _median_wall_ns(call: Callable[[], object], iterations: int) -> int:
    times = []
    for _ in range(iterations):
        start_ns = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start_ns)
    return round(statistics.median(times))
