"""The clock that waiting code goes by: the machine's own, unless a test hands over another."""

from __future__ import annotations

import time

__all__ = ["REAL_CLOCK", "Clock"]


class Clock:
    """Tells seconds and waits for them; this one by the machine's monotonic clock.

    Whatever has a deadline takes one, so that a test can have hours pass at once, and a busy
    machine cannot have a deadline pass that should not.
    """

    __slots__ = ()

    def now(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return so many seconds later."""
        time.sleep(seconds)


REAL_CLOCK = Clock()
