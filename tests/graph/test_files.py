"""The graph file: what it holds comes back, and what breaks the format is refused with place."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from overlap_core import OverlapGraph, fingerprint
from overlap_core.errors import GraphFileError
from overlap_core.graph import graph_from_json, graph_to_json
from overlap_core.testing.strategies import graphs

from ..small_graphs import gather, graph_of, mm, wait

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLE: dict[str, Any] = {
    "version": 1,
    "rank": 0,
    "world_size": 2,
    "symbols": {"s27": 1024, "s82": 900},
    "inputs": ["arg0_1", "arg1_1"],
    "outputs": ["buf9"],
    "nodes": [
        {
            "name": "op0",
            "kind": "collective",
            "op": "_c10d_functional.all_gather_into_tensor.default",
            "reads": ["arg0_1"],
            "writes": ["buf0"],
            "sizes": [["1024", "256"]],
            "dtypes": ["bfloat16"],
            "group": "0",
            "group_ranks": [0, 1],
            "nbytes": 524288,
            "cost_ns": 90000,
            "origins": [],
        },
        {
            "name": "op1",
            "kind": "wait",
            "op": "_c10d_functional.wait_tensor.default",
            "reads": ["buf0"],
            "writes": ["buf1"],
        },
        {
            "name": "op2",
            "kind": "compute",
            "op": "aten.mm.out",
            "reads": ["buf1", "arg1_1"],
            "writes": ["buf8"],
            "sizes": [["s27 + s82", "256"]],
            "dtypes": ["bfloat16"],
            "cost_ns": 40000,
        },
        {
            "name": "op3",
            "kind": "opaque",
            "op": "mylib::attn_cp",
            "reads": ["buf8"],
            "writes": ["buf9"],
            "issues_collective": True,
            "group": "1",
            "group_ranks": [0, 1],
            "cost_ns": 300000,
        },
    ],
}
"""The example of the design."""


def example(**changes: Any) -> dict[str, Any]:
    """A copy of the example with other values at dotted places; ... takes a key away."""
    data = json.loads(json.dumps(EXAMPLE))
    for place, value in changes.items():
        *path, last = place.split("__")
        target = data
        for step in path:
            target = target[int(step) if isinstance(target, list) else step]
        if value is ...:
            del target[last]
        else:
            target[int(last) if isinstance(target, list) else last] = value
    return data


def test_the_example_reads_as_it_says() -> None:
    graph = graph_from_json(EXAMPLE)
    assert (graph.rank, graph.world_size, graph.symbols) == (0, 2, {"s27": 1024, "s82": 900})
    launch, _, matmul, attention = graph.nodes
    assert (launch.sizes, launch.group_ranks, launch.nbytes) == (((1024, 256),), (0, 1), 524288)
    assert (matmul.sizes, matmul.cost_ns, matmul.nbytes) == ((("s27 + s82", 256),), 40000, None)
    assert attention.issues_collective
    assert graph_from_json(graph_to_json(graph)) == graph


def test_a_graph_is_saved_and_loaded(tmp_path: Path) -> None:
    graph = graph_of(gather("g"), wait("g"), mm("a", "w.g"), symbols={"s0": 3, "u0": None})
    graph.save(tmp_path / "graph.json")
    assert OverlapGraph.load(tmp_path / "graph.json") == graph


@given(graphs())
def test_every_graph_comes_back(graph: OverlapGraph) -> None:
    """Equal but for sizes such as "17 // 4", which come back as the integers that they are."""
    text = json.dumps(graph_to_json(graph))
    loaded = graph_from_json(json.loads(text))
    assert fingerprint(loaded) == fingerprint(graph)
    assert [evolve(n, sizes=()) for n in loaded.nodes] == [evolve(n, sizes=()) for n in graph.nodes]
    assert graph_from_json(graph_to_json(loaded)) == loaded


@pytest.mark.parametrize("nbytes", [None, 0, 10**12])
def test_bytes_of_inputs_come_back_and_are_left_out_where_unknown(
    tmp_path: Path, nbytes: int | None
) -> None:
    graph = OverlapGraph(nodes=(), input_bytes=nbytes)
    graph.save(tmp_path / "graph.json")
    assert ("input_bytes" in json.loads((tmp_path / "graph.json").read_text())) == (
        nbytes is not None
    )
    assert OverlapGraph.load(tmp_path / "graph.json") == graph


def test_rows_of_an_exchange_come_back(tmp_path: Path) -> None:
    data = example(nodes__0__op="_c10d_functional.all_to_all_single.default")
    assert "sent" not in graph_to_json(graph_from_json(data))["nodes"][0]
    data["nodes"][0] |= {"sent": [1, "s27 + 1"], "received": ["2", 0]}
    graph = graph_from_json(data)
    assert (graph.nodes[0].sent, graph.nodes[0].received) == ((1, "s27 + 1"), (2, 0))
    assert graph_from_json(graph_to_json(graph)) == graph


def test_optional_keys_may_be_left_out_or_null() -> None:
    full = graph_from_json(EXAMPLE)
    assert graph_from_json(example(nodes__2__cost_ns=None)).nodes[2].cost_ns is None
    assert graph_from_json(example(nodes__2__cost_ns=...)).nodes[2].cost_ns is None
    assert graph_from_json(example(nodes__0__origins=...)) == full
    assert graph_from_json(example(rank=..., symbols=...)).rank == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # What the format says of whole graphs.
        ({"version": 2}, "version is 2; this overlap_core reads version 1"),
        ({"version": "1"}, "version is '1'; this overlap_core reads version 1"),
        ({"version": True}, "version is True; this overlap_core reads version 1"),
        ({"version": ...}, "the key 'version' is missing"),
        ({"nodes": ...}, "the key 'nodes' is missing"),
        ({"nodes": 3}, "nodes: expected a list, got 3"),
        ({"rank": "0"}, "rank: expected int, got '0'"),
        ({"rank": 7}, "rank 7 does not lie in a world of 2 ranks"),
        ({"comment": "hello"}, "unknown key 'comment'"),
        ({"symbols": ["s0"]}, "symbols: expected an object of hints, got ['s0']"),
        ({"symbols__s27": "big"}, "symbols.s27: a hint is an integer or null, got 'big'"),
        ({"outputs": ["nope"]}, "outputs: 'nope' is written by nothing"),
        # One node.
        ({"nodes__1": 5}, "nodes[1]: expected an object, got 5"),
        ({"nodes__2__kind": "matmul"}, "nodes[2].kind: unknown kind 'matmul'; expected one of"),
        ({"nodes__2__op": ...}, "nodes[2]: the key 'op' is missing"),
        ({"nodes__2__flops": 3}, "nodes[2]: unknown key 'flops'"),
        ({"nodes__2__reads": "buf1"}, "nodes[2].reads: expected a list, got 'buf1'"),
        ({"nodes__2__reads": ["buf1", 4]}, "nodes[2].reads[1]: expected str, got 4"),
        ({"nodes__2__cost_ns": 1.5}, "nodes[2].cost_ns"),
        ({"nodes__2__cost_ns": True}, "nodes[2].cost_ns"),
        ({"input_bytes": -5}, "input_bytes is negative (-5)"),
        ({"input_bytes": "5"}, "input_bytes: expected int, got '5'"),
        ({"nodes__2__cost_ns": -40}, "nodes[2] ('op2', aten.mm.out): cost_ns is negative (-40)"),
        ({"nodes__2__sizes": [[-4]]}, "nodes[2].sizes[0][0]: a size is negative: -4"),
        ({"nodes__2__sizes": [["2 - 4"]]}, "nodes[2].sizes[0][0]: a size is negative: '2 - 4'"),
        ({"nodes__2__sizes": [["s27 +"]]}, "nodes[2].sizes[0][0]: not a size expression"),
        ({"nodes__2__sizes": [[None]]}, "nodes[2].sizes[0][0]: a size is an integer or"),
        ({"nodes__3__issues_collective": "yes"}, "nodes[3].issues_collective: expected bool"),
        ({"nodes__3__sent": ["s27 +"]}, "nodes[3].sent[0]: not a size expression"),
        ({"nodes__3__sent": [1, -1]}, "nodes[3].sent[1]: a size is negative: -1"),
        ({"nodes__3__received": [1]}, "received has 1 numbers of rows for 2 ranks"),
        # What only the nodes together can break.
        ({"nodes__2__reads": ["buf7"]}, "nodes[2] ('op2', aten.mm.out): reads 'buf7', which"),
        ({"nodes__0__reads": ["buf8"]}, "lies on a cycle: op0 -> op1 -> op2 -> op0"),
        ({"nodes__3__after": ["op9"]}, "is to come after 'op9', which is not a node"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_place_and_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphFileError, match=re.escape(message)) as caught:
        graph_from_json(example(**changes), "rank0.json")
    assert str(caught.value).startswith("rank0.json: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"\xff", "not a graph file: the file is no text"),
        (b" ", "not a graph file: the file is empty"),
        (b'{"version": 3, "gathers": []}', "a report, not a graph file: `overlap-core explain`"),
        (b'{"version": ' + b"1" * 30 + b"}", "not JSON, or cut off: a number of more than 64 bits"),
        (b'{"version": 1e999}', "not JSON, or cut off: a number that is too large"),
        (b'{"version": ' + b"1" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON, or cut off: nested too deeply"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(content)
    with pytest.raises(GraphFileError, match=re.escape(f"{path}: {message}")):
        OverlapGraph.load(path)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    graph = graph_from_json(example())
    with pytest.raises(GraphFileError, match=r"nowhere/graph\.json: cannot be written: No such"):
        graph.save(tmp_path / "nowhere" / "graph.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match=r"nowhere\.json: cannot be read"):
        OverlapGraph.load(tmp_path / "nowhere.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


def _places(data: Any) -> list[tuple[Any, Any]]:
    found = []
    for key in data if isinstance(data, dict) else range(len(data)):
        found.append((data, key))
        if isinstance(data[key], (dict, list)):
            found += _places(data[key])
    return found


@given(st.data(), JSON)
def test_anything_anywhere_is_read_or_refused(data: st.DataObject, value: Any) -> None:
    """A value of any kind at any place: no other error than the one that says where."""
    document = example()
    target, key = data.draw(st.sampled_from(_places(document)))
    target[key] = value
    try:
        graph = graph_from_json(document)
    except GraphFileError as error:
        assert str(error).startswith("graph: ")  # noqa: PT017  many values are fine
    else:
        assert graph_from_json(graph_to_json(graph)) == graph
