"""The coordinates of a placement: base nodes, boundaries, slots, floors."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from overlap_core.graph import LaunchGroup, OverlapGraph
    from overlap_core.skeleton import Skeleton

__all__ = ["Frame", "build_frame", "number_base", "rebuild_order"]


@frozen(kw_only=True)
class Frame:
    """What stays put while gathers move.

    Gathers that are coalesced into one call are one gather here. The *base* is the program order
    without all launch groups. Boundary b lies before base node b; there are `len(base) + 1` of
    them.
    """

    base: tuple[int, ...]
    """Positions of the base nodes, ascending."""
    boundary_of: tuple[int, ...]
    """For each node of the graph its boundary in program order."""
    fixed: tuple[int, ...]
    """Base indices of the skeleton entries that never move, ascending."""
    gathers: tuple[LaunchGroup, ...]
    floors: tuple[int, ...]
    """Earliest legal boundary of each gather."""
    originals: tuple[int, ...]
    """Boundary of each gather's launch in program order."""
    needed: tuple[int, ...]
    """Base index of each gather's first wait."""
    released: tuple[int, ...] = ()
    """Base index of the last of the first waits of a call's gathers; `needed` for one alone."""

    def slot(self, boundary: int) -> int:
        """Number of fixed skeleton entries before a boundary."""
        return bisect_left(self.fixed, boundary)

    def slot_start(self, slot: int) -> int:
        """First boundary of a slot."""
        return self.fixed[slot - 1] + 1 if slot > 0 else 0


def number_base(nodes: int, moving: Collection[int]) -> tuple[list[int], list[int]]:
    """Positions that stay put, ascending, and for each position its boundary among them."""
    base: list[int] = []
    boundary_of: list[int] = []
    for position in range(nodes):
        boundary_of.append(len(base))
        if position not in moving:
            base.append(position)
    return base, boundary_of


def build_frame(
    graph: OverlapGraph, skeleton: Skeleton, gathers: tuple[LaunchGroup, ...] | None = None
) -> Frame:
    """Take the launch groups out of the program order and number what is left.

    Args:
        graph, skeleton: of one rank.
        gathers: launch groups of coalesced calls, from `join`; None: each gather is alone.
    """
    gathers = skeleton.gathers if gathers is None else gathers
    waits = {group.launch: group.waits[0] for group in skeleton.gathers}
    moving = {member for group in gathers for member in group.members}
    base, boundary_of = number_base(len(graph.nodes), moving)
    launches = {launch for group in gathers for launch in group.launches}
    floors = []
    for group in gathers:
        floor = 0
        for member in group.members:
            for before in graph.predecessors[member]:
                # No launch group needs anything of a later one, and earlier ones stay before.
                if before not in moving:
                    floor = max(floor, boundary_of[before] + 1)
        floors.append(min(floor, boundary_of[group.launch]))
    return Frame(
        base=tuple(base),
        boundary_of=tuple(boundary_of),
        fixed=tuple(boundary_of[p] for p in skeleton.positions if p not in launches),
        gathers=gathers,
        floors=tuple(floors),
        originals=tuple(boundary_of[group.launch] for group in gathers),
        needed=tuple(boundary_of[group.waits[0]] for group in gathers),
        released=tuple(
            max(boundary_of[waits[launch]] for launch in group.launches) for group in gathers
        ),
    )


def rebuild_order(frame: Frame, boundaries: Sequence[int]) -> tuple[int, ...]:
    """The order of positions with each gather launched at its boundary.

    A member of a launch group moves forward only, never back, and nodes that share a boundary
    keep their program order, so gathers never swap and rebuilding twice changes nothing. The
    launches of a coalesced call follow each other, behind what prepares their inputs.
    """
    arrivals: list[list[tuple[tuple[int, int, int], int]]]
    arrivals = [[] for _ in range(len(frame.base) + 1)]
    for group, boundary in zip(frame.gathers, boundaries, strict=True):
        launches = frozenset(group.coalesced)
        for member in group.members:
            key = (member, 0, 0)
            if launches:
                key = (group.launch, int(member in launches), member)
            arrivals[min(boundary, frame.boundary_of[member])].append((key, member))
    order: list[int] = []
    for boundary, members in enumerate(arrivals):
        order.extend(member for _, member in sorted(members))
        if boundary < len(frame.base):
            order.append(frame.base[boundary])
    return tuple(order)
