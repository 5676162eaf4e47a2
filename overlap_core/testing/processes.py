"""Runs a function on several real ranks: one spawned process each, joined by gloo.

Nothing outlives the call: each rank leads a process group of its own (so compilers that it starts
die with it), is killed at the deadline, and ends itself when the parent is gone.
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
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch.distributed import TCPStore

from overlap_core.errors import OverlapError
from overlap_core.testing._rank_process import RankTask, rank_main

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from multiprocessing.process import BaseProcess

_ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes
}
_FAILURE_GRACE_S = 3.0  # how long the other ranks may take to report, once one has failed
_EXIT_GRACE_S = 10.0
_START_LOCK = threading.Lock()


class RankFailure(OverlapError):  # noqa: N818  # a report of what happened elsewhere
    """A rank raised, died or was late; the message holds every rank's traceback or last state."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float,
    pg_timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    tries: int = 1,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` new processes; return their results.

    Each rank has one thread for compute and an initialized gloo process group.

    Args:
        fn: a module-level function.
        args: picklable.
        deadline_s: for everything, from the start of the first process.
        pg_timeout_s: of the process group; never longer than ``deadline_s``.
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
    if "." in fn.__qualname__:  # also "<locals>" and lambdas in functions
        raise TypeError(f"run_ranks needs a module-level function, not {fn.__qualname__}")
    for left in range(tries - 1, -1, -1):
        ranks, message = _run_once(fn, world_size, args, deadline_s, pg_timeout_s, env, may_die)
        if not message:
            return [pickle.loads(rank.payload) for rank in ranks]
        if not left or not _is_memory_fault(ranks):
            raise RankFailure(message)
        print(
            f"starting {world_size} ranks of {fn.__name__} anew after a memory fault",
            file=sys.stderr,
        )
    raise ValueError(f"tries={tries}: expected at least 1")


_MEMORY_FAULTS = tuple(
    f"exit code -{number:d}".encode() for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
)


def _is_memory_fault(ranks: list[_Rank]) -> bool:
    """Whether a rank died of a memory fault; what others raised is a consequence of that."""
    died = [rank.payload for rank in ranks if rank.outcome == "died"]
    return bool(died) and all(payload in _MEMORY_FAULTS for payload in died)


def _run_once(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    deadline_s: float,
    pg_timeout_s: float,
    env: Mapping[str, str] | None,
    may_die: Collection[int],
) -> tuple[list[_Rank], str]:
    """One try: the ranks, all ended, and what went wrong if anything did."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-ranks-")))
        # The parent binds port 0 and keeps the store: no race for a port, no rank is special.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        deadline = time.monotonic() + deadline_s
        # Every call is a job of its own: nothing that an earlier one agreed on counts.
        own = {**_ENV, **_loopback(), "OVERLAP_CORE_PLAN_DIR": str(folder / "plans")}
        with _START_LOCK, _environment({**own, **(env or {})}):
            for rank in range(world_size):
                task = RankTask(
                    module=fn.__module__,
                    file=getattr(sys.modules[fn.__module__], "__file__", None),
                    function=fn.__qualname__,
                    args=pickle.dumps(args),
                    rank=rank,
                    world_size=world_size,
                    port=store.port,
                    timeout=timedelta(seconds=min(pg_timeout_s, deadline_s)),
                    stack_file=str(folder / f"stack{rank}"),
                )
                ranks.append(_start(task))
        _collect(ranks, deadline, may_die)
        if any(rank.outcome != "ok" for rank in ranks):
            return list(ranks), _failure_message(fn, ranks, deadline_s)
        return list(ranks), ""


@attrs.define(kw_only=True)
class _Rank:
    """The parent's view of one rank."""

    task: RankTask
    process: BaseProcess
    connection: Connection
    outcome: str | None = None  # "ok", "error", "died", "late"
    payload: bytes = b""


def _start(task: RankTask) -> _Rank:
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(
        target=rank_main, args=(task, child_end), name=f"rank{task.rank}", daemon=True
    )
    process.start()
    child_end.close()
    return _Rank(task=task, process=process, connection=parent_end)


def _collect(ranks: list[_Rank], deadline: float, may_die: Collection[int]) -> None:
    """Wait until every rank has an outcome; the first failure brings the deadline forward."""
    while waiting := [rank for rank in ranks if rank.outcome is None]:
        ready = wait([rank.connection for rank in waiting], max(0.0, deadline - time.monotonic()))
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
                if rank.task.rank in may_die:
                    rank.outcome, rank.payload = "ok", pickle.dumps(None)
            if rank.outcome != "ok":
                deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_S)


def _stack_of(rank: _Rank) -> bytes:
    """Ask a silent rank where it is: its faulthandler answers even inside a blocked C++ call."""
    path = Path(rank.task.stack_file)
    if not path.exists() or rank.process.pid is None or not rank.process.is_alive():
        return b"(had not started)"
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        text = path.read_bytes()
        if text:
            time.sleep(0.05)  # the rest of the dump
            return path.read_bytes()
    return b"(no answer)"


def _end(ranks: list[_Rank]) -> None:
    """Let ranks that are done leave, kill the others with all they started, and reap them."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.connection.send("leave")
    until = time.monotonic() + _EXIT_GRACE_S
    for rank in ranks:
        if rank.outcome == "ok":
            rank.process.join(max(0.0, until - time.monotonic()))
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


def _failure_message(fn: Callable[..., Any], ranks: list[_Rank], deadline_s: float) -> str:
    words = {
        "ok": "finished",
        "error": "raised",
        "died": "died",
        "late": f"gave no result before another's failure or the deadline of {deadline_s:g} s; at:",
    }
    parts = [f"{fn.__module__}.{fn.__qualname__} failed on {len(ranks)} ranks"]
    for rank in ranks:
        detail = "" if rank.outcome == "ok" else rank.payload.decode(errors="replace").rstrip()
        parts.append(
            f"--- rank {rank.task.rank} {words[rank.outcome or 'late']}\n{detail}".rstrip()
        )
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
