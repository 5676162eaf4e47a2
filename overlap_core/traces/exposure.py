"""Measured exposure of each gather, beside the predicted one.

On a GPU a gather is exposed while its NCCL kernel runs and no kernel of compute does. On a CPU,
whose traces show no kernels, it is exposed while the host is blocked in its wait.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from attrs import field, frozen

from overlap_core._marks import CALL_WAIT
from overlap_core.errors import TraceFileError

from .expected import Call, expected_gathers, expected_waits, first_launches
from .intervals import length, subtract, union
from .kernels import interval_of, kernel_kinds, stream_of
from .matching import match_steps
from .steps import split_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlap_core.outcome import GatherOutcome
    from overlap_core.report import Report

    from .intervals import Interval
    from .trace import Event, Trace

__all__ = ["MeasuredGather", "Measurement", "measure_gathers"]

_WAIT_OP = "_c10d_functional::wait_tensor"
_WAITS = {("cpu_op", _WAIT_OP), ("user_annotation", CALL_WAIT)}
"""Category and name of what the host does in a wait, for one gather and for a coalesced call."""


@frozen(kw_only=True)
class MeasuredGather:
    """One weight gather, or one coalesced call of several.

    Nanoseconds; measured ones are medians over the profiled steps.
    """

    report: int
    """Which of the reports it is of."""
    name: str
    """Of the launch, of a call's first one."""
    gathers: int
    """How many weights the call gathers."""
    group: str | None
    cost_ns: int | None
    """Predicted time of the gather; None: unknown."""
    took_ns: int | None
    """Measured time of its kernel, waiting for late peers included; None: the trace can't say."""
    exposed_ns_before: int
    exposed_ns_after: int
    """Predicted exposed time, in program order and in the final one."""
    exposed_ns: int
    """Measured exposed time."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted exposed time in the final order; None: none was predicted."""
        return self.exposed_ns / self.exposed_ns_after if self.exposed_ns_after else None


@frozen(kw_only=True)
class Measurement:
    """All weight gathers of the reports, in the order in which they are launched."""

    device: str
    """`cuda`: from kernels. `cpu`: from the host's waits."""
    steps: int
    """How often the graphs ran in what was compared."""
    incomplete_steps: int
    """Steps left out because they don't hold all calls of the reports."""
    gathers: tuple[MeasuredGather, ...]


@frozen(kw_only=True)
class _Sample:
    exposed_us: float
    took_us: float | None


@frozen(kw_only=True)
class _Samples:
    device: str
    expected: Mapping[str, Sequence[Call]]
    steps: list[dict[str, list[_Sample]]]
    """For each step what happened on each queue, in order."""
    by_name: bool = field(default=True)
    """Whether the trace's queues have the reports' names."""


def measure_gathers(trace: Trace, reports: Sequence[Report]) -> Measurement:
    """Set a trace beside the reports of the graphs that ran in each of its steps.

    Gathers are matched by order: the n-th all-gather of a group in a step is the n-th that the
    reports' final orders launch on it.

    Args:
        trace: of one rank, recorded while the committed orders ran.
        reports: of that rank, in the order in which a step runs their graphs.

    Raises:
        TraceFileError: the trace is of another rank, or has other gathers than the reports.
    """
    for report in reports:
        if trace.rank is not None and trace.rank != report.rank:
            raise TraceFileError(
                f"the trace is of rank {trace.rank}, the report of rank {report.rank}"
            )
    if not any(report.gathers for report in reports):
        raise TraceFileError("the report has no weight gathers, so there is nothing to compare")
    samples = _device_samples(trace, reports) or _host_samples(trace, reports)
    if samples is None:
        raise TraceFileError(
            "the trace has neither NCCL all-gather kernels nor "
            f"{_WAIT_OP} ops: record it with ProfilerActivity.CPU and, on a GPU, "
            f"ProfilerActivity.CUDA{_advice(trace, reports)}"
        )
    try:
        matched = match_steps(samples.expected, samples.steps, by_name=samples.by_name)
    except TraceFileError as error:
        advice = _advice(trace, reports) if samples.device == "cpu" else ""
        raise TraceFileError(f"{error}{advice}") from None
    found: dict[Call, list[list[_Sample]]] = defaultdict(list)
    for run in matched.runs:
        once: dict[Call, list[_Sample]] = defaultdict(list)
        for call, sample in run:
            once[call].append(sample)
        for call, parts in once.items():
            found[call].append(parts)
    return Measurement(
        device=samples.device,
        steps=len(matched.runs),
        incomplete_steps=matched.incomplete,
        gathers=tuple(
            gather
            for index, report in enumerate(reports)
            for gather in _beside(index, report, found)
        ),
    )


