"""Measured exposure, on traces whose answer is easy to see. Times are microseconds."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from overlap_core._marks import CALL_WAIT
from overlap_core.errors import TraceFileError
from overlap_core.placement import Coalesced
from overlap_core.report import Report, load_report
from overlap_core.traces import Measurement, load_trace, measure_gathers

from .builder import TraceBuilder, report_of

HERE = Path(__file__).parent
REAL_TRACE, REAL_REPORT = HERE / "h200-forward.json.gz", HERE / "h200-forward-report.json"
"""Recorded on one of two NVIDIA H200 with torch 2.11, forward, 3 steps; reduced to what counts."""


@pytest.fixture
def measure(tmp_path: Path) -> Any:
    """Write a trace, read it, and measure."""

    def run(trace: TraceBuilder, *reports: Report) -> Measurement:
        return measure_gathers(load_trace(trace.save(tmp_path / "trace.json")), reports)

    return run


def exposed_us(found: Measurement) -> dict[str, float]:
    return {gather.name: gather.exposed_ns / 1000 for gather in found.gathers}


def test_a_gather_is_exposed_while_no_compute_runs(measure: Any) -> None:
    trace = TraceBuilder()
    trace.step(1, 0, 1000)
    trace.gather(10, 100)  # until 110; compute from 30 to 90 on two streams
    trace.kernel(30, 40)
    trace.kernel(50, 40, stream=8)
    trace.gather(200, 50)
    trace.kernel(190, 100)
    found = measure(trace, report_of("a", "b"))
    assert exposed_us(found) == {"a": 40, "b": 0}
    assert [gather.took_ns for gather in found.gathers] == [100_000, 50_000]
    assert [gather.cost_ns for gather in found.gathers] == [100_000, 100_000]
    assert (found.device, found.steps, found.incomplete_steps) == ("cuda", 1, 0)


def test_predictions_are_the_reports(measure: Any) -> None:
    trace = TraceBuilder()
    trace.gather(0, 150)
    trace.gather(200, 50)
    report = report_of("a", "b")
    found = measure(trace, report)
    assert [(g.exposed_ns_before, g.exposed_ns_after) for g in found.gathers] == [
        (g.exposed_ns_before, g.exposed_ns_after) for g in report.gathers
    ]
    assert [gather.ratio for gather in found.gathers] == [1.5, None]


def test_the_median_over_steps_counts(measure: Any) -> None:
    trace = TraceBuilder()
    for step, dur in enumerate((10, 500, 30)):
        trace.step(step, 1000 * step, 900)
        trace.gather(1000 * step + 10, dur)
    found = measure(trace, report_of("a"))
    assert exposed_us(found) == {"a": 30}
    assert found.steps == 3


def test_a_kernel_belongs_to_the_step_that_launched_it(measure: Any) -> None:
    trace = TraceBuilder()
    trace.gather(0, 7, launched=None)  # still running from before the profile
    trace.step(1, 10, 100)
    trace.step(2, 110, 100)
    trace.gather(300, 20, launched=50)
    trace.gather(400, 40, launched=150)
    trace.gather(500, 99, launched=900)  # behind the last step
    found = measure(trace, report_of("a"))
    assert exposed_us(found) == {"a": 30}
    assert found.steps == 2


def test_groups_are_matched_by_name(measure: Any) -> None:
    """Kernels of two groups start in another order than the launches."""
    trace = TraceBuilder()
    trace.gather(0, 10, group="dp", stream=21)
    trace.gather(5, 20, group="fsdp")
    trace.gather(40, 30, group="fsdp")
    found = measure(trace, report_of("a", "b", "c", groups=("fsdp", "dp", "fsdp")))
    assert exposed_us(found) == {"a": 20, "b": 10, "c": 30}


def test_groups_without_names_are_told_apart_by_how_much_they_do(measure: Any) -> None:
    trace = TraceBuilder(host=False)
    trace.gather(0, 10, stream=21)
    trace.gather(5, 20)
    trace.gather(40, 30)
    report = report_of("a", "b", "c", groups=("fsdp", "dp", "fsdp"))
    assert exposed_us(measure(trace, report)) == {"a": 20, "b": 10, "c": 30}
    trace.gather(90, 30, stream=21)
    alike = report_of("a", "b", "c", "d", groups=("fsdp", "dp", "fsdp", "dp"))
    with pytest.raises(TraceFileError, match="on 2 streams without the names of their process"):
        measure(trace, alike)


def test_kernels_of_a_generic_name_are_known_by_what_torch_notes(measure: Any) -> None:
    trace = TraceBuilder()
    trace.gather(0, 10, name="ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)")
    trace.kernel(20, 10, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", stream=20)
    found = measure(trace, report_of("a"))
    assert exposed_us(found) == {"a": 10}


def test_communication_is_no_compute_that_hides(measure: Any) -> None:
    trace = TraceBuilder()
    trace.gather(0, 100)
    trace.kernel(0, 100, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", stream=21)
    trace.add("gpu_memcpy", "Memcpy DtoD", 0, 100, stream=7)
    assert exposed_us(measure(trace, report_of("a"))) == {"a": 100}


def test_a_graph_that_runs_twice_in_a_step(measure: Any) -> None:
    trace = TraceBuilder()
    trace.step(1, 0, 1000)
    for index, dur in enumerate((10, 20, 30, 40)):
        trace.gather(100 * index, dur)
    found = measure(trace, report_of("a", "b"))
    assert exposed_us(found) == {"a": 20, "b": 30}
    assert found.steps == 2


def test_a_step_of_two_graphs(measure: Any) -> None:
    trace = TraceBuilder()
    for index, dur in enumerate((10, 20, 30)):
        trace.gather(100 * index, dur)
    found = measure(trace, report_of("a", "b"), report_of("a", prefix="back"))
    assert [(g.report, g.name, g.exposed_ns) for g in found.gathers] == [
        (0, "a", 10_000),
        (0, "b", 20_000),
        (1, "a", 30_000),
    ]


def test_a_step_that_lacks_gathers_is_left_out(measure: Any) -> None:
    trace = TraceBuilder()
    trace.step(1, 0, 400)
    trace.gather(0, 10)
    trace.gather(100, 10)
    trace.step(2, 400, 400)
    trace.gather(500, 90)
    found = measure(trace, report_of("a", "b"))
    assert exposed_us(found) == {"a": 10, "b": 10}
    assert (found.steps, found.incomplete_steps) == (1, 1)


def test_without_kernels_it_is_the_time_in_waits(measure: Any) -> None:
    trace = TraceBuilder()
    for step in range(2):
        trace.step(step, 1000 * step, 900)
        for index, dur in enumerate((40, 10)):
            start = 1000 * step + 100 * index
            trace.add("cpu_op", "_c10d_functional::wait_tensor", start, dur + step)
    found = measure(trace, report_of("a", "b"))
    assert exposed_us(found) == {"a": 40.5, "b": 10.5}
    assert found.device == "cpu"
    assert [gather.took_ns for gather in found.gathers] == [None, None]


def coalesced_report() -> Report:
    """The gathers `a` and `b` are one call, `c` is alone."""
    report = report_of("a", "b", "c")
    assert report.graph is not None
    launches = (report.graph.index["a"], report.graph.index["b"])
    gathers = tuple(evolve(g, call=0 if g.name in "ab" else None) for g in report.gathers)
    return evolve(report, coalesced=(Coalesced(launches=launches, ns=150_000),), gathers=gathers)


def test_waits_for_a_coalesced_call_are_marks_of_the_profile(measure: Any) -> None:
    trace = TraceBuilder()
    trace.add("user_annotation", CALL_WAIT, 0, 70)
    trace.add("user_annotation", CALL_WAIT, 100, 2)
    trace.add("cpu_op", "_c10d_functional::wait_tensor", 200, 30)
    found = measure(trace, coalesced_report())
    assert exposed_us(found) == {"a": 72, "c": 30}
    assert [gather.gathers for gather in found.gathers] == [2, 1]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_trace_without_those_marks_is_refused_with_what_to_do(measure: Any, alone: int) -> None:
    trace = TraceBuilder()
    for _ in range(alone):
        trace.add("cpu_op", "_c10d_functional::wait_tensor", 200, 30)
    with pytest.raises(
        TraceFileError,
        match=r"doesn't show the waits for them: record it with this version .*coalesce='off'",
    ):
        measure(trace, coalesced_report())
    plain = TraceBuilder()
    plain.add("cpu_op", "_c10d_functional::wait_tensor", 200, 30)
    with pytest.raises(TraceFileError, match=r"in order, such as forward and backward$"):
        measure(plain, report_of("a", "b"))


def test_what_does_not_belong_together_is_refused(measure: Any) -> None:
    trace = TraceBuilder()
    trace.gather(0, 10)
    with pytest.raises(
        TraceFileError, match=r"a step has 1 on 'fsdp', the graphs have 2 on 'fsdp'\. Give the"
    ):
        measure(trace, report_of("a", "b"))
    with pytest.raises(TraceFileError, match="the trace is of rank 0, the report of rank 1"):
        measure(trace, evolve(report_of("a"), rank=1))
    with pytest.raises(TraceFileError, match="no weight gathers, so there is nothing to compare"):
        measure(trace, evolve(report_of("a"), gathers=()))
    with pytest.raises(TraceFileError, match="neither NCCL all-gather kernels nor"):
        measure(TraceBuilder(), report_of("a"))
    trace.rank = None
    assert measure(trace, evolve(report_of("a"), rank=1)).steps == 1


def test_a_trace_of_an_h200() -> None:
    found = measure_gathers(load_trace(REAL_TRACE), [load_report(REAL_REPORT)])
    assert (found.device, found.steps, found.incomplete_steps) == ("cuda", 3, 0)
    assert len(found.gathers) == 16
    assert {gather.group for gather in found.gathers} == {"0"}
    for gather in found.gathers:
        assert gather.took_ns is not None
        assert 0 <= gather.exposed_ns <= gather.took_ns


def test_a_trace_of_an_h200_is_measured_as_by_stepping_through_it() -> None:
    """Exposed time of one gather, found microsecond by microsecond."""
    events = json.loads(gzip.decompress(REAL_TRACE.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event["cat"] == "kernel"]
    gathers = [k for k in kernels if "Process Group Name" in k["args"]]
    others = [k for k in kernels if "nccl" not in k["name"]]
    assert len(gathers) == 3 * 16
    times = []
    for step in range(3):
        gather = sorted(gathers, key=lambda k: k["ts"])[16 * step + 6]
        instants = [gather["ts"] + at / 10 for at in range(int(gather["dur"] * 10))]
        free = [t for t in instants if not any(k["ts"] <= t < k["ts"] + k["dur"] for k in others)]
        times.append(len(free) / 10)
    found = measure_gathers(load_trace(REAL_TRACE), [load_report(REAL_REPORT)])
    assert found.gathers[6].exposed_ns / 1000 == pytest.approx(sorted(times)[1], abs=0.5)


BAD_VALUES = (10**400, -1, float("nan"), float("inf"), [1], {"a": 1}, None, True, "x")
KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
ARGS = ("stream", "correlation", "Process Group Name", "Collective name")


@given(
    st.data(),
    st.sampled_from([*KEYS, *(f"args.{name}" for name in ARGS)]),
    st.sampled_from(BAD_VALUES),
)
def test_a_damaged_trace_is_measured_or_refused(data: Any, key: str, value: object) -> None:
    trace = TraceBuilder()
    trace.step(1, 0, 1000)
    trace.gather(10, 100)
    trace.kernel(30, 40)
    events = [{**event, "args": dict(event.get("args") or {})} for event in trace.events]
    event = data.draw(st.sampled_from(events))
    place, _, name = key.rpartition(".")
    (event["args"] if place else event)[name] = value
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        with suppress(TraceFileError):
            measure_gathers(load_trace(path), [report_of("a")])
