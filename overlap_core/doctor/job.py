"""In a job: every rank says what it knows, rank 0 judges, and all end with one exit status.

Everything goes through the job's key-value store, by polling with a deadline. Only when all ranks
have answered do they form a gloo group; no collective is called.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import field, frozen

from overlap_core._clock import REAL_CLOCK, Clock
from overlap_core.report import ranks_in_words

from .facts import facts_from_text, facts_to_text, version_in_text
from .findings import Finding
from .place import first_line
from .ranks import check_ranks, compare_versions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store

    from .facts import RankFacts

__all__ = ["Table", "check_job", "end_job", "follow_job"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
_GRACE_S = 5.0
"""How much longer than the time-out a rank waits for one that is bound by the same time-out."""
_FACTS, _GROUP, _FORMED, _STATUS, _READ = "facts", "group", "formed", "status", "read"
_FORM, _LEAVE_OUT = "form", "leave out"
_NO_GLOO = "this torch is built without gloo"


@frozen(kw_only=True)
class Table:
    """Where the ranks of one job put what they have to say."""

    store: Store
    rank: int
    world_size: int
    attempt: str = "0"
    timeout_s: float = 60.0
    """Of each wait, in seconds."""
    clock: Clock = REAL_CLOCK
    _started: float = field(init=False)

    @_started.default
    def _now(self) -> float:
        return self.clock.now()

    @property
    def deadline(self) -> float:
        """When waiting for the ranks to appear ends."""
        return self._started + self.timeout_s

    def say(self, step: str, text: str) -> None:
        """Put down what this rank says at a step."""
        self.store.set(self._key(step, self.rank), text)

    def read(self, step: str, rank: int) -> str:
        """What a rank has said."""
        return bytes(self.store.get(self._key(step, rank))).decode()

    def wait(self, step: str, ranks: Iterable[int], until: float) -> list[int]:
        """Wait for some ranks; returns those that have said nothing when the time is over."""
        missing, pause = list(ranks), _FIRST_PAUSE_S
        while missing := [r for r in missing if not self.store.check([self._key(step, r)])]:
            if self.clock.now() >= until:
                break
            self.clock.sleep(min(pause, max(0.0, until - self.clock.now())))
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return missing

    def _key(self, step: str, rank: int) -> str:
        return f"overlap_core/doctor/{self.attempt}/{step}/{rank}"


def check_job(table: Table, facts: RankFacts) -> tuple[Finding, ...]:
    """On rank 0: what was found on all ranks and between them. `end_job` must follow."""
    try:
        return _check(table, facts)
    except RuntimeError as error:
        return (*check_ranks([facts], table.world_size), _lost(table, error))


def _check(table: Table, facts: RankFacts) -> tuple[Finding, ...]:
    table.say(_FACTS, facts_to_text(facts))
    everybody = range(table.world_size)
    missing = table.wait(_FACTS, everybody, table.deadline)
    said = {rank: table.read(_FACTS, rank) for rank in everybody if rank not in missing}
    versions = {rank: version_in_text(text) for rank, text in said.items()}
    alike = [text for rank, text in said.items() if versions[rank] == facts.overlap_core]
    found = [*check_ranks([facts_from_text(text) for text in alike], table.world_size)]
    found += compare_versions(versions)
    if missing:
        found.append(_missing(table, missing))
    if table.world_size > 1:
        can = not missing and len(alike) == len(said)
        found += _try_group(table, facts, can=can)
    return tuple(found)


def end_job(table: Table, status: int) -> None:
    """On rank 0, after it has printed: let the others end, all with one exit status."""
    with contextlib.suppress(RuntimeError):  # the store is gone, which the others see as well
        table.say(_STATUS, str(status))
        came = [r for r in range(1, table.world_size) if not table.wait(_FACTS, [r], until=0.0)]
        # Where rank 0 hosts the store, the others must have read the status before it is gone.
        table.wait(_READ, came, table.clock.now() + _GRACE_S)


def follow_job(table: Table, facts: RankFacts) -> int | Finding:
    """On every other rank: the exit status, or that rank 0 or the store is missing."""
    try:
        return _follow(table, facts)
    except RuntimeError as error:
        return _lost(table, error)


def _follow(table: Table, facts: RankFacts) -> int | Finding:
    table.say(_FACTS, facts_to_text(facts))
    if table.wait(_FACTS, [0], table.deadline):
        return _missing(table, [0])
    # From here on rank 0 is there, and bound by the same time-outs.
    if table.wait(_GROUP, [0], table.clock.now() + table.timeout_s + _GRACE_S):
        return _missing(table, [0])
    if table.read(_GROUP, 0) == _FORM:
        table.say(_FORMED, _form_group(table, facts))
    if table.wait(_STATUS, [0], table.clock.now() + table.timeout_s + 2 * _GRACE_S):
        return _missing(table, [0])
    status = int(table.read(_STATUS, 0))
    table.say(_READ, "")
    return status


def _lost(table: Table, error: RuntimeError) -> Finding:
    return Finding(
        kind="store-unreachable",
        what=f"rank {table.rank} lost the job's store: {first_line(error)}",
        do="look at the process that hosts it: rank 0, or torchrun on the first node",
    )


def _missing(table: Table, ranks: list[int]) -> Finding:
    return Finding(
        kind="ranks-missing",
        what=f"{ranks_in_words(ranks)} of {table.world_size} did not answer within "
        f"{table.timeout_s:g} s",
        do="look whether they were started, and on which machine; raise --timeout if they start "
        "slowly",
    )


def _try_group(table: Table, facts: RankFacts, *, can: bool) -> list[Finding]:
    """On rank 0: whether all ranks can form a gloo group."""
    table.say(_GROUP, _FORM if can else _LEAVE_OUT)
    if not can:
        return []
    table.say(_FORMED, _form_group(table, facts))
    everybody = range(table.world_size)
    until = table.clock.now() + table.timeout_s + _GRACE_S
    missing = table.wait(_FORMED, everybody, until)
    if missing:
        return [_missing(table, missing)]
    faults = {rank: fault for rank in everybody if (fault := table.read(_FORMED, rank))}
    if not faults:
        return [Finding(kind="gloo-group", what=f"{table.world_size} ranks form a gloo group")]
    first, fault = next(iter(faults.items()))
    if _NO_GLOO in faults.values():
        without = [rank for rank, words in faults.items() if words == _NO_GLOO]
        what = f"{_NO_GLOO} ({ranks_in_words(without)}), so no group was tried"
        return [Finding(kind="gloo-missing", what=what)]
    return [
        Finding(
            kind="gloo-group-failed",
            what=f"{ranks_in_words(faults)} cannot form a gloo group; rank {first}: {fault}",
            do="set GLOO_SOCKET_IFNAME to the interface by which the ranks reach each other",
        )
    ]


def _form_group(table: Table, facts: RankFacts) -> str:
    """Form a gloo group of all ranks and leave it; returns what went wrong."""
    if "gloo" not in facts.backends:
        return _NO_GLOO
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"overlap_core/doctor/{table.attempt}/gloo", table.store),
            rank=table.rank,
            world_size=table.world_size,
            timeout=timedelta(seconds=table.timeout_s),
        )
        dist.destroy_process_group()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return ""
