"""Which ranks negotiate with each other: those that communicate, directly or through others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["connected_scopes", "one_sided"]


def connected_scopes(groups: Mapping[int, Iterable[Sequence[int]]]) -> tuple[tuple[int, ...], ...]:
    """Split ranks into scopes.

    Args:
        groups: for each known rank the ranks of each group that its graph communicates on.

    Returns:
        Ascending tuples of the known ranks, ordered by their first rank.
    """
    parent = {rank: rank for rank in groups}

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for rank, mine in groups.items():
        for ranks in mine:
            for other in ranks:
                if other in parent:
                    a, b = sorted((root(rank), root(other)))
                    parent[b] = a
    scopes: dict[int, list[int]] = {}
    for rank in sorted(groups):
        scopes.setdefault(root(rank), []).append(rank)
    return tuple(tuple(scopes[first]) for first in sorted(scopes))


def one_sided(groups: Mapping[int, Iterable[Sequence[int]]]) -> tuple[int, int] | None:
    """The first pair (a, b) of known ranks where a communicates with b but b not with a."""
    peers = {rank: {other for ranks in mine for other in ranks} for rank, mine in groups.items()}
    for rank in sorted(peers):
        for other in sorted(peers[rank]):
            if other != rank and other in peers and rank not in peers[other]:
                return rank, other
    return None
