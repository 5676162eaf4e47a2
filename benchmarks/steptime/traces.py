"""Where a step's time goes, from the kernels of a profile.

All is computed from the device events of a Chrome trace, whose format is the same in all versions
of torch. A collective's kind comes from its NCCL kernel's name; kernels that carry no kind in their
name (NCCL's generic one) take that of the stream they run on.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import attrs
from torch.profiler import ProfilerActivity, profile, schedule

from overlap_core.traces import interval_of, kernel_kinds, length, subtract, union

from .timing import synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from overlap_core.traces import Interval

__all__ = [
    "GatherGroup",
    "GatherKernel",
    "StepProfile",
    "analyze",
    "load",
    "profile_steps",
    "save_trace",
    "without_first_step",
]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MATMUL = re.compile(r"gemm|nvjet|cutlass|matmul|triton_tem|_mm_", re.IGNORECASE)


@attrs.frozen(kw_only=True)
class GatherKernel:
    """One gather kernel; times in µs, from the first event of the profile."""

    start_us: float
    duration_us: float
    exposed_us: float
    stream: int
    in_head: bool
    """It starts before the first matrix product of its step."""


@attrs.frozen(kw_only=True)
class GatherGroup:
    """The gathers of one stream, which is one communicator's; milliseconds of a step."""

    stream: int
    gathers: int
    """Kernels in a step: a coalesced gather of many weights is one, or a few."""
    gather_ms: float
    exposed_ms: float
    head_exposed_ms: float
    past_head_share: float | None
    """Exposed part of the time of the gathers that are not in the head, 0 to 1."""


@attrs.frozen(kw_only=True)
class StepProfile:
    """Milliseconds of one step, averaged over the profiled ones.

    `compute`, `gather_exposed`, `all_to_all_alone`, `reduce_alone`, `other` and `idle` add up to
    `step`.
    """

    steps: int
    """How many were profiled."""
    step_ms: float
    """From the first kernel to the last, host lateness included."""
    compute_ms: float
    """Some kernel runs that is not NCCL's."""
    compute_sum_ms: float
    """The same kernels' times added up."""
    gather_ms: float
    """Gather kernels' time added up, waiting for late peers included."""
    gather_exposed_ms: float
    """A gather runs, and no compute kernel does."""
    gather_exposed_beside_all_to_all_ms: float
    """The part of it in which an all-to-all runs too."""
    head_exposed_ms: float
    """The part of it from gathers that start before the step's first matrix product."""
    all_to_all_ms: float
    all_to_all_alone_ms: float
    """An all-to-all runs, and neither compute nor a gather does."""
    reduce_ms: float
    """Reduce-scatters and all-reduces."""
    reduce_alone_ms: float
    """One of them runs, and neither compute nor a gather nor an all-to-all does."""
    other_ms: float
    """Only copies, fills or other collectives run."""
    idle_ms: float
    """Nothing runs."""
    gathers: int
    """Gather kernels in a step."""
    kernels: int
    top_compute: tuple[tuple[str, float, int], ...]
    """Names of kernels with the most time: milliseconds and calls in a step."""
    gather_kernels: tuple[GatherKernel, ...]
    """Of all profiled steps, in order of start."""

    @property
    def exposed_share(self) -> float | None:
        """Exposed part of gather time, 0 to 1."""
        return self.gather_exposed_ms / self.gather_ms if self.gather_ms else None

    @property
    def past_head_share(self) -> float | None:
        """The same for the gathers that are not in the head: they could have been hidden."""
        return _past_head_share(self.gather_kernels)

    @property
    def gather_groups(self) -> tuple[GatherGroup, ...]:
        """Exposed gather time by group, most gather time first."""
        by_stream: dict[int, list[GatherKernel]] = defaultdict(list)
        for kernel in self.gather_kernels:
            by_stream[kernel.stream].append(kernel)

        def ms(kernels: Sequence[GatherKernel], name: str) -> float:
            return sum(float(getattr(kernel, name)) for kernel in kernels) / 1e3 / self.steps

        groups = [
            GatherGroup(
                stream=stream,
                gathers=len(kernels) // self.steps,
                gather_ms=ms(kernels, "duration_us"),
                exposed_ms=ms(kernels, "exposed_us"),
                head_exposed_ms=ms([k for k in kernels if k.in_head], "exposed_us"),
                past_head_share=_past_head_share(kernels),
            )
            for stream, kernels in by_stream.items()
        ]
        return tuple(sorted(groups, key=lambda group: (-group.gather_ms, group.stream)))


