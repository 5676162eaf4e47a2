"""What the votes allow at most, and how to allow less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.builtin import ladder as builtin_ladder
from overlap_core.ranks.votes import Mode, ModeDecision

if TYPE_CHECKING:
    from overlap_core.ranks.votes import Vote

__all__ = ["allowed", "at_most"]

_FREEST_FIRST = tuple(Mode)


def allowed(votes: tuple[Vote, ...]) -> ModeDecision:
    """The decision of `default`, than which no ladder may be freer."""
    # Called through its module: pluggy takes every marked function that it finds in a plugin's
    # namespace for the plugin's own, and two ladders named "default" are refused.
    return builtin_ladder.default(votes)


def at_most(decision: ModeDecision, mode: Mode, why: str) -> ModeDecision:
    """The decision, or `mode` where that is more careful, with both reasons."""
    if _FREEST_FIRST.index(mode) <= _FREEST_FIRST.index(decision.mode):
        return decision
    return ModeDecision(
        mode=mode, why=f"{why} (the votes allow {decision.mode} at most: {decision.why})"
    )
