"""Plugin `default_ladder`: the mode ladder `default`.

A pure function of the votes. Every rank runs it alone, so the decision and every word of its
reason depend on nothing but the votes, taken in order of rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.hookspecs import hookimpl
from overlap_core.ranks.votes import Mode, ModeDecision

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from overlap_core.ranks.votes import Vote

__all__ = ["default"]

overlap_plugin_name = "default_ladder"

_MOST_SPANS = 6
_MOST_GROUPS = 4


@hookimpl(specname="overlap_choose_mode", trylast=True)
def default(votes: tuple[Vote, ...]) -> ModeDecision:
    """Abort if a rank can't or the ranks don't fit, else the freest mode that is safe."""
    votes = tuple(sorted(votes, key=lambda vote: vote.rank))
    problem = _find_problem(votes)
    if problem is not None:
        return ModeDecision(mode=Mode.ABORT, why=problem)
    if _all_equal(vote.fingerprint for vote in votes):
        return ModeDecision(mode=Mode.IDENTICAL, why=f"one graph on {_all(votes)}")
    if _all_equal(vote.skeleton for vote in votes):
        why = (
            f"graphs differ, the {_entries(votes[0])} match{'es' * (votes[0].entries == 1)}: "
            f"{_describe(votes, lambda vote: vote.fingerprint, _graph)}"
        )
        return ModeDecision(mode=Mode.SLOT, why=why)
    why = f"skeletons differ: {_describe(votes, lambda vote: vote.skeleton, _skeleton)}"
    return ModeDecision(mode=Mode.PINNED, why=why)


def _find_problem(votes: tuple[Vote, ...]) -> str | None:
    """Why the ranks can't go on together, for the first of the reasons in their fixed order."""
    if not votes:
        return "no rank voted"
    unable = [vote for vote in votes if not vote.can]
    if unable:
        return _describe(unable, lambda vote: vote.why, _reason)
    if len({vote.plugins for vote in votes}) > 1:
        return (
            f"different plugins: {_plugin_difference(votes)}. Install the same plugins and "
            "versions on every rank, or leave out those that differ with "
            "OVERLAP_CORE_DISABLE_PLUGINS"
        )
    if len({vote.config for vote in votes}) > 1:
        found = _describe(votes, lambda vote: vote.config, lambda vote: vote.config[:12])
        return f"different configuration: {found}. Give every rank the same OverlapConfig"
    if len({vote.weight_gathers for vote in votes}) > 1:
        found = _describe(
            votes, lambda vote: vote.weight_gathers, lambda vote: str(vote.weight_gathers)
        )
        return f"different numbers of weight gathers: {found}"
    return None


def _all_equal(digests: Iterable[str]) -> bool:
    """Whether there is one digest; an empty one means unknown and equals nothing."""
    found = set(digests)
    return len(found) == 1 and "" not in found


def _reason(vote: Vote) -> str:
    return f"cannot ({vote.why or 'gave no reason'})"


def _graph(vote: Vote) -> str:
    return f"graph {vote.fingerprint[:12] or 'unknown'}"


def _entries(vote: Vote) -> str:
    return "skeleton's entry" if vote.entries == 1 else f"{vote.entries} skeleton entries"


def _skeleton(vote: Vote) -> str:
    words = f"{vote.entries} {'entry' if vote.entries == 1 else 'entries'}"
    return f"{words}, digest {vote.skeleton[:12] or 'unknown'}"


def _plugin_difference(votes: tuple[Vote, ...]) -> str:
    """What each group of ranks has that not all have, or that the order differs."""
    everywhere = set.intersection(*(set(vote.plugin_names) for vote in votes))

    def special(vote: Vote) -> str:
        extra = [name for name in vote.plugin_names if name not in everywhere]
        shown = ", ".join(extra) if extra else "nothing that others lack"
        return f"{shown} (digest {vote.plugins[:12] or 'unknown'})"

    found = _describe(votes, lambda vote: (vote.plugins, vote.plugin_names), special)
    if all(set(vote.plugin_names) == everywhere for vote in votes):
        return f"same names and versions, other order or registered ops: {found}"
    return found


def _describe(
    votes: Iterable[Vote], key: Callable[[Vote], Hashable], say: Callable[[Vote], str]
) -> str:
    """Each group of ranks with one key, by lowest rank, and what `say` says of its first."""
    groups: dict[Hashable, list[Vote]] = {}
    for vote in votes:
        groups.setdefault(key(vote), []).append(vote)
    parts = [f"{_ranks(group)}: {say(group[0])}" for group in list(groups.values())[:_MOST_GROUPS]]
    left_out = len(groups) - _MOST_GROUPS
    if left_out > 0:
        parts.append(f"and {left_out} more")
    return "; ".join(parts)


def _all(votes: tuple[Vote, ...]) -> str:
    return f"rank {votes[0].rank}" if len(votes) == 1 else f"all {len(votes)} ranks"


def _ranks(votes: list[Vote]) -> str:
    """`rank 3`, or `ranks 0-3, 7`, cut after a few spans."""
    spans: list[list[int]] = []
    for rank in (vote.rank for vote in votes):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if len(votes) == 1:
        return f"rank {votes[0].rank}"
    parts = [f"{low}-{high}" if high > low else f"{low}" for low, high in spans[:_MOST_SPANS]]
    left_out = sum(high - low + 1 for low, high in spans[_MOST_SPANS:])
    return f"ranks {', '.join(parts)}" + (f" and {left_out} more" if left_out else "")
