"""Negotiation over a key-value store that all ranks reach, such as torch's rendezvous store.

Nothing here blocks inside the store: waiting is polling, so that other threads of the process
which use the same store connection go on, and every wait ends at the deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from typing import Protocol as TypingProtocol

from overlap_core._clock import REAL_CLOCK, Clock
from overlap_core.errors import DeadlineError

from .negotiation import DIGEST, Decide
from .notices import find_off, in_one_line, name_ranks, off_in_words
from .scope_messages import ScopeFound, ScopeSaid, why_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .negotiation import Protocol, Share

__all__ = ["KeyValueStore", "StoreExchange"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_PROGRESS_AFTER_S = 10.0
_DECIDE_PAUSES_S = (0.1, 1.0, 3.0)
"""Before a decision is asked for once more, if the store cannot be reached."""
_FEW = 64
"""Up to so many ranks are looked at one by one; the more there are, the less often."""
_SELDOM = 10
_SCOPE = "scope"
_NO_REASON = "1"
"""In place of the reason of a rank that left."""
_WAITING = "overlap_core/waiting"
"""Where each rank says in which meeting it waits."""


class KeyValueStore(TypingProtocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class StoreExchange:
    """One negotiation of one rank. All waits together end at one deadline.

    Args:
        store: shared by all ranks of the job.
        rank: this rank, as in the group that spans the job.
        identity: which graph this negotiation is about; equal on all ranks.
        deadline_s: seconds from now until waiting ends.
        clock: tells the time and waits.
        job: its number on this store, under which ranks say that they go on without overlap.
        software: what this rank runs, versions by name; ranks that run others don't negotiate.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        identity: str,
        deadline_s: float,
        clock: Clock = REAL_CLOCK,
        *,
        job: int = 1,
        software: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._job = job
        self._software = dict(software or {})
        self._prefix = f"overlap_core/{identity}"
        self._clock = clock
        self._started = clock.now()
        self._deadline_s = deadline_s
        self._announced = False
        self._missed = ""
        """For whom this rank waited in vain."""
        self._left = False
        self._waiting = 0
        """How often this rank has said that it waits."""
        self._seen_waiting: dict[int, str] = {}

    def find_scope(
        self,
        groups: Iterable[Sequence[int]],
        seen: Iterable[str] = (),
        gathers: int | None = None,
    ) -> ScopeFound:
        """Publish the groups of this rank's graph and follow those of its peers.

        Args:
            groups: ranks of each group that the graph communicates on.
            seen: ops of the graph that were seen to communicate without being declared.
            gathers: number of its weight gathers; None: unknown.

        Raises:
            DeadlineError: a rank of the scope did not publish in time.
        """
        mine = self.publish_scope(groups, seen, gathers)
        guess = sorted({self._rank, *(rank for ranks in mine.groups for rank in ranks)})
        if self._all_guess(guess, mine):
            return ScopeFound(ranks=tuple(guess), why="", seen=tuple(mine.seen))
        known = {self._rank: mine}
        while True:
            wanted = {rank for said in known.values() for ranks in said.groups for rank in ranks}
            missing = sorted(wanted - known.keys())
            if not missing:
                break
            for rank, payload in self._collect(_SCOPE, missing).items():
                known[rank] = ScopeSaid.decode(payload, self._software)
        return ScopeFound(
            ranks=tuple(sorted(known)),
            why=why_apart(known),
            seen=tuple(sorted({op for said in known.values() for op in said.seen})),
        )

    def _all_guess(self, guess: Sequence[int], mine: ScopeSaid) -> bool:
        """Whether all ranks of a scope find it in their own groups, and say the same of it.

        Mostly so, and then a counter tells. False: what each of them said has to be read.
        """
        said = json.dumps([guess, mine.seen, mine.gathers, self._software]).encode()
        count = f"{self._prefix}/scope/={hashlib.sha256(said).hexdigest()}"
        keys = [self._key(_SCOPE, rank) for rank in guess]
        self._store.add(count, 1)
        looks = itertools.count()

        def done() -> bool:
            if self._store.add(count, 0) == len(guess):
                return True
            # Ranks that said something else never count; to look for all is dear if they are many.
            often = len(guess) <= _FEW or next(looks) % _SELDOM == _SELDOM - 1
            return often and self._store.check(keys)

        self._wait(_SCOPE, guess, done)
        return self._store.add(count, 0) == len(guess)

    def publish_scope(
        self,
        groups: Iterable[Sequence[int]],
        seen: Iterable[str] = (),
        gathers: int | None = None,
        off: str = "",
    ) -> ScopeSaid:
        """Say what `find_scope` says, and wait for nobody.

        A graph without weight gathers says so in this way, and no peer waits for it.

        Args:
            groups, seen, gathers: as for `find_scope`.
            off: why this rank goes on without overlap; empty: it does not.
        """
        said = ScopeSaid(
            groups=sorted({tuple(ranks) for ranks in groups}),
            seen=sorted(seen),
            gathers=gathers,
            off=off,
            software=self._software,
        )
        self._store.set(self._key(_SCOPE, self._rank), said.encode())
        return said

    def run(self, protocol: Protocol[T], scope: tuple[int, ...]) -> T:
        """Drive this rank's side of a negotiation to its end.

        A peer that does not answer in time is told to the protocol as `DeadlineError`, and what the
        store raises as it is; the protocol then asks what was decided.
        """
        request = next(protocol)
        while True:
            try:
                answer = self._answer(request, scope)
            except Exception as error:
                go_on = partial(protocol.throw, error)
            else:
                go_on = partial(protocol.send, answer)
            try:
                request = go_on()
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]

    def _answer(self, request: Share | Decide, scope: tuple[int, ...]) -> tuple[bytes, ...]:
        step = f"{scope[0]}-{scope[-1]}.{len(scope)}/{request.step}"
        if isinstance(request, Decide):
            return (self._decide(step, request.payload),)
        return self._share(step, request.payload, scope)

    def leave(self, why: str = "") -> None:
        """Tell peers that wait for this rank that it won't answer any more. Never raises.

        Args:
            why: what went wrong here. Empty: nothing did, or this rank waited in vain, which it
                then says. The first call's reason stays.
        """
        # If the store is gone, peers meet their deadline, and what is decided stays decided.
        with contextlib.suppress(Exception):
            if not self._left:
                reason = in_one_line(why or self._missed)
                self._store.set(self._key("left", self._rank), reason or _NO_REASON)
                self._left = True
            if self._waiting:
                self._store.set(f"{_WAITING}/{self._rank}", "")

    def _key(self, step: str, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"

    def _share(self, step: str, payload: bytes, scope: tuple[int, ...]) -> tuple[bytes, ...]:
        text = payload.decode()
        self._store.set(self._key(step, self._rank), text)
        if not step.endswith(DIGEST):
            found = self._collect(step, scope)
            return tuple(found[rank] for rank in scope)
        # Most often all say the same. Counters tell, and cost the same in a world of any size.
        same, arrived = f"{self._prefix}/{step}/={text}", f"{self._prefix}/{step}/arrived"
        self._store.add(same, 1)
        self._store.add(arrived, 1)
        self._wait(step, scope, lambda: self._store.add(arrived, 0) >= len(scope))
        if self._store.add(same, 0) == len(scope):
            return (payload,) * len(scope)
        found = self._read(step, scope)
        return tuple(found[rank] for rank in scope)

    def _decide(self, step: str, payload: bytes) -> bytes:
        key = f"{self._prefix}/{step}"
        # Asking again gives what stands, whether an earlier try got through or not.
        for pause_s in _DECIDE_PAUSES_S:
            try:
                return bytes(self._store.compare_set(key, "", payload.decode()))
            except Exception as error:
                logger.warning("rank %d asks again what was decided: %s", self._rank, error)
                self._clock.sleep(pause_s)
        return bytes(self._store.compare_set(key, "", payload.decode()))

    def _collect(self, step: str, ranks: Sequence[int]) -> dict[int, bytes]:
        keys = [self._key(step, rank) for rank in ranks]
        self._wait(step, ranks, lambda: self._store.check(keys))
        return self._read(step, ranks)

    def _read(self, step: str, ranks: Sequence[int]) -> dict[int, bytes]:
        return {rank: bytes(self._store.get(self._key(step, rank))) for rank in ranks}

    def _wait(self, step: str, ranks: Sequence[int], done: Callable[[], bool]) -> None:
        """Poll until `done`; `ranks` are those that have to say something at this step."""
        pause = _FIRST_PAUSE_S
        looked_for_leavers = 0.0
        while not done():
            waited = self._clock.now() - self._started
            if waited - looked_for_leavers > 1 or waited > self._deadline_s:
                looked_for_leavers = waited
                self._waiting += 1
                self._store.set(f"{_WAITING}/{self._rank}", f"{self._waiting} {self._prefix}")
                self._look_for_missing(step, ranks, waited)
                if waited > self._deadline_s and not done():
                    raise self._give_up(f"a rank was lost in the middle of step {step!r}")
            self._clock.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S * max(1.0, len(ranks) / _FEW))

    def _look_for_missing(self, step: str, ranks: Sequence[int], waited: float) -> None:
        """Who did not answer yet: told, or given up if they left or the deadline has passed."""
        # Who answered and then left is not missing: look for answers after leavers.
        gone = [rank for rank in ranks if self._store.check([self._key("left", rank)])]
        missing = [rank for rank in ranks if not self._store.check([self._key(step, rank)])]
        # Whoever came to the meeting takes part in it, whatever it said before.
        off = find_off(self._store, self._job, missing) if step == _SCOPE and missing else {}
        if off:
            raise self._give_up(off_in_words(off))
        left = [rank for rank in gone if rank in missing]
        if left:
            raise self._give_up(f"{name_ranks(left)} gave up on step {step!r}{self._why(left)}")
        if missing and waited > self._deadline_s:
            raise self._give_up(
                f"{name_ranks(missing)} did not reach step {step!r} within "
                f"{self._deadline_s:g} s; see deadline_s in OverlapConfig"
            )
        elsewhere = self._who_waits_elsewhere(missing) if waited > _PROGRESS_AFTER_S else ""
        if elsewhere:
            raise self._give_up(elsewhere)
        if missing and waited > _PROGRESS_AFTER_S and not self._announced:
            self._announced = True
            logger.warning(
                "rank %d waits for %s at step %r, at most %.0f s more",
                self._rank,
                name_ranks(missing),
                step,
                self._deadline_s - waited,
            )

    def _why(self, left: Sequence[int]) -> str:
        """The first reason that one of these ranks gave, in brackets; empty: they gave none."""
        for rank in left:
            why = bytes(self._store.get(self._key("left", rank))).decode()
            if why != _NO_REASON:
                return f" ({why})" if len(left) == 1 else f" (rank {rank}: {why})"
        return ""

    def _give_up(self, why: str) -> DeadlineError:
        """The error to raise; peers that come later hear of it."""
        self._missed = why
        return DeadlineError(why)

    def _who_waits_elsewhere(self, missing: Sequence[int]) -> str:
        """Whether all missing ranks wait in other meetings, so that none of them will come.

        A rank that doesn't wait may be on its way; giving up early is always safe. Who waits says
        so anew every second: a word that stays the same is of a rank that is gone.
        """
        meetings = {}
        for rank in missing:
            key = f"{_WAITING}/{rank}"
            word = bytes(self._store.get(key)).decode() if self._store.check([key]) else ""
            before, self._seen_waiting[rank] = self._seen_waiting.get(rank), word
            place = word.partition(" ")[2]
            if before in (None, word) or place in ("", self._prefix):
                return ""
            meetings[rank] = place.removeprefix("overlap_core/")
        if not meetings:
            return ""
        rank, place = next(iter(meetings.items()))
        here = self._prefix.removeprefix("overlap_core/")
        return (
            f"{name_ranks(list(meetings))} will not come: rank {rank} waits for others at "
            f"{place!r}, rank {self._rank} at {here!r}"
        )
