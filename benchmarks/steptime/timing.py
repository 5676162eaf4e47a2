"""Step times, both ways; host time; peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .clocks import Clocks
    from .ranks import Control

__all__ = ["Round", "Summary", "peak_bytes", "summarize", "synchronize", "time_round"]


@attrs.frozen(kw_only=True)
class Round:
    """One round of one contender; each number is the maximum over ranks."""

    back_to_back_ms: float
    """A step of a run without a host synchronization, by the device's clock."""
    back_to_back_wall_ms: float
    """The same by the host's clock, the last synchronization included."""
    issue_ms: float
    """Time in which the host issued one of those steps; it may have waited for a full queue."""
    synchronized_ms: float
    """Median of steps after each of which the host waited."""
    host_ms: float
    """Median time until such a step's call returned: the host's own work, if it runs ahead."""
    sm_mhz: float | None = None
    """Clock of this rank's GPU in the run without synchronization; None: not read."""
    watts: float | None = None
    capped: float | None = None
    """Share of those readings in which the clock was held down by the limit of power."""


@attrs.frozen(kw_only=True)
class Summary:
    """Medians over rounds, and the spread (largest less smallest) of both step times."""

    rounds: int
    back_to_back_ms: float
    back_to_back_spread_ms: float
    synchronized_ms: float
    synchronized_spread_ms: float
    issue_ms: float
    host_ms: float
    sm_mhz: float | None = None
    watts: float | None = None
    capped: float | None = None


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_round(
    run: Callable[[], object],
    steps: int,
    device: torch.device,
    control: Control,
    clocks: Clocks | None = None,
    warm: int = 2,
) -> Round:
    """Time a contender both ways, all ranks together."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(warm):
            run()
        synchronize(device)
        control.barrier()
        start = time.perf_counter()
        device_ms, wall_ms, issue_ms = _back_to_back(run, steps, device)
        reading = None if clocks is None else clocks.between(start, time.perf_counter())
        control.barrier()
        step_ms, host_ms = _synchronized(run, steps, device)
    finally:
        if collecting:
            gc.enable()
    slowest = control.largest([device_ms, wall_ms, issue_ms, statistics.median(host_ms), *step_ms])
    return Round(
        back_to_back_ms=slowest[0],
        back_to_back_wall_ms=slowest[1],
        issue_ms=slowest[2],
        synchronized_ms=statistics.median(slowest[4:]),
        host_ms=slowest[3],
        sm_mhz=None if reading is None else reading.sm_mhz,
        watts=None if reading is None else reading.watts,
        capped=None if reading is None else reading.capped,
    )


def _back_to_back(
    run: Callable[[], object], steps: int, device: torch.device
) -> tuple[float, float, float]:
    events = None
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    start = time.perf_counter()
    if events:
        events[0].record()
    for _ in range(steps):
        run()
    if events:
        events[1].record()
    issued = time.perf_counter()
    synchronize(device)
    wall_ms = (time.perf_counter() - start) * 1e3 / steps
    device_ms = events[0].elapsed_time(events[1]) / steps if events else wall_ms
    return device_ms, wall_ms, (issued - start) * 1e3 / steps


def _synchronized(
    run: Callable[[], object], steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    step_ms, host_ms = [], []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        issued = time.perf_counter()
        synchronize(device)
        step_ms.append((time.perf_counter() - start) * 1e3)
        host_ms.append((issued - start) * 1e3)
    return step_ms, host_ms


def summarize(rounds: Sequence[Round]) -> Summary:
    """Of at least one round."""

    def column(name: str) -> list[float]:
        return [float(getattr(one, name)) for one in rounds]

    def spread(name: str) -> float:
        return max(column(name)) - min(column(name))

    def median_if_any(name: str) -> float | None:
        found = [value for one in rounds if (value := getattr(one, name)) is not None]
        return statistics.median(found) if found else None

    return Summary(
        rounds=len(rounds),
        back_to_back_ms=statistics.median(column("back_to_back_ms")),
        back_to_back_spread_ms=spread("back_to_back_ms"),
        synchronized_ms=statistics.median(column("synchronized_ms")),
        synchronized_spread_ms=spread("synchronized_ms"),
        issue_ms=statistics.median(column("issue_ms")),
        host_ms=statistics.median(column("host_ms")),
        sm_mhz=median_if_any("sm_mhz"),
        watts=median_if_any("watts"),
        capped=median_if_any("capped"),
    )


def peak_bytes(
    run: Callable[[], object], own_bytes: int, device: torch.device, control: Control
) -> int | None:
    """Most memory of a step as if the contender were alone; None off CUDA.

    What a step allocates on top of what is there, plus the contender's own parameters, inputs
    excluded; maximum over ranks. Steps run back to back, so that memory that one step still holds
    while the next one starts counts.
    """
    if device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        run()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before + own_bytes
    return int(control.largest([peak])[0])
