"""The trace for Perfetto, checked against the format's rules."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given

import overlap_core as oc
from overlap_core.costs import Machine
from overlap_core.placement import Coalesced
from overlap_core.report import Report
from overlap_core.testing.strategies import RankSet, rank_sets
from overlap_core.view import build_timelines, to_chrome_trace

from .chrome_trace import find_problems
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


def test_the_trace_keeps_the_rules_of_the_format(trace: dict[str, Any]) -> None:
    assert find_problems(trace) == []
    phases = Counter(event["ph"] for event in trace["traceEvents"])
    assert set(phases) == {"M", "X", "i", "C", "s", "f"}
    assert Counter(event["cat"] for event in of_phase(trace, "X"))["exposed"] > 0


BUSY_HOST = Machine(kernel_host_ns=2_000, collective_host_ns=9_000, wait_host_ns=1_000)


@given(rank_sets())
def test_the_trace_of_any_ranks_keeps_the_rules_of_the_format(ranks: RankSet) -> None:
    reports = [Report.of(outcome) for outcome in oc.simulate(ranks.graphs) if outcome.costs]
    for machine in (Machine(), BUSY_HOST):
        changed = [("report", evolve(report, machine=machine)) for report in reports]
        built = to_chrome_trace(build_timelines(changed))
        assert find_problems(json.loads(json.dumps(built, allow_nan=False))) == []


def _first(trace: dict[str, Any], phase: str) -> dict[str, Any]:
    return of_phase(trace, phase)[0]


@pytest.mark.parametrize(
    ("phase", "changes", "problem"),
    [
        ("X", {"dur": -1}, "its times are no numbers from 0"),
        ("X", {"ts": "0"}, "its times are no numbers from 0"),
        ("X", {"pid": "1"}, "pid and tid are integers"),
        ("X", {"name": 3}, "its name is no text"),
        ("X", {"ph": "Q"}, "phase 'Q' is not one that is used here"),
        ("X", {"tid": 17}, "thread 17 of process 1 has no thread name"),
        ("X", {"ts": 41.5, "dur": 1e9}, "overlaps another"),
        ("M", {"args": {}}, "metadata 'process_name' without its argument"),
        ("C", {"args": {"bytes": "18 MiB"}}, "a counter's values are numbers"),
        ("C", {"ts": 1e9}, "has two values at"),
        ("i", {"s": "x"}, "an instant's scope is g, p or t"),
        ("s", {"ts": 1e9}, "no slice holds its end s"),
        ("s", {"id": 10**6}, "has one end only"),
    ],
)
def test_the_check_of_the_rules_finds_what_breaks_them(
    trace: dict[str, Any], phase: str, changes: dict[str, Any], problem: str
) -> None:
    broken = json.loads(json.dumps(trace))
    _first(broken, phase).update(changes)
    assert any(problem in found for found in find_problems(broken))


def test_a_counter_follows_the_bytes_in_flight() -> None:
    (report,) = layered_reports(1)
    trace = to_chrome_trace(build_timelines([("report", report)]))
    values: dict[int, list[tuple[float, int]]] = {1: [], 2: []}
    for event in of_phase(trace, "C"):
        assert event["name"] == "gathered weights in flight"
        values[event["pid"]].append((event["ts"], event["args"]["bytes"]))
    weight = report.most_bytes_before
    assert values[1][:4] == [(0, 0), (4, weight), (94, 0), (516, weight)]
    assert max(nbytes for _, nbytes in values[2]) == report.most_bytes_after > weight
    assert values[2][-1][1] == 0


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
