"""From what the ranks agreed on to this rank's own boundaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from overlap_core.errors import IllegalOrderError

from .plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .frame import Frame

__all__ = ["follow_slots", "settle"]


def settle(plan: Plan, frame: Frame, agreed: Sequence[int], *, by_boundary: bool) -> Plan:
    """Move each gather of this rank's plan to the agreed boundary, or into the agreed slot.

    In a slot later than its own choice a gather goes to the slot's beginning; in its own slot it
    stays where this rank wants it. Boundaries never decrease.

    Raises:
        IllegalOrderError: the agreement launches a gather before this rank's own choice or
            behind its place in program order, which a correct agreement cannot do.
    """
    settled = []
    reached = 0
    for placement, unit in zip(plan.placements, agreed, strict=True):
        if by_boundary:
            boundary = unit
        elif unit == placement.slot:
            boundary = placement.boundary
        else:
            boundary = frame.slot_start(unit)
        boundary = reached = max(reached, boundary)
        if not placement.boundary <= boundary <= placement.original:
            raise IllegalOrderError(
                f"gather {placement.gather!r} would be launched at boundary {boundary}, outside "
                f"[{placement.boundary}, {placement.original}]"
            )
        if boundary != placement.boundary:
            placement = evolve(placement, boundary=boundary, slot=frame.slot(boundary))
        settled.append(placement)
    return Plan(placements=tuple(settled))


def follow_slots(plan: Plan, frame: Frame, agreed: Sequence[int]) -> Plan:
    """Put each gather into the slot that was agreed for an earlier graph of the same skeleton.

    Inside the slot a gather goes as close as possible to where this rank wants it.

    Raises:
        IllegalOrderError: a gather cannot be launched in its slot.
    """
    followed = []
    reached = 0
    for placement, slot in zip(plan.placements, agreed, strict=True):
        end = frame.fixed[slot] if slot < len(frame.fixed) else len(frame.base)
        first = max(placement.floor, frame.slot_start(slot), reached)
        last = min(placement.original, end)
        if first > last:
            raise IllegalOrderError(
                f"gather {placement.gather!r} cannot be launched in slot {slot}: it would have to "
                f"lie between boundaries {first} and {last}"
            )
        reached = min(max(placement.boundary, first), last)
        followed.append(evolve(placement, boundary=reached, slot=slot))
    return Plan(placements=tuple(followed))
