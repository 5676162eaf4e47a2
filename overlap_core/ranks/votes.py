"""What ranks tell each other before anything is moved."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

__all__ = ["Mode", "ModeDecision", "Vote"]


class Mode(StrEnum):
    """How much freedom the ranks of a scope share."""

    IDENTICAL = "identical"
    """Same graph on every rank: one order for all."""
    SLOT = "slot"
    """Graphs differ in compute, skeletons match: one slot for each gather."""
    PINNED = "pinned"
    """Skeletons differ: no gather passes any communication."""
    ABORT = "abort"
    """Program order everywhere."""


@frozen(kw_only=True)
class Vote:
    """One rank's vote. Every rank of a scope sends one, whatever happened to it.

    Digests are hex strings; ranks with equal digests agree on what was digested.
    """

    rank: int
    can: bool
    """False: this rank keeps program order, and `why` says for what reason."""
    why: str = ""
    config: str = ""
    plugins: str = ""
    """Digest of the plugins in calling order; `plugin_names` says it in words."""
    plugin_names: tuple[str, ...] = ()
    fingerprint: str = ""
    """When a ladder sees the votes, ranks whose graphs differ only in static sizes that are each
    rank's own carry equal digests."""
    skeleton: str = ""
    """Ranks whose skeletons are compatible carry equal digests when a ladder sees the votes."""
    order: str = ""
    """Digest of how the captured graph orders the skeleton's entries; empty: unknown."""
    entries: int = 0
    """Length of the skeleton."""
    weight_gathers: int = 0


@frozen(kw_only=True)
class ModeDecision:
    """The mode that a ladder chose, and the reason in one sentence."""

    mode: Mode
    why: str
