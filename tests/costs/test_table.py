"""One cost a node, one question a structural key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from overlap_core import Node, NodeKind
from overlap_core.costs import FREE, Cost, CostSource, cost_request, dtype_bytes, resolve_costs

from ..small_graphs import gather, graph_of, mm, opaque, wait

if TYPE_CHECKING:
    from overlap_core.costs import CostRequest

SIZED = {"sizes": ((64, 8),), "dtypes": ("bfloat16",), "ns": None}


def test_one_question_for_all_isomorphic_nodes() -> None:
    asked: list[CostRequest] = []

    def measure(request: CostRequest) -> int | None:
        asked.append(request)
        return 70

    graph = graph_of(mm("a", **SIZED), mm("b", **SIZED), mm("c", "a", **SIZED))
    costs = resolve_costs(graph, measure)
    assert [cost.ns for cost in costs] == [70, 70, 70]
    assert {cost.source for cost in costs} == {CostSource.ANALYTICAL}
    assert [request.node for request in asked] == ["a", "c"]


def test_a_cost_in_the_graph_stands_and_nobody_is_asked() -> None:
    def measure(request: CostRequest) -> int | None:
        raise AssertionError(request)

    graph = graph_of(mm("a", ns=5), opaque("o", "a", ns=9, network_ns=4), mm("z", ns=0))
    known, inside, nothing = resolve_costs(graph, measure)
    assert (known.ns, known.source) == (5, CostSource.MEASURED)
    assert (inside.ns, inside.network_ns) == (9, 4)
    assert nothing.ns == 0  # measured as nothing, which is not unknown


def test_waits_and_unpacks_are_free() -> None:
    unpack = Node(name="m", kind=NodeKind.COMPUTE, op="multi_output", reads=("g",), writes=("m",))
    graph = graph_of(gather("g"), unpack, wait("m"), mm("a", "w.m"))
    assert resolve_costs(graph, lambda request: 1)[1:3] == (FREE, FREE)


def test_what_no_source_knows_is_unknown_and_says_so() -> None:
    (cost,) = resolve_costs(graph_of(mm("a", ns=None)), lambda request: None)
    assert cost == Cost(ns=None, source=CostSource.UNKNOWN, why="no source knows this op")


def test_keys_from_whoever_knows_more_are_used() -> None:
    graph = graph_of(mm("a", **SIZED), mm("b", **SIZED))
    better = evolve(cost_request(graph, 0), flops=12)
    costs = resolve_costs(graph, lambda request: request.flops, [better, None])
    assert [cost.ns for cost in costs] == [12, 0]


def test_a_symbolic_dimension_is_a_marked_hint() -> None:
    """The same hint under another name is the same key; a static size is another one."""

    def key(size: int | str, **symbols: int | None) -> CostRequest:
        node = mm("a", sizes=((size, 8),), dtypes=("float32",), ns=None)
        return cost_request(graph_of(node, symbols=symbols), 0)

    assert key("s0 * 2", s0=32).outputs == ((("~", 64), 8),)
    assert key("s0 * 2", s0=32) == key("s7 + 4", s7=60)
    assert key("s0", s0=64) != key(64)
    assert key("s0", s0=64).write_bytes == key(64).write_bytes == 64 * 8 * 4
    assert key("u0", u0=None).outputs == ((("~", None), 8),)
    assert key("u0").write_bytes is None
    assert key("64 + s0 - s0") == key(64)


def test_a_collective_is_keyed_by_group_size_and_bytes_too() -> None:
    graph = graph_of(gather("g", nbytes=77), wait("g"), mm("a", "w.g", ns=None))
    request = cost_request(graph, 0)
    assert (request.kind, request.group_size, request.nbytes) == ("collective", 2, 77)
    assert cost_request(graph, 2).inputs == ()


def test_the_inputs_of_a_node_are_the_outputs_of_its_producers() -> None:
    graph = graph_of(mm("a", **SIZED), mm("b", "a", "y", **SIZED))
    request = cost_request(graph, 1)
    assert (request.inputs, request.read_bytes) == (((64, 8),), 1024)


def test_widths_of_dtypes() -> None:
    found = [
        dtype_bytes(n) for n in ("bfloat16", "torch.float32", "float8_e4m3fn", "int64", "bool")
    ]
    assert found == [2, 4, 1, 8, 1]
    assert dtype_bytes("mystery") is None
