"""Reports of the graphs compiled so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.inductor import records

if TYPE_CHECKING:
    from overlap_core.outcome import RankOutcome

__all__ = ["reports"]


def reports() -> tuple[RankOutcome, ...]:
    """Reports of the graphs that this process compiled with overlap installed, newest last."""
    return records()
