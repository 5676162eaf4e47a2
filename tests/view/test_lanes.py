"""Lanes of reports: what they hold, and that they agree with what the report says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given

import overlap_core as oc
from overlap_core.costs import Machine
from overlap_core.errors import ReportFileError
from overlap_core.placement import Coalesced
from overlap_core.report import Report, load_report
from overlap_core.testing import GraphBuilder
from overlap_core.testing.strategies import RankSet, rank_sets
from overlap_core.view import BlockKind, Lane, OrderTimeline, RankTimeline, build_timelines

from .reports import layered_graph, layered_reports

EXAMPLE = Path(__file__).parents[1] / "report" / "report-v1.json"


def timeline_of(report: Report) -> RankTimeline:
    (timeline,) = build_timelines([("report", report)])
    return timeline


def exposed_of(order: OrderTimeline) -> dict[int, int]:
    """Exposed time of each gather on the compute lane."""
    sums: dict[int, int] = {}
    for block in order.lanes[1].blocks:
        if block.kind is BlockKind.EXPOSED:
            sums[block.position] = sums.get(block.position, 0) + block.end_ns - block.start_ns
    return sums


def assert_agrees(report: Report) -> None:
    """What is drawn adds up to what the report says of each gather."""
    timeline = timeline_of(report)
    before, after = exposed_of(timeline.before), exposed_of(timeline.after)
    for position, gather in timeline.gathers.items():
        assert before.get(position, 0) == gather.exposed_ns_before
        assert after.get(position, 0) == gather.exposed_ns_after
    assert timeline.before.exposed_ns == report.exposed_ns_before
    assert timeline.after.exposed_ns == report.exposed_ns_after
    assert timeline.before.total_ns == report.total_ns_before
    assert timeline.after.total_ns == report.total_ns_after


@given(rank_sets())
def test_bytes_in_flight_come_and_go_on_the_axis_of_time(ranks: RankSet) -> None:
    for outcome in oc.simulate(ranks.graphs):
        if not outcome.costs:
            continue
        report = Report.of(outcome)
        timeline = timeline_of(report)
        most = report.most_bytes_before, report.most_bytes_after
        for (_, order), peak in zip(timeline.orders, most, strict=True):
            moments = [ns for ns, _ in order.in_flight]
            assert moments == sorted(set(moments))
            assert not moments or 0 <= moments[0] <= moments[-1] <= order.total_ns
            assert order.most_bytes <= peak


def test_a_gather_is_in_flight_until_the_stream_has_waited_for_it() -> None:
    g = GraphBuilder(rank=0, ranks=2)
    first, second = g.gather("g", ns=100, nbytes=8), g.gather("h", ns=100, nbytes=16)
    y = g.mm("x", ns=30)
    y = g.mm(y, first, ns=500)
    g.mm(y, second, ns=10)
    (outcome,) = oc.simulate([g.build()])
    report = Report.of(outcome)
    timeline = timeline_of(report)
    assert report.order == ("g", "h", "mm0", "wait_g", "mm1", "wait_h", "mm2")
    assert timeline.after.in_flight == ((0, 24), (100, 16), (600, 0))
    machine = Machine(kernel_host_ns=10, collective_host_ns=20, wait_host_ns=5)
    slow = timeline_of(evolve(report, machine=machine)).after
    assert slow.in_flight == ((20, 8), (40, 24), (120, 16), (620, 0))


@given(rank_sets())
def test_the_lanes_of_any_ranks_agree_with_their_reports(ranks: RankSet) -> None:
    for outcome in oc.simulate(ranks.graphs):
        if outcome.costs:
            assert_agrees(Report.of(outcome))


def test_a_report_from_a_file_is_drawn_like_the_one_that_was_saved(tmp_path: Path) -> None:
    (report, _) = layered_reports(2, (0, 1))
    report.save(tmp_path / "report.json")
    loaded = timeline_of(load_report(tmp_path / "report.json"))
    assert loaded.orders == timeline_of(report).orders


def test_lanes_of_a_layer() -> None:
    (report,) = layered_reports(1)
    timeline = timeline_of(report)
    labels = [(str(lane.kind), lane.label) for lane in timeline.before.lanes]
    assert labels == [
        ("host", "host"),
        ("compute", "compute"),
        ("group", "group fsdp, 2 ranks"),
        ("group", "group cp, 2 ranks"),
    ]
    assert labels == [(str(lane.kind), lane.label) for lane in timeline.after.lanes]
    names = [timeline.graph.nodes[b.position].name for b in timeline.after.lanes[2].blocks]
    assert names == ["gather_0_qkv", "gather_0_out", "gather_0_up", "gather_0_down"]
    kinds = [str(b.kind) for b in timeline.before.lanes[2].blocks]
    assert kinds == ["exposed"] * 4
    assert [str(b.kind) for b in timeline.after.lanes[2].blocks] == ["exposed", *["gather"] * 3]
    assert {str(b.kind) for b in timeline.after.lanes[0].blocks} == {"launch", "wait"}


def test_a_gather_that_is_hidden_in_part_is_cut_where_compute_starts_to_wait() -> None:
    g = GraphBuilder(rank=0, ranks=2)
    weight = g.gather("g", ns=100)
    y = g.mm("x", ns=30)
    g.mm(y, weight, ns=10)
    (outcome,) = oc.simulate([g.build()])
    after = timeline_of(Report.of(outcome)).after
    assert [(str(b.kind), b.start_ns, b.end_ns) for b in after.lanes[2].blocks] == [
        ("gather", 0, 30),
        ("exposed", 30, 100),
    ]
    assert [(str(b.kind), b.start_ns, b.end_ns) for b in after.lanes[1].blocks] == [
        ("compute", 0, 30),
        ("exposed", 30, 100),
        ("compute", 100, 110),
    ]


def two_gathers() -> Report:
    """Of a machine whose host takes time, with both gathers in one call in the final order."""
    g = GraphBuilder(rank=0, ranks=2)
    weights = [g.gather(name, ns=100) for name in "gh"]
    y = g.mm("x", ns=30)
    for weight in weights:
        y = g.mm(y, weight, ns=10)
    (outcome,) = oc.simulate([g.build()])
    return evolve(
        Report.of(outcome),
        machine=Machine(kernel_host_ns=10, collective_host_ns=20, member_host_ns=2, wait_host_ns=5),
        coalesced=(Coalesced(launches=(0, 1), ns=140),),
    )


def drawn(timeline: RankTimeline, lane: Lane) -> list[tuple[str, str, int, int]]:
    nodes = timeline.graph.nodes
    return [(str(b.kind), nodes[b.position].name, b.start_ns, b.end_ns) for b in lane.blocks]


def test_the_host_is_drawn_at_work_where_it_takes_time() -> None:
    timeline = timeline_of(two_gathers())
    host, compute, group = timeline.before.lanes
    assert drawn(timeline, host) == [
        ("launch", "g", 0, 20),
        ("launch", "h", 20, 40),
        ("issue", "mm0", 40, 50),
        ("wait", "wait_g", 50, 55),
        ("issue", "mm1", 55, 65),
        ("wait", "wait_h", 65, 70),
        ("issue", "mm2", 70, 80),
    ]
    assert drawn(timeline, compute)[:2] == [("compute", "mm0", 50, 80), ("exposed", "g", 80, 120)]
    assert drawn(timeline, group)[:2] == [("gather", "g", 20, 80), ("exposed", "g", 80, 120)]


def test_a_coalesced_call_is_one_block_in_the_final_order_only() -> None:
    timeline = timeline_of(two_gathers())
    host, compute, group = timeline.after.lanes
    assert drawn(timeline, host)[:2] == [("launch", "g", 0, 22), ("launch", "h", 22, 22)]
    assert drawn(timeline, compute)[:2] == [("compute", "mm0", 32, 62), ("exposed", "g", 62, 162)]
    assert drawn(timeline, group) == [("gather", "g", 22, 62), ("exposed", "g", 62, 162)]
    assert timeline.after.issuers == {0: 0, 1: 0}
    assert timeline.before.issuers == {0: 0, 1: 1}


def test_a_call_is_cut_where_compute_starts_to_wait_for_any_of_its_launches() -> None:
    report = two_gathers()
    assert report.order == ("g", "h", "mm0", "wait_g", "mm1", "wait_h", "mm2")
    order = ("h", "g", "mm0", "wait_g", "mm1", "wait_h", "mm2")
    timeline = timeline_of(evolve(report, order=order))
    _, compute, group = timeline.after.lanes
    assert drawn(timeline, compute)[1] == ("exposed", "g", 62, 162)
    assert drawn(timeline, group) == [("gather", "h", 22, 62), ("exposed", "h", 62, 162)]


def test_reports_of_one_rank_are_told_apart_by_name() -> None:
    (report,) = layered_reports(1)
    forward, backward = build_timelines([("forward", report), ("backward", report)])
    assert (forward.label, backward.label) == ("rank 0, forward", "rank 0, backward")


@pytest.mark.parametrize("missing", ["graph", "costs"])
def test_a_report_without_times_is_refused(missing: str) -> None:
    (report,) = layered_reports(1)
    without = evolve(report, graph=None) if missing == "graph" else evolve(report, costs=())
    with pytest.raises(ReportFileError, match=f"the report of rank 0 has no {missing}, so"):
        build_timelines([("report", without)])


def test_the_example_report_has_nodes_of_unknown_cost() -> None:
    """They take no time, and are there."""
    data = json.loads(EXAMPLE.read_text())
    assert any(entry["cost"]["ns"] is None for entry in data["costs"])
    timeline = timeline_of(load_report(EXAMPLE))
    drawn = {b.position for lane in timeline.after.lanes for b in lane.blocks}
    assert drawn >= set(range(len(timeline.graph.nodes)))


def test_the_graph_of_the_large_report_is_large() -> None:
    assert len(layered_graph(0, 200).nodes) >= 5000
