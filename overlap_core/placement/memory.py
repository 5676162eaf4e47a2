"""Bounding the bytes of gathered weights between launch and wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_core.graph import OverlapGraph

    from .frame import Frame

__all__ = ["memory_floors"]


def memory_floors(graph: OverlapGraph, frame: Frame, bound_bytes: int | None) -> tuple[int, ...]:
    """For each gather the earliest boundary at which it fits beside those before it.

    A gather is in flight from its launch to its first wait, a coalesced call to the last of them.
    Since gathers never swap, gather i fits once enough of its predecessors have been waited for;
    a gather that is larger than the bound by itself waits for all of them. Unknown sizes count
    as nothing.
    """
    if bound_bytes is None:
        return (0,) * len(frame.gathers)
    sizes = [
        sum(graph.nodes[launch].nbytes or 0 for launch in group.launches) for group in frame.gathers
    ]
    floors: list[int] = []
    total = 0
    done = 0
    floor = 0
    for ordinal, nbytes in enumerate(sizes):
        total += nbytes
        while total > bound_bytes and done < ordinal:
            total -= sizes[done]
            floor = max(floor, frame.released[done] + 1)
            done += 1
        floors.append(floor)
    return tuple(floors)
