"""A clock for tests: hours pass at once, and no deadline passes since the machine is busy."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from overlap_core._clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["VirtualClock"]

T = TypeVar("T")

_HANG_S = 300.0
"""Real seconds, after which a thread that has not ended hangs."""


class VirtualClock(Clock):
    """Time stands still while any thread works; once all sleep it is when the first one wakes.

    It belongs to the threads of `run` while these run, and to one thread before and after.
    """

    __slots__ = ("_awake", "_changed", "_now", "_wakes")

    def __init__(self) -> None:
        self._now = 0.0
        self._awake = 1
        self._wakes: list[float] = []
        self._changed = threading.Condition()

    def now(self) -> float:
        with self._changed:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._changed:
            wake = self._now + seconds
            if wake > self._now:
                self._wakes.append(wake)
                self._rest()
                self._changed.wait_for(lambda: self._now >= wake)

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """The results of calls that run at once, a thread each; an exception is a result."""
        results: list[T | Exception] = [RuntimeError("the thread did not end")] * len(calls)
        with self._changed:
            self._awake += len(calls) - 1  # this thread only waits meanwhile

        def run(index: int, call: Callable[[], T]) -> None:
            try:
                results[index] = call()
            except Exception as error:
                results[index] = error
            finally:
                with self._changed:
                    self._rest()

        threads = [threading.Thread(target=run, args=x, daemon=True) for x in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_HANG_S)
        with self._changed:
            self._awake += 1
        return results

    def _rest(self) -> None:
        """One thread less is at work; if it was the last one, time passes."""
        self._awake -= 1
        if self._awake == 0 and self._wakes:
            self._now = min(self._wakes)
            left = [wake for wake in self._wakes if wake > self._now]
            self._awake = len(self._wakes) - len(left)
            self._wakes = left
            self._changed.notify_all()
