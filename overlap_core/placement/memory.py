"""Bounding the bytes of gathered weights between launch and wait, and the peak of memory."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from attrs import frozen

from .frame import rebuild_order
from .liveness import build_memory, live_bytes, peak_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlap_core.graph import OverlapGraph

    from .frame import Frame
    from .liveness import Memory

__all__ = [
    "PeakBound",
    "PeakRoom",
    "bound_peak",
    "bytes_if_earlier",
    "memory_floors",
    "peak_room",
]

_ALWAYS_ALLOWED = 32 << 20
"""Bytes by which the peak may grow in any graph: a share of a small one holds no gather."""


@frozen(kw_only=True)
class PeakBound:
    """How many bytes the nodes of a graph may have allocated at once."""

    memory: Memory
    nbytes: int
    growth_bytes: int
    """By how much that is more than in program order."""


def bound_peak(
    graph: OverlapGraph, growth: float | None, memory: Memory | None = None
) -> PeakBound | None:
    """Let the peak of memory grow by a share of what it is in program order, inputs included.

    Args:
        graph: of one rank.
        growth: the share; None: no bound.
        memory: of the graph, if more is known than the graph says.

    Returns:
        None where there is no bound, or the bytes of the inputs are not known.
    """
    if growth is None or graph.input_bytes is None:
        return None
    memory = build_memory(graph) if memory is None else memory
    peak = peak_bytes(graph, range(len(graph.nodes)), memory)
    growth_bytes = max(round(growth * (peak + graph.input_bytes)), _ALWAYS_ALLOWED)
    return PeakBound(memory=memory, nbytes=peak + growth_bytes, growth_bytes=growth_bytes)


def peak_room(graph: OverlapGraph, frame: Frame, bound: PeakBound | None) -> PeakRoom | None:
    """None where no placement can break the bound, all gathers being in flight at once."""
    if bound is None:
        return None
    room = PeakRoom(graph, frame, bound)
    return None if room.most_bytes <= bound.nbytes else room


class PeakRoom:
    """What each stretch of a frame's base has allocated, while gathers are placed, the last first.

    Gathers that were placed count from their launch on, the others from where program order has
    them, all members of a call from its first.
    """

    def __init__(self, graph: OverlapGraph, frame: Frame, bound: PeakBound) -> None:
        self._bound_bytes = bound.nbytes
        order = rebuild_order(frame, frame.originals)
        self._live = [0] * (len(frame.base) + 1)
        """By base index, the most bytes while that node runs or what is launched before it."""
        index = 0
        for position, nbytes in zip(order, live_bytes(graph, order, bound.memory), strict=True):
            self._live[index] = max(self._live[index], nbytes)
            if index < len(frame.base) and frame.base[index] == position:
                index += 1
        maker: dict[str, int] = {}
        for position, touched in enumerate(bound.memory.touches):
            for owner in touched:
                maker.setdefault(owner, position)
        made: dict[int, int] = {}
        for owner, position in maker.items():
            made[position] = made.get(position, 0) + bound.memory.nbytes[owner]
        self._brings = [
            sum(made.get(member, 0) for member in group.members) for group in frame.gathers
        ]

    @property
    def most_bytes(self) -> int:
        """What would be allocated at once with every gather in flight all the time."""
        return max(self._live, default=0) + sum(self._brings)

    def floor(self, ordinal: int, boundary: int, original: int) -> int:
        """The earliest boundary at which a gather fits, from `boundary` on.

        Args:
            ordinal: of the gather.
            boundary: where it would be launched.
            original: where program order launches it, which always counts as fitting.
        """
        most = self._bound_bytes - self._brings[ordinal]
        for index in range(original - 1, boundary - 1, -1):
            if self._live[index] > most:
                return index + 1
        return boundary

    def take(self, ordinal: int, boundary: int, original: int) -> None:
        """Count a gather from `boundary` on."""
        self._add(boundary, original, self._brings[ordinal])

    def give_back(self, ordinal: int, boundary: int, raised: int) -> None:
        """Count a gather that was taken from `boundary` on from `raised` on only."""
        self._add(boundary, raised, -self._brings[ordinal])

    def _add(self, begin: int, end: int, nbytes: int) -> None:
        for index in range(begin, end):
            self._live[index] += nbytes


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
