"""What happened to the graphs compiled so far in this process, newest last."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_core.outcome import RankOutcome

__all__ = ["add_record", "clear_records", "find_record", "has_record", "records"]

_KEPT = 256
_lock = threading.Lock()
_records: deque[tuple[str, RankOutcome]] = deque(maxlen=_KEPT)
_names: set[str] = set()


def add_record(outcome: RankOutcome, name: str = "") -> None:
    """Remember an outcome; the oldest of many is forgotten.

    Args:
        outcome: of one graph.
        name: unique to the graph; empty: it has none, and is not found in a cache either.
    """
    with _lock:
        _records.append((name, outcome))
        _names.add(name)


def has_record(name: str) -> bool:
    """Whether an outcome of this name was ever added."""
    return name in _names


def find_record(name: str) -> RankOutcome | None:
    """The outcome of this name, if it is not forgotten."""
    with _lock:
        return next((outcome for other, outcome in _records if other == name), None)


def records() -> tuple[RankOutcome, ...]:
    """Outcomes in the order in which their graphs were compiled."""
    with _lock:
        return tuple(outcome for _, outcome in _records)


def clear_records() -> None:
    """Forget all outcomes."""
    with _lock:
        _records.clear()
        _names.clear()
