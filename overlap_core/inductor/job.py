"""What this process knows of the job: its agreements, and under which names its ranks meet."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from attrs import define, field, frozen

from overlap_core.following import peer_skeleton_of
from overlap_core.ranks import GraphKey
from overlap_core.ranks.notices import find_off, say_off
from overlap_core.session import session

from .groups import default_store, is_fake_world, rank_and_world_size
from .identity import code_of
from .warm_start import Agreements, setting_of

if TYPE_CHECKING:
    from overlap_core.config import OverlapConfig
    from overlap_core.host import PluginHost
    from overlap_core.ranks.store import KeyValueStore
    from overlap_core.views import RankView

__all__ = ["Job", "Meeting", "current_job", "forget_other_job", "is_in_force", "key_of"]


@frozen(kw_only=True)
class Meeting:
    """Where ranks negotiate about one graph."""

    name: str
    """Unique for the job's store, equal on all ranks that come for the same graph."""
    again: bool
    """This function was negotiated before; peers may never come."""


@define
class Job:
    """One initialization of torch.distributed, since the last `Session.reset`."""

    store: KeyValueStore
    rank: int
    world_size: int
    number: int = 1
    """How many there were on this store, so that what an earlier one left there is not met."""
    _lock: threading.RLock = field(factory=threading.RLock)
    _agreements: dict[str, Agreements] = field(factory=dict)
    _settings: dict[str, list[str]] = field(factory=dict)
    _met: dict[str, int] = field(factory=dict)
    _attended: WeakSet[Any] = field(factory=WeakSet)
    """Graphs for which this rank was at a meeting."""
    _off: str = ""
    """What peers were told last."""

    @property
    def is_off(self) -> bool:
        """Whether peers were told that this rank goes on without overlap."""
        return bool(self._off)

    def say_off(self, why: str) -> None:
        """Tell all peers why this rank goes on without overlap; empty: it overlaps again."""
        with self._lock:
            if why != self._off:
                say_off(self.store, self.number, self.rank, why)
                self._off = why

    def _anybody_is_off(self) -> bool:
        return bool(find_off(self.store, self.number, range(self.world_size)))

    def agreements(self, config: OverlapConfig, host: PluginHost) -> Agreements:
        """Those made under one configuration. The first call asks all ranks how they start."""
        setting = setting_of(config, host)
        with self._lock:
            if setting not in self._agreements:
                self._agreements[setting] = Agreements(
                    None if self.world_size == 1 else self.store,
                    self.rank,
                    self.world_size,
                    setting,
                    config,
                    self.number,
                    host.source_files(),
                    place=len(self._agreements),
                    in_vain=self._anybody_is_off,
                )
            return self._agreements[setting]

    def has_moved(self, code: str | None) -> bool:
        """Whether an agreement on a function, from `code_of`, or on any, has moved something."""
        with self._lock:
            books = [agreements.book for agreements in self._agreements.values()]
        return any(agreed.moved for book in books for agreed in book.of(code))

    def goes_by(self, plan: str) -> bool:
        """Whether a plan is one that something was compiled under, or could be."""
        with session.lock:
            made = list(session.kept.made.values())
        with self._lock:
            if any(agreements.plan == plan for agreements in self._agreements.values()):
                return True
        return any(self.agreements(one.config, one.host).plan == plan for one in made)

    def meeting(
        self, view: RankView, identity: str, key: GraphKey | None, *, counts: bool = True
    ) -> Meeting:
        """Where to meet for a graph without an agreement.

        The first graph of a function meets whatever it looks like, so that ranks hear of their
        differences. A later one meets those that look like it: a rank that compiles alone then
        leaves no trace where all ranks meet next.

        Args:
            view: this rank's graph.
            identity: which function it is, from `identify`.
            key: of the graph, from `key_of`.
            counts: False for a graph that only tells peers not to wait for it.
        """
        structure = "none" if key is None else key.structure[:32]
        return self._meet(setting_of(view.config, view.host), identity, structure, counts=counts)

    def attend(self, graph: Any) -> None:
        """Remember that this rank is at its meeting for a graph."""
        self._attended.add(graph)

    def missed_meeting(
        self, graph: Any, identity: str, setting: str, *, counts: bool
    ) -> Meeting | None:
        """Where peers wait for this rank, which failed before it came; None: nowhere, or unknown.

        Args:
            graph: which failed.
            identity: which function it is.
            setting: from `setting_of`.
            counts: as for `meeting`.
        """
        with self._lock:
            books = [agreements.book for agreements in self._agreements.values()]
            # Where the ranks have agreed on something, peers may follow it, and meet nobody.
            if graph in self._attended or any(book.of(code_of(identity)) for book in books):
                return None
            return self._meet(setting, identity, "none", counts=counts)

    def _meet(self, setting: str, identity: str, structure: str, *, counts: bool) -> Meeting:
        with self._lock:
            # Ranks whose configurations differ must meet, and say so: only the number counts.
            known = self._settings.setdefault(identity, [])
            if setting not in known:
                known.append(setting)
            name = f"{identity}/{known.index(setting)}"
            again = name in self._met
            if again:
                name = f"{name}/{structure}"
            number = self._met.get(name, 0)
            if counts:
                self._met[name] = number + 1
        return Meeting(name=f"{self.number}/{name}/{number}", again=again)


def key_of(view: RankView, identity: str) -> GraphKey | None:
    """The key of a graph's agreement; None for a graph that could not be looked at."""
    if view.skeleton is None:
        return None
    noticed, _ = peer_skeleton_of(view.graph, view.skeleton)
    return GraphKey(
        code=code_of(identity),
        structure=noticed.digest(),
        groups=hashlib.sha256(json.dumps(noticed.groups).encode()).hexdigest(),
    )


def is_in_force(plan: str) -> bool:
    """Whether the ranks of this job go by a plan; where there are no ranks, any is.

    Asks all ranks how they start, if nothing was compiled yet.
    """
    job = current_job()
    return job is None or job.world_size == 1 or job.goes_by(plan)


def current_job() -> Job | None:
    """The job of the process groups that are initialized now; None: there are none."""
    world = rank_and_world_size()
    if world is None or is_fake_world():
        return None
    with session.job_lock:
        forget_other_job()
        job = session.learned.job
        if job is None:
            store = default_store()
            rank, world_size = world
            number = store.add(f"overlap_core/jobs/{rank}", 1)
            job = session.learned.job = Job(store, rank, world_size, number)
        return job


def forget_other_job() -> None:
    """Start a new session if the process groups are others than the last job's.

    Ranks of a new job may come from different ones, and must start alike. Called before anything
    is learned from a graph; asks nobody. What was learned before the first job stays.
    """
    if rank_and_world_size() is None or is_fake_world():
        return
    with session.job_lock:
        job = session.learned.job
        if job is not None and job.store is not default_store():
            session.reset()
