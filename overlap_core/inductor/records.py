"""What happened to the graphs compiled so far in this process, newest last."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_core.outcome import RankOutcome

__all__ = ["add_record", "clear_records", "records"]

_KEPT = 256
_lock = threading.Lock()
_records: deque[RankOutcome] = deque(maxlen=_KEPT)


def add_record(outcome: RankOutcome) -> None:
    """Remember an outcome; the oldest of many is forgotten."""
    with _lock:
        _records.append(outcome)


def records() -> tuple[RankOutcome, ...]:
    """Outcomes in the order in which their graphs were compiled."""
    with _lock:
        return tuple(_records)


def clear_records() -> None:
    """Forget all outcomes."""
    with _lock:
        _records.clear()
