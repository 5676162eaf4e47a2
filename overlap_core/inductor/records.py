"""What happened to the graphs compiled so far in this process, newest last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.session import session

if TYPE_CHECKING:
    from overlap_core.outcome import RankOutcome

__all__ = ["add_record", "find_record", "has_record", "records"]


def add_record(outcome: RankOutcome, name: str = "") -> None:
    """Remember an outcome; the oldest of many is forgotten.

    Args:
        outcome: of one graph.
        name: unique to the graph; empty: it has none, and is not found in a cache either.
    """
    with session.lock:
        session.learned.records.append((name, outcome))
        session.learned.record_names.add(name)


def has_record(name: str) -> bool:
    """Whether an outcome of this name was ever added."""
    return name in session.learned.record_names


def find_record(name: str) -> RankOutcome | None:
    """The outcome of this name, if it is not forgotten."""
    with session.lock:
        return next((outcome for other, outcome in session.learned.records if other == name), None)


def records() -> tuple[RankOutcome, ...]:
    """Outcomes in the order in which their graphs were compiled."""
    with session.lock:
        return tuple(outcome for _, outcome in session.learned.records)