def _past_head_share(kernels: Sequence[GatherKernel]) -> float | None:
    past = [kernel for kernel in kernels if not kernel.in_head]
    total = sum(kernel.duration_us for kernel in past)
    return sum(kernel.exposed_us for kernel in past) / total if total else None


def profile_steps(
    run: Callable[[], object],
    path: Path,
    device: torch.device,
    *,
    steps: int = 3,
    host: bool = False,
    wait_each: bool = False,
) -> None:
    """Profile steps into a Chrome trace.

    Args:
        run: one step.
        path: of the JSON file to write.
        device: where it runs.
        steps: how many are recorded, after two that are not.
        host: record the host's operators too; that slows the host down.
        wait_each: wait for the device after each step; else they run back to back.
    """
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    if host or not activities:
        activities.append(ProfilerActivity.CPU)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=2, active=steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for index in range(2 + steps):
            run()
            if wait_each or index in (1, 1 + steps):
                synchronize(device)
            profiler.step()


def save_trace(path: Path, target: Path, limit_bytes: int = 16_000_000) -> str:
    """Compress a trace to `target`; what was done, in words."""
    packed = gzip.compress(path.read_bytes(), compresslevel=6)
    if len(packed) >= limit_bytes:
        return f"trace not kept: {len(packed) / 1e6:.1f} MB"
    target.write_bytes(packed)
    return f"{target.name}, {len(packed) / 1e6:.1f} MB"


