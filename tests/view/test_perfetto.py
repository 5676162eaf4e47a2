"""The trace for Perfetto, checked against the format's rules."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve

from overlap_core.costs import Machine
from overlap_core.placement import Coalesced
from overlap_core.view import build_timelines, to_chrome_trace

from .reports import layered_reports


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    reports = layered_reports(2, (0, 1))
    built = to_chrome_trace(build_timelines([("report", report) for report in reports]))
    copied: dict[str, Any] = json.loads(json.dumps(built, allow_nan=False))
    return copied


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_process_for_each_order_of_each_rank(trace: dict[str, Any]) -> None:
    names = {
        event["pid"]: event["args"]["name"]
        for event in of_phase(trace, "M")
        if event["name"] == "process_name"
    }
    assert names == {
        1: "rank 0 before (program order)",
        2: "rank 0 after (final order)",
        3: "rank 1 before (program order)",
        4: "rank 1 after (final order)",
    }
    threads = [e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == "thread_name"]
    assert Counter(threads) == dict.fromkeys(
        ("host", "compute", "group fsdp, 2 ranks", "group cp, 2 ranks"), 4
    )


def test_slices_have_what_the_format_asks_for_and_do_not_overlap(trace: dict[str, Any]) -> None:
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in of_phase(trace, "X"):
        assert set(event) - {"cname"} == {"ph", "name", "pid", "tid", "ts", "dur", "cat", "args"}
        tracks[event["pid"], event["tid"]].append(event)
    assert len(tracks) == 4 * 3  # the host's marks are instants
    for events in tracks.values():
        for one, following in pairwise(events):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-6
    assert Counter(event["cat"] for event in of_phase(trace, "X"))["exposed"] > 0


def test_times_are_microseconds(trace: dict[str, Any]) -> None:
    product = next(e for e in of_phase(trace, "X") if e["name"] == "mm_0_qkv")
    assert product["dur"] == 140


def test_arrows_lead_from_gathers_to_the_compute_that_needs_them(trace: dict[str, Any]) -> None:
    slices = {
        (e["pid"], e["tid"], e["ts"]): e["name"] for e in of_phase(trace, "X") if e["dur"] > 0
    }
    starts = {e["id"]: e for e in of_phase(trace, "s")}
    ends = {e["id"]: e for e in of_phase(trace, "f")}
    assert len(starts) == 4 * 8
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] == end["pid"]
        assert start["ts"] <= end["ts"]
        source = slices[start["pid"], start["tid"], start["ts"]].removeprefix("exposed: ")
        assert source.startswith("gather_")
        assert slices[end["pid"], end["tid"], end["ts"]] == source.replace("gather", "mm")


def test_a_gather_says_why_it_is_where_it_is(trace: dict[str, Any]) -> None:
    found = next(e for e in of_phase(trace, "i") if e["name"] == "launch gather_0_out")
    assert found["args"]["verdict"] == "hidden"
    assert found["args"]["why"] == "launched 4 nodes earlier, behind enough compute"
    assert found["s"] == "t"


def test_a_host_that_takes_time_has_slices_and_a_coalesced_call_an_arrow_for_each_gather() -> None:
    (report,) = layered_reports(1)
    assert report.graph is not None
    launches = tuple(report.graph.index[f"gather_0_{part}"] for part in ("up", "down"))
    report = evolve(
        report,
        machine=Machine(kernel_host_ns=2_000, collective_host_ns=9_000, wait_host_ns=1_000),
        coalesced=(Coalesced(launches=launches, ns=150_000),),
    )
    trace = to_chrome_trace(build_timelines([("report", report)]))
    after = [event for event in trace["traceEvents"] if event["pid"] == 2]
    slices = {e["name"]: e["dur"] for e in after if e["ph"] == "X" and e["tid"] == 0}
    assert slices["launch gather_0_up"] == 9
    assert slices["issue mm_0_up"] == 2
    assert slices["wait wait_gather_0_up"] == 1
    assert [e["name"] for e in after if e["ph"] == "i"] == ["launch gather_0_down"]
    starts = [e["ts"] for e in after if e["ph"] == "s"]
    assert len(starts) == 4
    assert starts[2] == starts[3]
