"""A legal order in which some nodes come as listed."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .dependencies import Edges

__all__ = ["restore_order"]


def restore_order(predecessors: Edges, sequence: Sequence[int]) -> tuple[int, ...] | None:
    """A legal order of all nodes with those of `sequence` in the order given.

    Nodes keep to program order as far as that allows: of those that may come next, the first one
    of program order does. So a node is held back rather than others pulled ahead of it, and where
    program order has the sequence already, it is the result.

    Args:
        predecessors: positions that must precede each node.
        sequence: positions without repetition.

    Returns:
        A permutation of all positions, or None if dependencies contradict the sequence.
    """
    needed = [len(before) for before in predecessors]
    successors: list[list[int]] = [[] for _ in predecessors]
    for index, before in enumerate(predecessors):
        for earlier in before:
            successors[earlier].append(index)
    for earlier, later in pairwise(sequence):
        successors[earlier].append(later)
        needed[later] += 1
    ready = [index for index, count in enumerate(needed) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        index = heappop(ready)
        order.append(index)
        for later in successors[index]:
            needed[later] -= 1
            if not needed[later]:
                heappush(ready, later)
    return tuple(order) if len(order) == len(needed) else None
