"""Which step of a profile an event belongs to."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING

from .kernels import interval_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trace import Event, Trace

__all__ = ["split_steps"]

_STEP = re.compile(r"ProfilerStep#\d+")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def _host_launches(trace: Trace) -> dict[int, float]:
    """When the host launched each kernel, in microseconds, by the kernel's `correlation`."""
    found = {}
    for event in trace.of(*_LAUNCHES):
        correlation = (event.get("args") or {}).get("correlation")
        if isinstance(correlation, int):
            found[correlation] = float(event["ts"])
    return found


def split_steps(trace: Trace, events: Sequence[Event]) -> list[list[Event]]:
    """The events of each step, in the order of the steps.

    A step is what `profiler.step()` marks on the host. A kernel belongs to the step in which the
    host launched it, however late it runs; what was launched before the profile began, or outside
    all steps, is left out. Without marks everything is one step.
    """
    launches = _host_launches(trace)
    issued: list[tuple[float, Event]] = []
    for event in events:
        at: float | None = float(event["ts"])
        if event.get("cat") == "kernel" and launches:
            at = launches.get((event.get("args") or {}).get("correlation", -1))
        if at is not None:
            issued.append((at, event))
    marks = [e for e in trace.of("user_annotation") if _STEP.fullmatch(str(e.get("name")))]
    if not marks:
        return [[event for _, event in issued]]
    spans = [interval_of(mark) for mark in marks]
    starts = [start for start, _ in spans]
    steps: list[list[Event]] = [[] for _ in spans]
    for at, event in issued:
        step = bisect_right(starts, at) - 1
        if step >= 0 and at <= spans[step][1]:
            steps[step].append(event)
    return steps
