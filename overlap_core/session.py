"""All that this process remembers between two graphs, in one object with one `reset`.

What was learned is dropped as a whole, so it must be read through `session.learned` each time: who
holds a part of it over a call that may begin a new job would write into the old one.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from attrs import Factory, define, field

if TYPE_CHECKING:
    from .inductor.job import Job
    from .inductor.overlap_pass import OverlapPass
    from .outcome import RankOutcome
    from .ranks.issued import Listener
    from .registry import OpEntry

__all__ = ["Kept", "Learned", "Session", "session"]

_MOST_RECORDS = 256


@define(kw_only=True)
class Learned:
    """What a new process would not know."""

    job: Job | None = None
    """The last job, with its agreements."""
    records: deque[tuple[str, RankOutcome]] = Factory(lambda: deque(maxlen=_MOST_RECORDS))
    """Outcomes of graphs with their names, newest last."""
    record_names: set[str] = Factory(set)
    """Of all records, also of those that are forgotten by now."""
    communicating: set[str] = Factory(set)
    """Ops that called torch.distributed while they were replayed."""
    compiled: set[str] = Factory(set)
    """Opaque ops of the graphs so far."""
    searched: set[str] = Factory(set)
    """Structural keys of calls that were looked into for hidden communication."""
    workspaces: dict[str, int] = Factory(dict)
    """Bytes that ops allocate beside their outputs, by structural key."""
    probes: dict[tuple[object, ...], tuple[float, ...]] = Factory(dict)
    """What ranks agreed on about the machine, by device, name of the probe and group's ranks."""
    said: set[str] = Factory(set)
    """Reasons and names of ops that were warned of, each once."""


@define(kw_only=True)
class Kept:
    """What others own, and `reset` leaves to them.

    Decorators register ops once in a process, at import. Installed passes and listeners are taken
    back by whoever brought them: dropped before, a `disable` or `remove_listener` would meet
    nothing, and a recorder would miss what it is there to record.
    """

    ops: dict[str, OpEntry] = Factory(dict)
    """Registered ops by name."""
    passes: list[OverlapPass] = Factory(list)
    """Installed for all compiles, by `enable` and `enabled`; the last one counts."""
    made: dict[str, OverlapPass] = Factory(dict)
    """One for each setting under which a pass was made; code that is loaded may be of any."""
    off: str = ""
    """Why the last installation came to nothing, and this process goes on without overlap."""
    original_compile_fx: Any = None
    """Inductor's own entry, once ours stands in its place."""
    listeners: tuple[Listener, ...] = ()
    """Who hears of each operation of `torch.distributed`."""
    listening: Any = None
    """The library of kernels that tell them; there while there are listeners."""
    numbered: WeakSet[Any] = Factory(WeakSet)
    """Captured graphs whose operations have their places. A new job may begin while a graph is
    compiled, between the passes that Inductor runs on it; it must not be numbered again then."""


@define(kw_only=True)
class Session:
    """The state of this process; there is one, `session`."""

    learned: Learned = Factory(Learned)
    kept: Kept = Factory(Kept)
    lock: threading.RLock = field(factory=threading.RLock, repr=False)
    """For moments: while something changes or is looked through."""
    job_lock: threading.RLock = field(factory=threading.RLock, repr=False)
    """While a job begins, which asks its store. Taken before `lock`, never after it."""

    def reset(self) -> None:
        """Forget all that was learned, as a new process would start; what is kept stays."""
        with self.lock:
            self.learned = Learned()


session = Session()
