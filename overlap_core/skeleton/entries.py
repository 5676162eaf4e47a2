"""How one node of communication looks to other ranks."""

from __future__ import annotations

from attrs import field, frozen

__all__ = ["NO_COMMUNICATION", "Communication", "SkeletonEntry"]


def _names(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]


@frozen(kw_only=True)
class Communication:
    """What a plugin says of a node: whether it communicates, on which groups, and how it compares.

    A classification with `issues=False` is an answer too: "I know this op, it stays silent".
    """

    issues: bool = True
    groups: tuple[str, ...] = field(default=(), converter=_names)
    """Names of the process groups on this rank; empty: unknown."""
    gather: bool = False
    """An all-gather whose launch may move, if its input comes from graph inputs only."""
    comparable: tuple[str, ...] = field(default=(), converter=_names)
    """Further words that must be equal on all ranks, such as a reduction or an algorithm."""


NO_COMMUNICATION = Communication(issues=False)
"""The answer for a node that issues nothing."""


@frozen(kw_only=True)
class SkeletonEntry:
    """One launch of communication in terms that mean the same on every rank.

    Node index, buffer and group names, the ranks in the group and symbols stay out: real models
    differ there between ranks for the same logical operation.
    """

    ordinal: int
    op: str
    sizes: tuple[tuple[int | str, ...], ...]
    """Static dimensions as integers, every symbolic one as "~"."""
    dtypes: tuple[str, ...]
    groups: tuple[int, ...]
    """Which groups, numbered by first appearance in the skeleton."""
    group_sizes: tuple[int | None, ...]
    weight_gather: bool
    comparable: tuple[str, ...] = ()
    node: str = field(default="", eq=False)
    """Name on this rank, for messages; no part of the comparison."""
