"""The plan in which no gather leaves its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import GatherPlacement, Plan, Verdict

if TYPE_CHECKING:
    from overlap_core.graph import OverlapGraph

    from .frame import Frame

__all__ = ["stand_still"]


def stand_still(graph: OverlapGraph, frame: Frame) -> Plan:
    """Every gather at its boundary in program order."""
    placements = [
        GatherPlacement(
            gather=graph.nodes[group.launch].name,
            ordinal=ordinal,
            floor=frame.floors[ordinal],
            original=original,
            boundary=original,
            slot=frame.slot(original),
            verdict=Verdict.PINNED,
            why="",
        )
        for ordinal, (group, original) in enumerate(
            zip(frame.gathers, frame.originals, strict=True)
        )
    ]
    return Plan(placements=tuple(placements))
