"""The network that all groups share, beside one compute stream: who is served when, how fast."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_core.costs import Machine

__all__ = ["SharedNetwork"]


class SharedNetwork:
    """Queues of jobs, and the clock that they share with the compute stream.

    A job is active once it is the first in each of its queues; active jobs share the network
    evenly. The one clock is moved by what the compute stream does: nothing, compute, or network
    traffic of its own. Times are nanoseconds; they stay whole numbers where nothing is shared or
    slowed. The order of all operations is fixed, so floats come out alike on every machine.
    """

    def __init__(self, queues: int, machine: Machine) -> None:
        self.now: float = 0
        self.started: dict[int, float] = {}
        """When each job became active; also the stream's own ones."""
        self.ended: dict[int, float] = {}
        """When each job was done."""
        self._queues: tuple[deque[int], ...] = tuple(deque() for _ in range(queues))
        self._jobs: dict[int, tuple[tuple[int, ...], int]] = {}
        """The queues and the time alone of each job."""
        self._active: list[tuple[float, int]] = []
        """A heap: what the network will have served when a job is done, and the job."""
        self._served: float = 0
        """What each job that has been active since the network was idle has got."""
        self._pending: list[int] = []
        """Jobs that are ready and find no room on the device."""
        self._fills = False
        """A kernel runs that leaves no room."""
        self._waits_for_kernel = machine.waits_for_kernel
        self._compute_slowdown = machine.compute_slowdown
        self._gather_slowdown = machine.gather_slowdown

    def submit(self, job: int, queues: tuple[int, ...], ns: int) -> None:
        """Add a job of `ns` alone to the end of its queues, now."""
        self._jobs[job] = queues, ns
        for queue in queues:
            self._queues[queue].append(job)
        self._start_if_first(job, at_once=False)

    def last_in(self, queue: int) -> int | None:
        """The job that holds a queue longest; None if the queue is free."""
        return self._queues[queue][-1] if self._queues[queue] else None

    def idle_until(self, time: float) -> None:
        """The stream does nothing up to a time, or nothing at all if that has passed."""
        if self.now < time:
            self._make_room()
        while self._active and self.now < time:
            share = len(self._active)
            left = (self._active[0][0] - self._served) * share
            if self.now + left > time:
                self._served += (time - self.now) / share
                break
            self._end_first(left)
        self.now = max(self.now, time)

    def idle_until_done(self, job: int) -> None:
        """The stream does nothing until a job is done."""
        if job not in self.ended:
            self._make_room()
        while job not in self.ended:
            self._end_first((self._active[0][0] - self._served) * len(self._active))

    def idle_until_free(self) -> None:
        """The stream does nothing until every job is done."""
        self._make_room()
        while self._active:
            self._end_first((self._active[0][0] - self._served) * len(self._active))

    def compute(self, ns: float, *, fills: bool = True) -> None:
        """The stream computes what takes `ns` alone.

        Args:
            ns: in nanoseconds.
            fills: it is one kernel, which leaves no room for a job to start beside it.
        """
        if not fills:
            self._make_room()
        self._fills = fills and self._waits_for_kernel
        self._compute(ns)
        self._fills = False
        self._make_room()

    def _compute(self, ns: float) -> None:
        while self._active:
            share = len(self._active) * self._gather_slowdown
            left = (self._active[0][0] - self._served) * share
            takes = ns * self._compute_slowdown
            if takes < left:
                self.now += takes
                self._served += takes / share
                return
            self._end_first(left)
            ns = max(0, ns - left / self._compute_slowdown)
        self.now += ns

    def communicate(self, job: int, ns: float) -> None:
        """The stream itself uses the network for what takes `ns` alone, as one more job."""
        self._make_room()
        self.started[job] = self.now
        while self._active:
            share = len(self._active) + 1
            left = self._active[0][0] - self._served
            if ns < left:
                self.now += ns * share
                self._served += ns
                break
            self._end_first(left * share)
            ns -= left
        else:
            self.now += ns
        self.ended[job] = self.now

    def _end_first(self, after: float) -> None:
        """Let time pass until the next job is done, and start what it held up."""
        if after > 0:  # rounding may leave a hair less than nothing
            self.now += after
        served, job = heappop(self._active)
        self._served = served if self._active else 0
        self.ended[job] = self.now
        queues = self._jobs[job][0]
        for queue in queues:
            self._queues[queue].popleft()
        for queue in queues:
            if self._queues[queue]:
                self._start_if_first(self._queues[queue][0], at_once=not self._fills)

    def _start_if_first(self, job: int, *, at_once: bool) -> None:
        queues, ns = self._jobs[job]
        if job in self.started or any(self._queues[queue][0] != job for queue in queues):
            return
        if at_once or not self._waits_for_kernel:
            self._start(job, ns)
        elif job not in self._pending:
            self._pending.append(job)

    def _make_room(self) -> None:
        """Start the jobs that found no room."""
        for job in self._pending:
            self._start(job, self._jobs[job][1])
        self._pending.clear()

    def _start(self, job: int, ns: int) -> None:
        self.started[job] = self.now
        heappush(self._active, (self._served + ns, job))
