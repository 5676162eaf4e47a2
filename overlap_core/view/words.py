"""What pages and traces say of blocks and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lanes import BlockKind

if TYPE_CHECKING:
    from .lanes import RankTimeline

__all__ = ["BLOCK_WORDS", "IN_FLIGHT", "ORDER_WORDS", "describe_node"]

ORDER_WORDS = {"before": "before (program order)", "after": "after (final order)"}
BLOCK_WORDS = {
    BlockKind.EXPOSED: "exposed",
    BlockKind.GATHER: "weight gather, hidden",
    BlockKind.COMPUTE: "compute",
    BlockKind.OPAQUE: "opaque op that communicates",
    BlockKind.COLLECTIVE: "other communication",
    BlockKind.IDLE: "idle for other communication",
    BlockKind.LAUNCH: "launch",
    BlockKind.WAIT: "wait",
    BlockKind.ISSUE: "host issues compute",
}
"""In the order of the legend."""
IN_FLIGHT = "gathered weights in flight"


def describe_node(timeline: RankTimeline, position: int) -> dict[str, Any]:
    """What is worth knowing of a node, by name; `from` and `to` are positions of the launch."""
    node = timeline.graph.nodes[position]
    cost = timeline.report.costs[position]
    about: dict[str, Any] = {"node": node.name, "op": node.op}
    if node.origins:
        about["fused"] = ", ".join(node.origins)
    if node.group is not None:
        about["group"] = node.group
    about["cost"] = "unknown" if cost.ns is None else _us(cost.ns)
    about["cost source"] = f"{cost.source} ({cost.why})" if cost.why else str(cost.source)
    gather = timeline.gathers.get(position)
    if gather is not None:
        about |= {
            "from": gather.source,
            "to": gather.target,
            "slot": gather.slot,
            "verdict": gather.verdict,
            "why": gather.why,
            "exposed before": _us(gather.exposed_ns_before),
            "exposed after": _us(gather.exposed_ns_after),
        }
        if gather.call is not None:
            about["coalesced call"] = gather.call
    return about


def _us(ns: int) -> str:
    return f"{ns / 1000:,.1f} µs"
