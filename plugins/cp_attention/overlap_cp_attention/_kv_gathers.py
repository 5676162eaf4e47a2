"""Gathers of keys and values that look like gathers of weights.

torch's context parallelism gathers keys and values with plain all-gathers. As a rule they are fed
by activations, and the core leaves them alone. Where a graph holds the attention only, keys and
values are graph inputs, as weights are; but what an attention op reads as it was gathered, no
matmul between, is no weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from overlap_core import NodeKind
from overlap_core.registry import canonical_op_name

if TYPE_CHECKING:
    from overlap_core import Node, OverlapGraph
    from overlap_core.placement.plan import GatherPlacement, Plan

__all__ = ["hold_back"]

_ATTENTION = (
    "aten::_scaled_dot_product",
    "aten::scaled_dot_product_attention",
    "aten::_flash_attention",
    "aten::_efficient_attention",
    "aten::_cudnn_attention",
)
"""Beginnings of the names of attention ops."""
_WHY = "it gathers keys and values for attention, not a weight"


def hold_back(plan: Plan, graph: OverlapGraph) -> Plan | None:
    """The plan with every gather of keys and values in its own place; None if there is none."""
    found = _find_kv_gathers(graph)
    held = {
        placement.gather
        for placement in plan.placements
        if placement.boundary < placement.original
        and not found.isdisjoint(placement.coalesced or (placement.gather,))
    }
    if not held:
        return None
    return evolve(
        plan,
        placements=tuple(
            _in_place(placement) if placement.gather in held else placement
            for placement in plan.placements
        ),
    )


def _in_place(placement: GatherPlacement) -> GatherPlacement:
    return evolve(placement, boundary=placement.original, why=_WHY)


def _find_kv_gathers(graph: OverlapGraph) -> set[str]:
    """Names of gathers whose result an attention op reads, itself or a copy made of it alone."""
    attention = {node.name for node in graph.nodes if _is_attention(node)}
    found: set[str] = set()
    if not attention:
        return found
    nobody: frozenset[str] = frozenset()
    gathered: dict[str, frozenset[str]] = {}
    """For each buffer the gathers whose result it is, or a copy of."""
    for node in graph.nodes:
        if node.kind is NodeKind.COLLECTIVE:
            gathered.update(dict.fromkeys(node.writes, frozenset({node.name})))
            continue
        read = [gathered.get(buffer, nobody) for buffer in node.reads]
        if node.name in attention:
            found.update(*read)
        elif node.kind is NodeKind.WAIT:  # it also reads what the gather was given
            gathered.update(dict.fromkeys(node.writes, nobody.union(*read)))
        elif node.kind is NodeKind.COMPUTE and read:
            gathered.update(dict.fromkeys(node.writes, read[0].intersection(*read)))
    return found


def _is_attention(node: Node) -> bool:
    return (canonical_op_name(node.op) or "").startswith(_ATTENTION)
