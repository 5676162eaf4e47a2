"""Where each weight gather is to be launched.

Positions are *boundaries*: boundary b lies before the b-th node of the graph with all launch
groups taken out, so it stays the same whatever the gathers do. A *slot* is the number of
skeleton entries, the moving gathers excluded, that lie before a boundary.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

__all__ = ["GatherPlacement", "Plan", "Verdict"]


class Verdict(StrEnum):
    """What became of a gather, in one word."""

    HIDDEN = "hidden"
    COMPUTE_LIMITED = "compute-limited"
    MEMORY_LIMITED = "memory-limited"
    PINNED = "pinned"
    UNMOVED = "unmoved"


@frozen(kw_only=True)
class GatherPlacement:
    """One gather's place. `floor <= boundary <= original` always holds."""

    gather: str
    """Name of the launch node on this rank; of the first launch of a coalesced call."""
    ordinal: int
    """Which of the moving gathers this is, from 0 in program order; equal on all ranks."""
    floor: int
    """Earliest legal boundary."""
    original: int
    """Boundary in program order."""
    boundary: int
    slot: int
    verdict: Verdict
    why: str
    by_peak: bool = False
    """Whether it is the bound on the peak of memory that holds it, where memory does."""
    coalesced: tuple[str, ...] = ()
    """Names of all launches of a coalesced call, in order; empty: the gather is alone."""


@frozen(kw_only=True)
class Plan:
    """All placements of one graph, in program order of the gathers."""

    placements: tuple[GatherPlacement, ...] = ()