def _device_samples(trace: Trace, reports: Sequence[Report]) -> _Samples | None:
    kernels = trace.of("kernel")
    kinds = kernel_kinds(kernels)
    gathers = [k for k, kind in zip(kernels, kinds, strict=True) if kind == "gather"]
    if not gathers:
        return None
    compute = union(
        interval_of(k) for k, kind in zip(kernels, kinds, strict=True) if kind == "compute"
    )
    steps = split_steps(trace, gathers)
    by_name = all(_group_of(event) is not None for events in steps for event in events)
    queued: list[dict[str, list[_Sample]]] = []
    for events in steps:
        queues: dict[str, list[_Sample]] = defaultdict(list)
        for event in events:
            queue = str(_group_of(event)) if by_name else "/".join(stream_of(event))
            queues[queue].append(_kernel_sample(event, compute))
        queued.append(dict(queues))
    expected = expected_gathers(reports)
    return _Samples(device="cuda", expected=expected, steps=queued, by_name=by_name)


def _group_of(event: Event) -> object:
    """The group's name, which torch notes at kernels if the host was profiled too."""
    return (event.get("args") or {}).get("Process Group Name")


def _kernel_sample(event: Event, compute: list[Interval]) -> _Sample:
    whole = interval_of(event)
    return _Sample(exposed_us=length(subtract([whole], compute)), took_us=float(event["dur"]))


def _host_samples(trace: Trace, reports: Sequence[Report]) -> _Samples | None:
    waits = [event for event in trace.events if (event.get("cat"), event.get("name")) in _WAITS]
    if not waits:
        return None
    steps = [
        {"waits": [_Sample(exposed_us=float(event["dur"]), took_us=None) for event in events]}
        for events in split_steps(trace, waits)
    ]
    return _Samples(device="cpu", expected={"waits": expected_waits(reports)}, steps=steps)


def _advice(trace: Trace, reports: Sequence[Report]) -> str:
    """What else may be wrong with a host's trace that doesn't match."""
    is_marked = any(event.get("name") == CALL_WAIT for event in trace.of("user_annotation"))
    if is_marked or not any(report.coalesced for report in reports):
        return ""
    return (
        ". The graphs have coalesced calls, and this trace doesn't show the waits for them: record "
        "it with this version of overlap_core, or with OverlapConfig(coalesce='off')"
    )


def _beside(
    index: int, report: Report, found: Mapping[Call, list[list[_Sample]]]
) -> list[MeasuredGather]:
    gathers = []
    graph = report.graph
    assert graph is not None
    first = first_launches(report)
    times = {graph.nodes[call.launches[0]].name: call.ns for call in report.coalesced}
    together: dict[str, list[GatherOutcome]] = {}
    for gather in sorted(report.gathers, key=lambda gather: gather.target):
        together.setdefault(first.get(gather.name, gather.name), []).append(gather)
    for name, parts_of_call in together.items():
        position = graph.index[name]
        alone_ns = report.costs[position].ns if report.costs else None
        runs = found.get(Call(report=index, name=name), [])
        if not runs:
            raise TraceFileError(f"nothing in the trace matches gather {name!r}")
        took = [sample.took_us for parts in runs for sample in parts if sample.took_us is not None]
        gathers.append(
            MeasuredGather(
                report=index,
                name=name,
                gathers=len(parts_of_call),
                group=graph.nodes[position].group,
                cost_ns=times.get(name, alone_ns),
                took_ns=round(median(took) * 1000) if took else None,
                exposed_ns_before=sum(one.exposed_ns_before for one in parts_of_call),
                exposed_ns_after=sum(one.exposed_ns_after for one in parts_of_call),
                exposed_ns=round(median(sum(s.exposed_us for s in parts) for parts in runs) * 1000),
            )
        )
    return gathers
