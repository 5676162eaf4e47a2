"""One slot, or one boundary, for each gather on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["reconcile"]


def reconcile(proposals: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The latest proposal for each gather, made non-decreasing.

    A rank proposes nothing below its own legal minimum, so the maximum is legal on all ranks.
    Equal on every rank, whatever the order in which ranks are numbered.

    Args:
        proposals: one sequence a rank, each with one entry a gather in program order.

    Raises:
        ValueError: the proposals have different lengths.
    """
    agreed: list[int] = []
    reached = 0
    for column in zip(*proposals, strict=True):
        reached = max(reached, *column)
        agreed.append(reached)
    return tuple(agreed)
