"""One cost for each node of a graph, one question for each structural key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import evolve

from overlap_core.graph import NodeKind
from overlap_core.graph.symbols import parse_expression

from .dtypes import dtype_bytes
from .keys import request_digest
from .types import Cost, CostRequest, CostSource, Dim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlap_core.graph import Node, OverlapGraph, Size

__all__ = ["FREE", "apply_measurements", "cost_request", "resolve_costs"]

FREE = Cost(ns=0, network_ns=0, source=CostSource.ANALYTICAL)
"""The cost of a node that does nothing on the device: a wait, a view, an unpack."""
_UNPACK_OPS = frozenset({"multi_output", "MultiOutput", "unpack"})


def resolve_costs(
    graph: OverlapGraph,
    measure: Callable[[CostRequest], Cost | int | None],
    requests: Sequence[CostRequest | None] | None = None,
) -> tuple[Cost, ...]:
    """The cost of each node: its own `cost_ns` if it has one, else what `measure` answers.

    Args:
        graph: the nodes.
        measure: nanoseconds for a structural key, a whole `Cost`, or None; asked once for each
            distinct key.
        requests: one key a node from whoever knows more than the graph says, None for nodes
            that cost nothing; without it the keys are made from the graph.

    Raises:
        PluginError: from `measure`.
    """
    asked: dict[CostRequest, Cost] = {}
    result = []
    for position, node in enumerate(graph.nodes):
        request = None if requests is None else requests[position]
        free = node.kind is NodeKind.WAIT or node.op in _UNPACK_OPS
        if free or (requests is not None and request is None):
            result.append(FREE)
        elif node.cost_ns is not None:
            result.append(
                Cost(
                    ns=node.cost_ns,
                    network_ns=node.network_ns,
                    source=CostSource.MEASURED,
                    why="given with the graph",
                )
            )
        else:
            request = cost_request(graph, position) if request is None else request
            cost = asked.get(request)
            if cost is None:
                cost = asked[request] = _as_cost(measure(request))
            if node.network_ns is not None:
                cost = evolve(cost, network_ns=node.network_ns)
            result.append(cost)
    return tuple(result)


def _as_cost(answer: Cost | int | None) -> Cost:
    if isinstance(answer, Cost):
        return answer
    if answer is None:
        return Cost(why="no source knows this op")
    return Cost(ns=answer, source=CostSource.ANALYTICAL)


def apply_measurements(
    costs: Sequence[Cost],
    requests: Sequence[CostRequest | None],
    table: Mapping[str, Cost],
) -> tuple[Cost, ...]:
    """Costs with what was measured in place of estimates; an estimate that stays says why.

    Args:
        costs: one a node.
        requests: the nodes' structural keys, None for nodes that cost nothing.
        table: by key digest; an entry without a time only explains.
    """
    digests: dict[CostRequest, str] = {}
    result = []
    for cost, request in zip(costs, requests, strict=True):
        if request is None:
            result.append(cost)
            continue
        if request not in digests:
            digests[request] = request_digest(request)
        found = table.get(digests[request])
        if found is None:
            result.append(cost)
        elif found.ns is None:
            result.append(evolve(cost, why=found.why))
        else:
            result.append(found)
    return tuple(result)


def cost_request(graph: OverlapGraph, position: int) -> CostRequest:
    """The structural key of one node, as far as plain graph data tells it."""
    node = graph.nodes[position]
    outputs = _dims(graph, node)
    inputs: list[tuple[Dim, ...]] = []
    input_dtypes: list[str] = []
    for before in graph.data_predecessors[position]:
        producer = graph.nodes[before]
        inputs += _dims(graph, producer)
        input_dtypes += producer.dtypes
    collective = node.kind is NodeKind.COLLECTIVE
    return CostRequest(
        kind=str(node.kind),
        op=node.op,
        inputs=tuple(inputs),
        input_dtypes=tuple(input_dtypes),
        outputs=outputs,
        output_dtypes=node.dtypes,
        read_bytes=_total_bytes(tuple(inputs), tuple(input_dtypes)),
        write_bytes=_total_bytes(outputs, node.dtypes),
        group_size=None if node.group_ranks is None else len(node.group_ranks),
        nbytes=node.nbytes if collective else None,
        node=node.name,
    )


def _dims(graph: OverlapGraph, node: Node) -> tuple[tuple[Dim, ...], ...]:
    return tuple(tuple(_dim(graph, size) for size in sizes) for sizes in node.sizes)


def _dim(graph: OverlapGraph, size: Size) -> Dim:
    if isinstance(size, int):
        return size
    expression = parse_expression(size)
    if expression.constant is not None:
        return expression.constant
    return ("~", expression.evaluate(graph.known_hints))


def _total_bytes(shapes: tuple[tuple[Dim, ...], ...], dtypes: tuple[str, ...]) -> int | None:
    if not shapes or len(shapes) != len(dtypes):
        return None
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        width = dtype_bytes(dtype)
        sizes = [dim if isinstance(dim, int) else dim[1] for dim in shape]
        if width is None or any(size is None for size in sizes):
            return None
        bits = math.prod(size for size in sizes if size is not None) * round(width * 8)
        total += -(-bits // 8)
    return total
