"""What a rank that goes on without overlap tells its peers, so that they don't wait for it.

A notice holds for one job on one store, until it is taken back. Whoever waits looks for notices of
those that have not come; a counter tells cheaply that there are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .store import KeyValueStore

__all__ = ["find_off", "in_one_line", "name_ranks", "off_in_words", "say_off"]

_OFF = "overlap_core/off"
_LONGEST = 600
"""Characters of a reason; one may quote another rank's, which quotes a third one's."""
_MOST_NAMED = 8


def say_off(store: KeyValueStore, job: int, rank: int, why: str) -> None:
    """Say that a rank goes on without overlap, or that it does not any more.

    Args:
        store: shared by all ranks of the job.
        job: its number on this store.
        rank: this one.
        why: the reason; empty: it overlaps again.
    """
    store.set(_key(job, rank), in_one_line(why))
    if why:
        store.add(_count(job), 1)


def find_off(store: KeyValueStore, job: int, ranks: Iterable[int]) -> dict[int, str]:
    """Those of the ranks that go on without overlap, with their reasons."""
    if store.add(_count(job), 0) == 0:
        return {}
    said = {rank: _read(store, _key(job, rank)) for rank in ranks}
    return {rank: why for rank, why in said.items() if why}


def off_in_words(reasons: Mapping[int, str]) -> str:
    """Such as `rank 1 goes on without overlap: switched off by ...`; of many, the first one's."""
    ranks = sorted(reasons)
    first = reasons[ranks[0]]
    if len(ranks) == 1:
        return f"{name_ranks(ranks)} goes on without overlap: {first}"
    whose = "" if len(set(reasons.values())) == 1 else f"rank {ranks[0]}: "
    return f"{name_ranks(ranks)} go on without overlap: {whose}{first}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as `rank 3`, or `ranks 0, 2`; of many the first ones."""
    shown = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def in_one_line(why: str) -> str:
    """A reason without line breaks, and not too long to be quoted."""
    text = " ".join(why.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _key(job: int, rank: int) -> str:
    return f"{_OFF}/{job}/{rank}"


def _count(job: int) -> str:
    return f"{_OFF}/{job}/said"


def _read(store: KeyValueStore, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""
