"""The report file: exact round trips, a pinned format, and one clear line for what is no report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

import overlap_core as oc
from overlap_core.config import OverlapConfig
from overlap_core.costs import FREE, Cost, CostRequest, CostSource, Machine, cost_request
from overlap_core.errors import PluginError, ReportFileError
from overlap_core.graph import Node, NodeKind, OverlapGraph, graph_from_json, graph_to_json
from overlap_core.host import PluginHost
from overlap_core.outcome import GatherOutcome, RankOutcome
from overlap_core.placement import Coalesced
from overlap_core.ranks import Mode, Vote
from overlap_core.report import (
    Report,
    Section,
    cost_entries,
    load_report,
    report_from_json,
    report_to_json,
    save_report,
    votes_in_words,
)
from overlap_core.skeleton import SkeletonEntry
from overlap_core.testing.strategies import rank_sets

if TYPE_CHECKING:
    from overlap_core.testing.strategies import RankSet

GOLDEN = Path(__file__).with_name("report-v1.json")
GOLDEN_2 = Path(__file__).with_name("report-v2.json")
GOLDEN_3 = Path(__file__).with_name("report-v3.json")
"""`coalesced_report()` as this version writes it; a change of it is a change of the format."""

GATHER = "_c10d_functional.all_gather_into_tensor.default"
MIB = 1024 * 1024


def _nodes() -> tuple[Node, ...]:
    def gather(number: int, rows: int) -> Node:
        return Node(
            name=f"gather{number}",
            kind=NodeKind.COLLECTIVE,
            op=GATHER,
            reads=(f"shard{number}",),
            writes=(f"launched{number}",),
            sizes=((rows, 3072),),
            dtypes=("bfloat16",),
            group="0",
            group_ranks=(0, 1),
            nbytes=rows * 3072 * 2,
        )

    def wait(number: int) -> Node:
        return Node(
            name=f"wait{number}",
            kind=NodeKind.WAIT,
            op="_c10d_functional.wait_tensor.default",
            reads=(f"launched{number}",),
            writes=(f"weight{number}",),
        )

    def mm(number: int, left: str) -> Node:
        return Node(
            name=f"mm{number}",
            kind=NodeKind.COMPUTE,
            op="extern_kernels.mm",
            reads=(left, f"weight{number}"),
            writes=(f"y{number}",),
            sizes=(("s0 + 64", 3072),),
            dtypes=("bfloat16",),
        )

    norm = Node(
        name="norm",
        kind=NodeKind.COMPUTE,
        op="fused",
        reads=("y1",),
        writes=("z",),
        sizes=(("s0 + 64", 3072),),
        dtypes=("bfloat16",),
        origins=("aten.mul.Tensor", "aten.rsqrt.default"),
    )
    attention = Node(
        name="attention",
        kind=NodeKind.OPAQUE,
        op="mylib::attn_cp",
        reads=("z",),
        writes=("a",),
        sizes=(("s0 + 64", 3072),),
        dtypes=("bfloat16",),
        group="1",
        group_ranks=(0, 1),
        issues_collective=True,
    )
    return (
        *(gather(0, 3072), wait(0), mm(0, "x"), gather(1, 3072), wait(1), mm(1, "y0")),
        *(norm, attention, gather(2, 12288), wait(2), mm(2, "a")),
    )


def example_report() -> Report:
    """A report with something of everything that one can hold, and numbers that are easy to see."""
    nodes = _nodes()
    names = [node.name for node in nodes]
    wide = (("~", 4096), 3072)
    gathers = {
        rows: CostRequest(
            kind="collective",
            op=GATHER,
            outputs=((rows, 3072),),
            output_dtypes=("bfloat16",),
            device="cuda:NVIDIA H200",
            group_size=2,
            nbytes=rows * 3072 * 2,
            node="gather",
        )
        for rows in (3072, 12288)
    }
    product = CostRequest(
        kind="compute",
        op="extern_kernels.mm",
        inputs=(wide, (3072, 3072)),
        input_dtypes=("bfloat16", "bfloat16"),
        outputs=(wide,),
        output_dtypes=("bfloat16",),
        device="cuda:NVIDIA H200",
        flops=77_309_411_328,
        node="mm0",
    )
    norm = evolve(product, op="fused", inputs=(wide,), input_dtypes=("float32",), node="norm")
    attention = evolve(product, kind="opaque", op="mylib::attn_cp", inputs=(wide,), group_size=2)
    measured = Cost(ns=240_500, source=CostSource.MEASURED)
    estimate = Cost(
        ns=98_000, source=CostSource.ANALYTICAL, why="the hook of [red]attn_cp raised ValueError"
    )
    small = (evolve(measured, ns=90_000), gathers[3072])
    work: dict[str, tuple[Cost, CostRequest | None]] = {
        "gather0": small,
        "gather1": small,
        "gather2": (evolve(estimate, ns=1_250_000, why=""), gathers[12288]),
        **dict.fromkeys(("wait0", "wait1", "wait2"), (FREE, None)),
        **dict.fromkeys(("mm0", "mm1", "mm2"), (measured, product)),
        "norm": (Cost(why="no source knows this op"), norm),
        "attention": (evolve(estimate, network_ns=1000), attention),
    }
    order = ("gather0", "wait0", "gather1", "mm0", "wait1", "mm1", *names[6:])
    why = "skeletons differ: rank 0: 4 entries, digest 12345678; rank 1: 5 entries, digest 9abcdef0"
    vote = Vote(
        rank=0,
        can=True,
        config="c0ffee",
        plugins="d1ce",
        plugin_names=("analytical_costs 0.1.0",),
        fingerprint="0123456789abcdef",
        skeleton="1234567890",
        entries=4,
        weight_gathers=3,
    )

    def outcome(name: str, verdict: str, why: str, before: int, after: int) -> GatherOutcome:
        return GatherOutcome(
            name=name,
            source=names.index(name),
            target=order.index(name),
            slot=int(name == "gather2"),
            verdict=verdict,
            why=why,
            exposed_ns_before=before,
            exposed_ns_after=after,
        )

    communication = ("gather0", "gather1", "attention", "gather2")
    head = "90 of 90 µs stay exposed: nothing to hide behind at the head of the graph"
    stopped = f"1250 of 1250 µs stay exposed: it may not pass any communication ({why})"
    return Report(
        rank=0,
        scope=(0, 1, 2),
        mode=Mode.PINNED,
        why=why,
        order=order,
        collectives=communication,
        gathers=(
            outcome("gather0", "compute-limited", head, 90_000, 90_000),
            outcome("gather1", "hidden", "launched early enough", 90_000, 0),
            outcome("gather2", "pinned", stopped, 1_250_000, 1_250_000),
        ),
        legal=True,
        committed=True,
        votes=(
            vote,
            evolve(vote, rank=1, fingerprint="fedcba98", skeleton="9abcdef0", entries=5),
            evolve(vote, rank=2),
        ),
        skeleton=tuple(
            SkeletonEntry(
                ordinal=ordinal,
                op=GATHER if name != "attention" else "mylib::attn_cp",
                sizes=((3072, 3072),) if name != "attention" else (("~", 3072),),
                dtypes=("bfloat16",),
                groups=(int(name == "attention"),),
                group_sizes=(2,),
                weight_gather=name != "attention",
                comparable=("sum",) if name == "attention" else (),
                node=name,
            )
            for ordinal, name in enumerate(communication)
        ),
        fingerprint="0123456789abcdef",
        total_ns_before=2_500_000,
        total_ns_after=2_410_000,
        graph=OverlapGraph(
            world_size=3,
            nodes=nodes,
            inputs=("x", "shard0", "shard1", "shard2"),
            outputs=("y2",),
            symbols={"s0": 4032, "u0": None},
        ),
        costs=tuple(work[name][0] for name in names),
        requests=tuple(work[name][1] for name in names),
        notes=("plugin [bold]probe states no version",),
        sections=(Section(plugin="probe", content={"held back": 1, "rows": [1, None]}),),
    )


def coalesced_report() -> Report:
    """The same with what version 2 added: two gathers in one call, on a machine that was probed."""
    report = example_report()
    gathers = tuple(
        evolve(gather, call=None if number == 2 else 0)
        for number, gather in enumerate(report.gathers)
    )
    machine = Machine(kernel_host_ns=8_000, gather_slowdown=1.25, measured=True)
    call = Coalesced(launches=(0, 3), ns=150_000)
    return evolve(report, gathers=gathers, machine=machine, coalesced=(call,))


def test_version_1_is_still_read() -> None:
    assert load_report(GOLDEN) == example_report()


def test_version_2_is_still_read() -> None:
    assert load_report(GOLDEN_2) == coalesced_report()


def test_the_format_of_version_3_is_pinned(tmp_path: Path) -> None:
    report = coalesced_report()
    assert load_report(GOLDEN_3) == report
    report.save(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == GOLDEN_3.read_text()


@pytest.mark.parametrize("value", [None, 3, [[0, "1"]], [0, 1], "missing"])
def test_bytes_in_flight_that_make_no_sense_are_refused(value: Any) -> None:
    data = report_to_json(example_report())
    data["in_flight_after"] = value
    if value == "missing":
        del data["in_flight_after"]
    with pytest.raises(ReportFileError, match=r"in_flight_after.*(expected|is missing)"):
        report_from_json(data)


def test_a_call_of_no_such_nodes_is_refused(tmp_path: Path) -> None:
    data = report_to_json(coalesced_report())
    data["coalesced"][0]["launches"] = [0, 99]
    with pytest.raises(ValueError, match="coalesced: no such positions"):
        report_from_json(data)


@given(rank_sets(max_items=10, max_ranks=3))
def test_round_trips_are_exact(ranks: RankSet) -> None:
    # As a graph file is read: an expression without symbols is a number.
    graphs = [graph_from_json(graph_to_json(graph)) for graph in ranks.graphs]
    for outcome in oc.simulate(graphs):
        event(f"mode {outcome.mode}")
        report = Report.of(outcome)
        data = json.loads(json.dumps(report_to_json(outcome)))
        assert report_from_json(data) == report
        assert report_from_json(data).costs == outcome.costs
        assert data["in_flight_after"] == [list(step) for step in report.in_flight_after]
        entries = cost_entries(report)
        nodes = sorted(position for entry in entries for position in entry.nodes)
        assert nodes == list(range(len(outcome.costs)))


@pytest.mark.parametrize("with_costs", [True, False])
@pytest.mark.parametrize("free", [(), (1,), range(11)])
def test_known_keys_survive_with_and_without_costs(with_costs: bool, free: Any) -> None:
    report = example_report()
    assert report.graph is not None
    keys = tuple(
        None if position in free else cost_request(report.graph, position)
        for position in range(len(report.graph.nodes))
    )
    report = evolve(report, requests=keys, costs=report.costs if with_costs else ())
    assert report_from_json(report_to_json(report)) == report


def test_a_record_without_a_graph_survives() -> None:
    outcome = RankOutcome(
        rank=3, scope=(3,), mode=Mode.ABORT, why="no process group is initialized", order=(),
        collectives=(), gathers=(), legal=True, committed=False,
    )  # fmt: skip
    assert report_from_json(report_to_json(outcome)) == Report.of(outcome)
    report = Report.of(outcome)
    assert (report.in_flight_before, report.in_flight_after) == ((), ())
    assert (report.most_bytes_before, report.most_bytes_after) == (0, 0)


def test_the_graph_in_a_report_can_be_simulated_again(tmp_path: Path) -> None:
    graph = json.loads(GOLDEN.read_text())["graph"]
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    assert OverlapGraph.load(tmp_path / "graph.json") == example_report().graph


def test_bytes_in_flight_follow_the_order() -> None:
    report = example_report()
    weight, large = 18 * MIB, 72 * MIB
    ends = ((8, large), (9, 0))
    assert report.in_flight_before == ((0, weight), (1, 0), (3, weight), (4, 0), *ends)
    assert report.in_flight_after == ((0, weight), (1, 0), (2, weight), (4, 0), *ends)
    assert (report.most_bytes_before, report.most_bytes_after) == (large, large)


class Probe:
    """A plugin that adds a section."""

    overlap_plugin_name = "probe"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    @oc.hookimpl
    def overlap_report_section(self, report: Report) -> dict[str, object]:
        if self.fails:
            raise RuntimeError("boom")
        return {"mode": str(report.mode), "gathers": len(report.gathers)}


def test_plugins_add_their_sections_when_a_report_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    host = PluginHost.discover(OverlapConfig(), plugins=[Probe()])
    save_report(example_report(), path, host)
    section = Section(plugin="probe", content={"mode": "pinned", "gathers": 3})
    assert Report.load(path).sections == (section,)


def test_a_plugin_that_fails_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    host = PluginHost.discover(OverlapConfig(), plugins=[Probe(fails=True)])
    with pytest.raises(PluginError, match=r"probe.*overlap_report_section"):
        example_report().save(tmp_path / "report.json", host)
    assert list(tmp_path.iterdir()) == []


GRAPH_FILE = '{"version": 1, "nodes": []}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a report: the file is empty"),
        (" \n", "not a report: the file is empty"),
        ("mode: slot", "not JSON, or cut off: .*line 1"),
        ("[]", "not a report: expected a JSON object, got list"),
        ("{}", "not a report: the key 'version' is missing"),
        ('{"version": true}', "not a report: version is True"),
        ('{"version": 0}', "not a report: version is 0"),
        ('{"version": 7}', "version 7; this overlap_core reads up to version 3: update it"),
        ('{"version": 1}', "the key 'graph' is missing"),
        ('{"version": NaN}', "not JSON, or cut off: NaN is no JSON number"),
        (f'{{"rank": {2**63}}}', "a number of more than 64 bits: 922337203685"),
        ("[" * 100_000, "not JSON, or cut off"),
        ("\udcff", "not a report: the file is no text"),
        (GRAPH_FILE, "a graph file, not a report: `overlap-core simulate` reads it"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ReportFileError, match=f"^{path}: .*{message}"):
        load_report(path)


def test_a_missing_file_and_an_unwritable_one(tmp_path: Path) -> None:
    with pytest.raises(ReportFileError, match="cannot be read: No such file"):
        load_report(tmp_path / "none.json")
    with pytest.raises(ReportFileError, match="cannot be written: No such file"):
        example_report().save(tmp_path / "none" / "report.json")


SKELETON: dict[str, Any] = {
    **{key: [] for key in ("sizes", "dtypes", "groups", "group_sizes", "comparable")},
    "ordinal": 0,
    "op": "x",
    "weight_gather": True,
    "node": "nobody",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": "0"}, "rank: expected int, got '0'"),
        ({"rank": 2**63}, "rank: a number of more than 64 bits"),
        ({"legal": 1}, "legal: expected bool, got 1"),
        ({"mode": "free"}, "mode: expected one of identical, slot, pinned, abort, got 'free'"),
        ({"scope": 3}, "scope: expected a list, got 3"),
        ({"speed": 3}, "unknown key 'speed'"),
        ({"rank": None, "legal": None}, r"rank: expected int, got None \(and 1 more\)"),
        ({"gathers": [{}]}, r"gathers\[0\].name: this key is missing \(and 7 more\)"),
        ({"scope": [True]}, r"scope\[0\]: exp"),
        ({"skeleton": [SKELETON | {"sizes": [[None]]}]}, r"sizes\[0\]\[0\]: expected a size"),
        ({"skeleton": [SKELETON]}, r"skeleton\[0\]: the graph has no node 'nobody'"),
        ({"order": ["gather0"]}, "order: not the names of all nodes of the graph, each once"),
        ({"collectives": ["x"]}, r"collectives\[0\]: the graph has no node 'x'"),
        ({"graph": None}, "graph: missing, while there is an order of its nodes"),
        ({"graph": {"version": 2, "nodes": []}}, "graph: version is 2"),
        ({"keys_from_graph": "no"}, "keys_from_graph: expected bool, got 'no'"),
        ({"sections": [{"plugin": "p", "content": 1}]}, "content: expected an object, got 1"),
    ],
)
def test_a_broken_report_says_where(changes: dict[str, Any], message: str) -> None:
    data = {**json.loads(GOLDEN.read_text()), **changes}
    with pytest.raises(ReportFileError, match=f"^here: .*{message}"):
        report_from_json(data, "here")


def test_a_skeleton_that_lacks_what_communicates_is_refused() -> None:
    data = json.loads(GOLDEN.read_text())
    *_, left_out = data["skeleton"]
    del data["skeleton"][-1]
    with pytest.raises(ReportFileError, match=f"skeleton: has no entry of '{left_out['node']}'"):
        report_from_json(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [1]}, "costs: every node must be in one entry"),
        ({"nodes": [99]}, "costs: every node must be in one entry"),
        ({"cost": None}, "costs: some entries have a cost and some have none"),
        ({"cost": {"source": "guess"}}, r"costs\[0\].cost.source: expected one of measured"),
        ({"request": {"kind": "a", "op": "b", "inputs": [[True]]}}, r"inputs\[0\]\[0\]: expected"),
        ({"request": {"kind": "a", "op": "b", "inputs": [[["?", 1]]]}}, r"\[0\]\[0\]: expected"),
    ],
)
def test_a_broken_cost_table_says_where(change: dict[str, Any], message: str) -> None:
    data = json.loads(GOLDEN.read_text())
    data["costs"][0] |= change
    with pytest.raises(ReportFileError, match=message):
        report_from_json(data)


@given(st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever is cut out of a report or put into it: a `ReportFileError`, or all views work."""
    document = json.loads(data.draw(st.sampled_from([GOLDEN, GOLDEN_3])).read_text())
    where: Any = document
    while True:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(where[key], (dict, list)) or not where[key] or data.draw(st.booleans()):
            break
        where = where[key]
    junk: st.SearchStrategy[Any] = st.sampled_from(
        [None, True, -1, 10**400, 1.5, "", "\ud800", [], {}, [[]], "hidden"]
    )
    where[key] = data.draw(junk)
    try:
        report = report_from_json(document)
    except ReportFileError:
        return
    assert report.most_bytes_after >= 0
    cost_entries(report)
    votes_in_words(report.votes)
    report_from_json(report_to_json(report))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    text, path = GOLDEN.read_text(), tmp_path / "report.json"
    for length in range(0, len(text.rstrip()), 97):
        path.write_text(text[:length])
        with pytest.raises(ReportFileError):
            load_report(path)


def test_costs_of_other_nodes_are_refused() -> None:
    data = json.loads(GOLDEN.read_text())
    data["costs"] = [{**data["costs"][0], "nodes": [0, 1]}]
    with pytest.raises(ReportFileError, match="costs: of 2 nodes; the graph has 11"):
        report_from_json(data)
