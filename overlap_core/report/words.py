"""Sizes, ranks and votes in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from overlap_core._words import bytes_in_words, counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlap_core.ranks import Vote

__all__ = ["bytes_in_words", "ranks_in_words", "votes_in_words"]

_DIGEST_LENGTH = 8


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks as spans: `rank 3`, or `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in spans)
    return f"rank {words}" if len(spans) == 1 and "-" not in words else f"ranks {words}"


def votes_in_words(votes: Sequence[Vote]) -> tuple[str, ...]:
    """What each rank voted, ranks with equal votes together, by lowest rank.

    Plugins and configuration are named only where they differ.
    """
    groups: dict[Vote, list[int]] = {}
    for vote in sorted(votes, key=lambda vote: vote.rank):
        groups.setdefault(evolve(vote, rank=0), []).append(vote.rank)
    plugins_differ = len({(vote.plugins, vote.plugin_names) for vote in groups}) > 1
    configs_differ = len({vote.config for vote in groups}) > 1
    lines = []
    for vote, ranks in groups.items():
        words = _vote(vote) if vote.can else f"cannot: {vote.why or 'gave no reason'}"
        if plugins_differ:
            words += f"; plugins {', '.join(vote.plugin_names) or 'none'}"
            words += f" (digest {_digest(vote.plugins)})"
        if configs_differ:
            words += f"; configuration {_digest(vote.config)}"
        lines.append(f"{ranks_in_words(ranks)}: {words}")
    return tuple(lines)


def _vote(vote: Vote) -> str:
    return (
        f"can; graph {_digest(vote.fingerprint)}, skeleton {_digest(vote.skeleton)} with "
        f"{counted(vote.entries, 'entry', 'entries')}, "
        f"{counted(vote.weight_gathers, 'weight gather')}"
    )


def _digest(text: str) -> str:
    return text[:_DIGEST_LENGTH] or "unknown"
