"""How long a call takes on its device: events on a GPU, a monotonic clock on a CPU."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LOCKSTEP_ITERATIONS", "time_calls"]

LOCKSTEP_ITERATIONS = 8
"""Timed calls of a collective between two barriers; the same on all ranks, always."""
_WARM_UP = 2
_TARGET_NS = 20_000_000
_LEAST, _MOST = 3, 20


def time_calls(
    call: Callable[[], object],
    device: str,
    *,
    iterations: int | None = None,
    hold: Callable[[], None] | None = None,
) -> int:
    """Nanoseconds of one call, without the host's share on a GPU.

    Args:
        call: what to time; called twice before, to load and to choose kernels.
        device: where it runs, for instance `cpu` or `cuda:0`.
        iterations: exactly so many timed calls, as collectives need them; None: as many as fit
            into 20 ms, between 3 and 20.
        hold: keeps the device busy while calls are queued, so that short kernels are timed back
            to back and not the host.
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
    if iterations is None:
        iterations = min(_MOST, max(_LEAST, _TARGET_NS // once_ns))
    if cuda:
        return _time_on_gpu(call, device, iterations, hold)
    times = []
    for _ in range(iterations):
        start_ns = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start_ns)
    return round(statistics.median(times))


def _time_on_gpu(
    call: Callable[[], object], device: str, iterations: int, hold: Callable[[], None] | None
) -> int:
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
