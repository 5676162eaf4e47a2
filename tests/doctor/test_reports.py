"""What report files make `doctor` say. The report is tests/report/report-v1.json, changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from overlap_core.doctor.findings import Finding, problems
from overlap_core.doctor.reports import check_report
from overlap_core.inductor.hidden import describe_hidden
from overlap_core.report import Report, report_from_json

from .samples import kinds

DATA = json.loads((Path(__file__).parents[1] / "report" / "report-v1.json").read_text())


def report(**changes: Any) -> Report:
    """A report with a plain outcome and no notes, but for the changes."""
    plain = {"mode": "identical", "why": "one graph on all 3 ranks", "notes": []}
    return report_from_json({**DATA, **plain, **changes})


def find(kind: str, **changes: Any) -> Finding:
    [finding] = [one for one in check_report("r.json", report(**changes)) if one.kind == kind]
    assert finding.what.startswith("r.json: ")
    return finding


def off(why: str) -> Finding:
    return find("report-off", mode="abort", committed=False, why=why)


def test_a_report_of_a_graph_that_overlaps() -> None:
    assert find("report").what == "r.json: mode identical, 1 of 3 gathers hidden"
    assert not problems(check_report("r.json", report()))


@pytest.mark.parametrize(
    ("why", "do"),
    [
        ("Inductor runs no reorder pass while deterministic algorithms are on", "switch them off"),
        ("no process group is initialized", "init_process_group before the first compile"),
        ("switched off by OverlapConfig(enabled=False)", "leave `enabled` at True"),
        ("different plugins: rank 0: a 1", "install the same plugins and versions"),
        ("different configuration: rank 0: 12", "the same OverlapConfig"),
        ("different numbers of weight gathers: rank 0: 3", "the same parameters on all ranks"),
        ("rank 1: cannot (GraphFormatError: node 'a' is a GroupedSchedulerNode)", "take the named"),
        ("rank 0 communicates with rank 1, but rank 1 does not communicate with rank 0", "use it"),
        ("rank 1 will not come: rank 1 waits for others at 'f'", "in the same order on all ranks"),
        ("rank 1 did not reach step 'vote' within 300 s", "raise deadline_s"),
        ("rank 1 gave up on step 'vote'", "look why the named rank was late or died"),
        ("rank 1 gave up on step 'vote' (the pass failed: KeyError: 'x')", "report this"),
        ("rank 1 goes on without overlap: switched off by OVERLAP_CORE=0 in", "unset it on the"),
        ("rank 1 goes on without overlap: plugin 'x' of y (z) can't be imported", "mend what the"),
        ("ranks 1, 2 go on without overlap: rank 1: torch 3 is not supported", "mend what the"),
        ("rank 1 runs overlap_core 1.2, rank 2 overlap_core 1.3", "one version of overlap-core"),
        ("rank 1 runs torch 2.11.0, rank 2 torch 2.13.0", "one version of torch"),
        ("a rank was lost in the middle of step 'vote'", "look why the named rank was late"),
        ("the pass failed: KeyError: 'x'", "report this, with the report file"),
        ("rank 1: cannot (PluginError: plugin 'x')", "fix the named plugin, or leave it out"),
        ("something else", "overlap-core explain r.json"),
    ],
)
def test_a_report_of_a_graph_in_program_order_is_a_problem(why: str, do: str) -> None:
    finding = off(why)
    assert finding.what == f"r.json: the graph is in program order: {why}"
    assert do in finding.do


def test_a_report_without_a_graph_says_what_kept_overlap_off() -> None:
    empty = {"graph": None, "order": [], "gathers": [], "costs": [], "skeleton": [], "votes": []}
    found = find(
        "report-off", mode="abort", committed=False, collectives=[], why="the pass failed", **empty
    )
    assert "the pass failed" in found.what


def test_a_graph_without_weight_gathers_is_no_problem() -> None:
    votes = [{**vote, "weight_gathers": 0} for vote in DATA["votes"]]
    skeleton = [{**entry, "weight_gather": False} for entry in DATA["skeleton"]]
    nothing = {"gathers": [], "skeleton": skeleton, "committed": False, "mode": "abort"}
    assert "no weight gathers" in find("report-nothing", votes=votes, **nothing).what
    for others in (DATA["votes"], [{**votes[0], "can": False}]):
        assert find("report-off", votes=others, **nothing)
    assert find("report-off", votes=[], why="different numbers of weight gathers", **nothing)


def test_a_pinned_graph_is_a_warning() -> None:
    finding = find("report-pinned", mode="pinned", why="skeletons differ")
    assert finding.what == "r.json: no gather may pass other communication: skeletons differ"


def test_an_order_that_is_not_legal_is_a_problem() -> None:
    assert "not legal" in find("report-illegal", legal=False).what


def test_an_op_that_hides_communication_is_repeated_with_what_to_do() -> None:
    note = describe_hidden("mylib::attn")
    finding = find("report-op-undeclared", notes=[note])
    assert finding.what == (
        "r.json: mylib::attn communicates inside and is not registered; it is treated as a "
        "collective from now on"
    )
    assert finding.do == (
        "register it on all ranks: register_materialize_inputs('mylib::attn', "
        "has_internal_collective=True)"
    )


def test_other_notes_are_repeated() -> None:
    assert find("report-note", notes=["measuring took 2 s"]).what == "r.json: measuring took 2 s"


def test_costs_that_could_not_be_measured_are_counted_by_reason() -> None:
    unknown, estimated = find("report-costs-unknown"), find("report-costs-estimated")
    assert "1 of 6 kinds of node is unknown" in unknown.what
    assert "no source knows this op (1)" in unknown.what
    assert "1 of 6 kinds of node could not be measured" in estimated.what
    assert estimated.what.endswith("the hook of [red]attn_cp raised ValueError (1)")
    assert "--costs" in unknown.do


def test_the_most_frequent_reasons_are_named() -> None:
    found = report()
    costs = [evolve(cost, why=f"reason {i}") for i, cost in enumerate(found.costs)]
    many = evolve(found, costs=tuple(evolve(c, source=found.costs[7].source) for c in costs))
    [finding] = [f for f in check_report("r", many) if f.kind == "report-costs-estimated"]
    assert "reason 0 (1); reason 1 (1); reason 2 (1); reason 3 (1); and 6 more reasons" in (
        finding.what
    )


def test_estimates_by_choice_need_no_words() -> None:
    plain = report()
    chosen = evolve(plain, costs=tuple(evolve(cost, why="") for cost in plain.costs))
    assert "report-costs-estimated" not in kinds(check_report("r.json", chosen))
    assert kinds(check_report("r.json", evolve(plain, costs=()))) == ["report"]
