"""Bounding the bytes of gathered weights between launch and wait."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlap_core.graph import OverlapGraph

    from .frame import Frame

__all__ = ["bytes_if_earlier", "memory_floors"]


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
    reached = [0, *accumulate((wait + 1 for wait in frame.released), max)]
    return tuple(reached[done] for done in _done_before(sizes, bound_bytes))


def bytes_if_earlier(sizes: Sequence[int], bound_bytes: int) -> tuple[int, ...]:
    """For each gather the bytes in flight if it were launched before its `memory_floors`.

    They are more than the bound; 0 for gathers that need not wait for any other.
    """
    total = [0, *accumulate(sizes)]
    return tuple(
        total[ordinal + 1] - total[done - 1] if done else 0
        for ordinal, done in enumerate(_done_before(sizes, bound_bytes))
    )


def _done_before(sizes: Sequence[int], bound_bytes: int) -> Iterator[int]:
    """For each gather how many of those before it must be waited for before its launch."""
    total = done = 0
    for ordinal, nbytes in enumerate(sizes):
        total += nbytes
        while total > bound_bytes and done < ordinal:
            total -= sizes[done]
            done += 1
        yield done