def without_first_step(trace: dict[str, Any], steps: int) -> tuple[dict[str, Any], int]:
    """A trace whose ranks run abreast: they start the first step at different times.

    Args:
        trace: a Chrome trace as loaded from JSON.
        steps: how many equal steps it holds.

    Returns:
        What lies on the device from the second step's first gather on (without gathers: its first
        kernel), and how many steps that are; the trace as it is, if that can't be told.
    """
    on_device = [e for e in trace.get("traceEvents", ()) if e.get("cat") in _ON_DEVICE]
    kernels = sorted(
        (event for event in on_device if event["cat"] == "kernel"), key=lambda e: float(e["ts"])
    )
    kinds = kernel_kinds(kernels)
    starts = [float(e["ts"]) for e, kind in zip(kernels, kinds, strict=True) if kind == "gather"]
    starts = starts or [float(event["ts"]) for event in kernels]
    if steps < 2 or not starts or len(starts) % steps:
        return trace, steps
    begin = starts[len(starts) // steps]
    events = [event for event in on_device if float(event["ts"]) >= begin]
    return {**trace, "traceEvents": events}, steps - 1


def analyze(trace: dict[str, Any], steps: int) -> StepProfile | None:
    """Where the time goes; None for a trace without kernels.

    Args:
        trace: a Chrome trace as loaded from JSON.
        steps: how many equal steps it holds.
    """
    kernels, copies = [], []
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X" and event.get("dur") is not None:
            if event.get("cat") == "kernel":
                kernels.append(event)
            elif event.get("cat") in _ON_DEVICE:
                copies.append(event)
    if not kernels:
        return None
    kernels.sort(key=lambda event: (float(event["ts"]), float(event["dur"])))
    kinds = kernel_kinds(kernels)
    groups: dict[str, list[Any]] = defaultdict(list)
    for event, kind in zip(kernels, kinds, strict=True):
        groups[kind].append(event)

    compute = union(map(interval_of, groups["compute"]))
    gathers = union(map(interval_of, groups["gather"]))
    all_to_alls = union(map(interval_of, groups["all_to_all"]))
    gathers_alone = subtract(gathers, compute)
    all_to_all_alone = subtract(subtract(all_to_alls, compute), gathers)
    reduces_alone = union(map(interval_of, groups["reduce"]))
    for taken in (compute, gathers, all_to_alls):
        reduces_alone = subtract(reduces_alone, taken)
    busy = union([*map(interval_of, kernels), *map(interval_of, copies)])
    first, last = busy[0][0], busy[-1][1]
    accounted = sum(map(length, (compute, gathers_alone, all_to_all_alone, reduces_alone)))

    gather_kernels = _gather_kernels(groups["gather"], compute, groups["compute"], first, steps)

    def ms(us: float) -> float:
        return us / 1e3 / steps

    return StepProfile(
        steps=steps,
        step_ms=ms(last - first),
        compute_ms=ms(length(compute)),
        compute_sum_ms=ms(sum(float(event["dur"]) for event in groups["compute"])),
        gather_ms=ms(sum(float(event["dur"]) for event in groups["gather"])),
        gather_exposed_ms=ms(length(gathers_alone)),
        gather_exposed_beside_all_to_all_ms=ms(
            length(gathers_alone) - length(subtract(gathers_alone, all_to_alls))
        ),
        head_exposed_ms=ms(sum(k.exposed_us for k in gather_kernels if k.in_head)),
        all_to_all_ms=ms(sum(float(event["dur"]) for event in groups["all_to_all"])),
        all_to_all_alone_ms=ms(length(all_to_all_alone)),
        reduce_ms=ms(sum(float(event["dur"]) for event in groups["reduce"])),
        reduce_alone_ms=ms(length(reduces_alone)),
        other_ms=ms(length(busy) - accounted),
        idle_ms=ms(last - first - length(busy)),
        gathers=len(gather_kernels) // steps,
        kernels=len(kernels) // steps,
        top_compute=_top(groups["compute"], steps),
        gather_kernels=gather_kernels,
    )


def _gather_kernels(
    gathers: Sequence[Any], busy: list[Interval], compute: Sequence[Any], first: float, steps: int
) -> tuple[GatherKernel, ...]:
    """The gathers, with what of each lies outside `busy`; times from `first` on."""
    intervals = [interval_of(event) for event in gathers]
    products = [float(e["ts"]) for e in compute if _MATMUL.search(str(e["name"]))]
    heads = _heads(intervals, products, steps)
    return tuple(
        GatherKernel(
            start_us=round(start - first, 2),
            duration_us=round(end - start, 2),
            exposed_us=round(length(subtract([(start, end)], busy)), 2),
            stream=int(event.get("args", {}).get("stream", -1)),
            in_head=in_head,
        )
        for event, (start, end), in_head in zip(gathers, intervals, heads, strict=True)
    )


def _heads(gathers: Sequence[Interval], products: Sequence[float], steps: int) -> list[bool]:
    """Which gathers start before the first matrix product of their step.

    A step starts with its first gather, which holds if all steps have equally many; if they don't,
    no gather counts as one of a head.
    """
    if len(gathers) % steps:
        return [False] * len(gathers)
    each = len(gathers) // steps
    heads = []
    for step in range(steps):
        own = gathers[step * each : (step + 1) * each]
        # A product of the step before may still run when this step's first gather starts.
        until = next((ts for ts in products if own and ts >= own[0][1]), None)
        heads += [until is None or start < until for start, _ in own]
    return heads


def _top(compute: Sequence[Any], steps: int) -> tuple[tuple[str, float, int], ...]:
    time_us: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in compute:
        time_us[event["name"]] += float(event["dur"])  # type: ignore[assignment]
        calls[event["name"]] += 1
    return tuple(
        (name[:120], round(us / 1e3 / steps, 4), calls[name] // steps)
        for name, us in time_us.most_common(20)
    )


def load(path: Path) -> dict[str, Any]:
    """Read a Chrome trace."""
    with path.open(encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
    return trace
