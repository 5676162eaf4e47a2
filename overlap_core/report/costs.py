"""The costs of a graph as a table: one entry a structural key, each key in words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core.costs import FREE, Cost, CostRequest, CostSource, cost_request
from overlap_core.graph import NodeKind
from overlap_core.registry import canonical_op_name

from .words import bytes_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlap_core.costs import Dim
    from overlap_core.outcome import RankOutcome

__all__ = ["CostEntry", "cost_entries", "request_in_words"]

_NO_WORK = "waits, views and unpacks"
_COLLECTIVES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
}
_OWN_NAMESPACES = ("aten", "prims", "extern_kernels", "_c10d_functional")
"""Too familiar to be worth their width."""
_PRODUCT = re.compile(r"_?(?:add|badd|scaled_|int_|grouped_)?b?mm")
_BIASED = re.compile(r"b?add")
_MOST_SHAPES = 2
_MOST_ORIGINS = 4


@frozen(kw_only=True)
class CostEntry:
    """One entry of the cost table."""

    key: str
    """The structural key in words."""
    cost: Cost | None
    """None in a report without costs."""
    request: CostRequest | None
    """The key itself; None for nodes that do nothing on the device."""
    nodes: tuple[int, ...]
    """Positions in program order of the nodes that share the entry."""

    @property
    def ns(self) -> int | None:
        """Time of each node; None: unknown."""
        return None if self.cost is None else self.cost.ns

    @property
    def total_ns(self) -> int | None:
        """Time of all nodes that share the entry; None: unknown."""
        return None if self.ns is None else self.ns * len(self.nodes)

    @property
    def source(self) -> CostSource:
        """Where the time comes from."""
        return CostSource.UNKNOWN if self.cost is None else self.cost.source

    @property
    def why(self) -> str:
        """What kept a better source from answering."""
        return "" if self.cost is None else self.cost.why


def cost_entries(report: RankOutcome) -> tuple[CostEntry, ...]:
    """The cost table, in the order in which a graph's nodes first ask for an entry.

    Nodes share an entry if their keys and their costs are equal: costs that are given with a
    graph may differ where keys do not. Keys that the report lacks are made from its graph.
    """
    requests = _requests(report)
    costs: Sequence[Cost | None] = report.costs or (None,) * len(requests)
    groups: dict[tuple[CostRequest | None, Cost | None], list[int]] = {}
    for position, pair in enumerate(zip(requests, costs, strict=True)):
        groups.setdefault(pair, []).append(position)
    return tuple(
        CostEntry(
            key=_in_words(report, request, cost, nodes[0]),
            cost=cost,
            request=request,
            nodes=tuple(nodes),
        )
        for (request, cost), nodes in groups.items()
    )


def _requests(report: RankOutcome) -> tuple[CostRequest | None, ...]:
    if report.requests or not report.costs:
        return report.requests
    if report.graph is None:
        return (None,) * len(report.costs)
    return tuple(
        None if cost == FREE else cost_request(report.graph, position)
        for position, cost in enumerate(report.costs)
    )


def _in_words(
    report: RankOutcome, request: CostRequest | None, cost: Cost | None, position: int
) -> str:
    if request is None:
        return _NO_WORK if cost in (FREE, None) else "unknown op"
    origins = () if report.graph is None else report.graph.nodes[position].origins
    return request_in_words(request, origins)


def request_in_words(request: CostRequest, origins: Iterable[str] = ()) -> str:
    """A structural key such as `mm 4096x3072 by 3072x3072 bfloat16`; `~` marks a symbolic size.

    Args:
        request: the key.
        origins: targets of the operations in a fused kernel, which has no name of its own.
    """
    name = _short(request.op)
    if request.kind == NodeKind.COLLECTIVE:
        return _collective_in_words(request, name)
    if canonical_op_name(request.op) is None:
        name = _fused_in_words(name, origins)
    parts = [name]
    match = _PRODUCT.fullmatch(name)
    if match and len(request.inputs) > 1:
        first = 1 if _BIASED.match(name) and len(request.inputs) > 2 else 0
        left, right = request.inputs[first : first + 2]
        parts.append(f"{_shape(left)} by {_shape(right)} {_dtypes(request)}")
    else:
        parts.append(_shapes_in_words(request))
    if request.group_size is not None:
        parts.append(_over(request.group_size))
    return " ".join(filter(None, map(str.strip, parts)))


def _collective_in_words(request: CostRequest, name: str) -> str:
    plain = next((words for part, words in _COLLECTIVES.items() if part in name), name)
    if "coalesced" in name:
        plain = f"coalesced {plain}"
    size = _shapes_in_words(request)
    if request.nbytes is not None:
        size = f"of {bytes_in_words(request.nbytes)}"
    return " ".join(filter(None, (plain, size, _over(request.group_size))))


def _over(group_size: int | None) -> str:
    if group_size is None:
        return "over an unknown group"
    return f"over {group_size} rank{'s' if group_size != 1 else ''}"


def _short(op: str) -> str:
    """An op's name without overload, and without a namespace that says nothing."""
    namespace, _, name = (canonical_op_name(op) or op).rpartition("::")
    return name if not namespace or namespace in _OWN_NAMESPACES else f"{namespace}::{name}"


def _fused_in_words(name: str, origins: Iterable[str]) -> str:
    found = list(dict.fromkeys(map(_short, origins)))
    if not found:
        return name
    more = f" and {len(found) - _MOST_ORIGINS} more" if len(found) > _MOST_ORIGINS else ""
    return f"{'fused ' if len(found) > 1 else ''}{', '.join(found[:_MOST_ORIGINS])}{more}"


def _shapes_in_words(request: CostRequest) -> str:
    """Inputs and outputs, said once where they are equal."""
    words = _shapes(request.inputs)
    if request.outputs != request.inputs:
        words += f" to {_shapes(request.outputs)}" if request.outputs else ""
    return f"{words} {_dtypes(request)}".strip()


def _shapes(shapes: tuple[tuple[Dim, ...], ...]) -> str:
    shown = ", ".join(map(_shape, shapes[:_MOST_SHAPES]))
    return shown + (f" and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else "")


def _shape(shape: tuple[Dim, ...]) -> str:
    return "x".join(map(_dim, shape)) or "scalar"


def _dim(dim: Dim) -> str:
    if isinstance(dim, int):
        return str(dim)
    return "~" if dim[1] is None else f"~{dim[1]}"


def _dtypes(request: CostRequest) -> str:
    inputs, outputs = (
        "/".join(dict.fromkeys(dtypes)) for dtypes in (request.input_dtypes, request.output_dtypes)
    )
    if not inputs or not outputs or inputs == outputs:
        return inputs or outputs
    return f"{inputs} to {outputs}"
