"""Runs functions on several real ranks: one spawned process each, joined by gloo.

`run_ranks` starts new processes for one call. A `RankPool` keeps them for the next call, which
then finds torch imported and Inductor warm.

Nothing outlives a call or a pool: each rank leads a process group of its own (so compilers that
it starts die with it), is killed at the deadline, and ends itself when the parent is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from torch.distributed import TCPStore

from overlap_core.errors import OverlapError
from overlap_core.testing._rank_process import RankPlace, RankTask, rank_main

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from multiprocessing.process import BaseProcess
    from types import TracebackType

_ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes
}
_FAILURE_GRACE_S = 5.0  # how long the other ranks may take to report, once one has failed
_FRESH_S = 60.0  # how long ranks may take to become as new processes are
_EXIT_GRACE_S = 60.0
_LOOK_S = 1.0  # how often the clock is looked at
_STACK_S = 20.0  # how long a silent rank may take to say where it is
_START_LOCK = threading.Lock()


class RankFailure(OverlapError):  # noqa: N818  # a report of what happened elsewhere
    """A rank raised, died or was late; the message holds every rank's traceback or last state."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float,
    pg_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    tries: int = 1,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` new processes; return their results.

    Each rank has one thread for compute, an initialized gloo process group, and torch's generators
    seeded alike.

    Args:
        fn: a module-level function.
        args: picklable.
        deadline_s: for everything, from the start of the first process.
        pg_timeout_s: of the process group; None, and at most, ``deadline_s``.
        env: environment variables, set before torch is imported.
        tries: start anew, so many times in all, if ranks were killed by a memory fault (SIGABRT,
            SIGBUS, SIGSEGV). On the CPU, torch 2.13's gloo sometimes corrupts memory while several
            functional all-gathers are in flight, in plain eager code as well.
        may_die: ranks that may end without a result, which is None then.

    Returns:
        What ``fn`` returned (anything that pickles), by rank.

    Raises:
        RankFailure: a rank raised or died, or the deadline passed. All ranks are dead by then.
        TypeError: ``fn`` is not a module-level function.
    """
    pool = RankPool(world_size, env=env)
    pool._stays = False
    with pool:
        return pool._run(fn, args, deadline_s, pg_timeout_s, tries, may_die)


class RunRanks(Protocol):
    """What calls a function on ranks; the fixtures `gloo_ranks` and `pooled_ranks` are such."""

    def __call__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        /,
        *args: Any,
        deadline_s: float = ...,
        pg_timeout_s: float | None = ...,
        tries: int = ...,
    ) -> list[Any]:
        """As `run_ranks`."""


class RankPool:
    """Ranks that stay alive from one call of `run` to the next.

    Each call is a job of its own: it has a process group and keys in the store of its own, and
    finds overlap_core, Dynamo, torch's configuration, generators and the environment as in new
    processes. What cannot be undone stays: imported modules, defined and registered ops.

    Ranks start with the first call. If one raises, dies or is late, all are ended and that call
    fails; the next one starts new ranks.

    Args:
        world_size: number of ranks.
        env: environment variables, set before torch is imported.
    """

    def __init__(self, world_size: int, *, env: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._env = dict(env or {})
        self._calls = 0
        self._stays = True
        self._ranks: list[_Rank] = []
        self._resources = contextlib.ExitStack()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline_s: float,
        pg_timeout_s: float | None = None,
        tries: int = 1,
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on every rank; arguments, results and errors are
        those of `run_ranks`.
        """
        return self._run(fn, args, deadline_s, pg_timeout_s, tries)

    def close(self) -> None:
        """End all ranks. A later call of `run` starts new ones."""
        self._resources.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        deadline_s: float,
        pg_timeout_s: float | None,
        tries: int,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        if "." in fn.__qualname__:  # also "<locals>" and lambdas in functions
            raise TypeError(f"run_ranks needs a module-level function, not {fn.__qualname__}")
        if tries < 1:
            raise ValueError(f"tries={tries}: expected at least 1")
        while True:
            deadline = monotonic() + deadline_s
            self._start()
            self._send(fn, args, min(pg_timeout_s or deadline_s, deadline_s))
            _collect(self._ranks, deadline, may_die)
            payloads = [rank.payload for rank in self._ranks]
            if all(rank.is_done for rank in self._ranks) and self._make_fresh():
                return [pickle.loads(payload) for payload in payloads]
            message = _failure_message(fn, self._ranks, deadline_s)
            is_memory_fault = _is_memory_fault(self._ranks)
            self.close()
            tries -= 1
            if not tries or not is_memory_fault:
                raise RankFailure(message)
            print(
                f"starting {self.world_size} ranks of {fn.__name__} anew after a memory fault",
                file=sys.stderr,
            )

    def _start(self) -> None:
        """Start ranks, unless all are there."""
        if self._ranks and all(rank.process.is_alive() for rank in self._ranks):
            return
        self.close()
        folder = tempfile.TemporaryDirectory(prefix="overlap-ranks-")
        self._folder = Path(self._resources.enter_context(folder))
        # The parent binds port 0 and keeps the store: no race for a port, no rank is special.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._resources.callback(_end, self._ranks)
        with _START_LOCK, _environment({**_ENV, **_loopback(), **self._env}):
            for rank in range(self.world_size):
                place = RankPlace(
                    rank=rank,
                    world_size=self.world_size,
                    port=self._store.port,
                    stack_file=str(self._folder / f"stack{rank}"),
                    stays=self._stays,
                )
                self._ranks.append(_start(place))

    def _send(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
        self._calls += 1
        task = RankTask(
            number=self._calls,
            module=fn.__module__,
            file=getattr(sys.modules[fn.__module__], "__file__", None),
            function=fn.__qualname__,
            args=pickle.dumps(args),
            timeout=timedelta(seconds=timeout_s),
            # Nothing that an earlier call agreed on counts.
            plan_dir=str(self._folder / f"plans{self._calls}"),
        )
        for rank in self._ranks:
            rank.expect()
            with contextlib.suppress(OSError):  # it has died; `_collect` will see that
                rank.connection.send(task)

    def _make_fresh(self) -> bool:
        """Have ranks that stay forget the call; False if one of them could not."""
        if not self._stays:
            return True
        for rank in self._ranks:
            rank.expect()
            with contextlib.suppress(OSError):
                rank.connection.send("all have answered")
        _collect(self._ranks, monotonic() + _FRESH_S)
        return all(rank.is_done for rank in self._ranks)


_MEMORY_FAULTS = tuple(
    f"exit code -{number:d}".encode() for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
)


def _is_memory_fault(ranks: list[_Rank]) -> bool:
    """Whether a rank died of a memory fault; what others raised is a consequence of that."""
    died = [rank.payload for rank in ranks if rank.outcome == "died"]
    return bool(died) and all(payload in _MEMORY_FAULTS for payload in died)


@attrs.define(kw_only=True)
class _Rank:
    """The parent's view of one rank."""

    place: RankPlace
    process: BaseProcess
    connection: Connection
    outcome: str | None = None  # "ok", "ready", "error", "died", "late"
    payload: bytes = b""

    @property
    def is_done(self) -> bool:
        return self.outcome in ("ok", "ready")

    def expect(self) -> None:
        """Forget the last answer; another one is to come."""
        self.outcome, self.payload = None, b""


def _start(place: RankPlace) -> _Rank:
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(
        target=rank_main, args=(place, child_end), name=f"rank{place.rank}", daemon=True
    )
    process.start()
    child_end.close()
    return _Rank(place=place, process=process, connection=parent_end)


def _collect(ranks: list[_Rank], deadline: float, may_die: Collection[int] = ()) -> None:
    """Wait until every rank has an outcome; the first failure brings the deadline forward."""
    while waiting := [rank for rank in ranks if rank.outcome is None]:
        left = deadline - monotonic()
        ready = wait([rank.connection for rank in waiting], min(max(0.0, left), _LOOK_S))
        if not ready and left > 0:
            continue
        if not ready:
            for rank in waiting:
                rank.outcome, rank.payload = "late", _stack_of(rank)
            return
        for rank in waiting:
            if rank.connection not in ready:
                continue
            try:
                rank.outcome, rank.payload = rank.connection.recv()
            except (EOFError, ConnectionResetError):
                rank.process.join(1.0)
                rank.outcome = "died"
                rank.payload = f"exit code {rank.process.exitcode}".encode()
                if rank.place.rank in may_die:
                    rank.outcome, rank.payload = "ok", pickle.dumps(None)
            if not rank.is_done:
                deadline = min(deadline, monotonic() + _FAILURE_GRACE_S)


def _stack_of(rank: _Rank) -> bytes:
    """Ask a silent rank where it is: its faulthandler answers even inside a blocked C++ call."""
    path = Path(rank.place.stack_file)
    if not path.exists() or rank.process.pid is None or not rank.process.is_alive():
        return b"(had not started)"
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR1)
    until = monotonic() + _STACK_S
    while monotonic() < until:
        sleep(0.05)
        text = path.read_bytes()
        if text:
            sleep(0.05)  # the rest of the dump
            return path.read_bytes()
    return b"(no answer)"


def _end(ranks: list[_Rank]) -> None:
    """Let ranks that are done leave, kill the others with all they started, and reap them."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.connection.send(None)  # leave
    until = monotonic() + _EXIT_GRACE_S
    for rank in ranks:
        if rank.is_done:
            rank.process.join(max(0.0, until - monotonic()))
        pid = rank.process.pid
        if pid is not None:
            # Also after an orderly end: what the rank started is in its process group still.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.connection.close()
        rank.process.close()
    ranks.clear()


def _failure_message(fn: Callable[..., Any], ranks: list[_Rank], deadline_s: float) -> str:
    words = {
        "ok": "finished",
        "ready": "finished",
        "error": "raised",
        "died": "died",
        "late": f"gave no result before another's failure or the deadline of {deadline_s:g} s; at:",
    }
    parts = [f"{fn.__module__}.{fn.__qualname__} failed on {len(ranks)} ranks"]
    for rank in ranks:
        detail = "" if rank.is_done else rank.payload.decode(errors="replace").rstrip()
        what = words[rank.outcome or "late"]
        parts.append(f"--- rank {rank.place.rank} {what}\n{detail}".rstrip())
    return "\n".join(parts)


def _loopback() -> dict[str, str]:
    """Keep gloo on the loopback device: a host name need not resolve."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not sys.platform.startswith("linux"):
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo"}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while children start (they inherit them before any import), then restore."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
