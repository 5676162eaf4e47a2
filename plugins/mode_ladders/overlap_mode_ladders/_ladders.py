"""The ladders that `OverlapConfig(mode_ladder=...)` can name once this plugin is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core import hookimpl
from overlap_core.ranks.votes import Mode, ModeDecision

from ._limits import allowed, at_most

if TYPE_CHECKING:
    from overlap_core.ranks.votes import Vote

__all__ = ["conservative", "majority", "strict"]


@hookimpl(specname="overlap_choose_mode")
def strict(votes: tuple[Vote, ...]) -> ModeDecision:
    """Identical or abort: a job whose ranks should be equal finds out when they are not."""
    limit = allowed(votes)
    if limit.mode is Mode.IDENTICAL:
        return limit
    return at_most(limit, Mode.ABORT, "strict wants one graph on all ranks")


@hookimpl(specname="overlap_choose_mode")
def conservative(votes: tuple[Vote, ...]) -> ModeDecision:
    """Pinned at most: no gather passes any communication, even where all graphs are equal."""
    why = "conservative lets no gather pass another collective"
    return at_most(allowed(votes), Mode.PINNED, why)


@hookimpl(specname="overlap_choose_mode")
def majority(votes: tuple[Vote, ...]) -> ModeDecision:
    """Always abort. It is here to say why there is no such ladder; the README shows it."""
    return ModeDecision(
        mode=Mode.ABORT,
        why=(
            "majority is refused: a ladder must be the same function on all ranks, and a majority "
            "among the votes heard so far is another one on each rank, so that ranks would end in "
            "different modes and wait for each other's collectives for ever; use strict, "
            "conservative or default"
        ),
    )
