"""The child's side of a rank: one task after another, each under a process group of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from overlap_core.testing.leaks import ProcessState

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from multiprocessing.connection import Connection

SEED = 0
"""Of torch's generators, before each task."""


@attrs.frozen(kw_only=True)
class RankPlace:
    """What stays the same as long as a rank lives."""

    rank: int
    world_size: int
    port: int
    """Of the parent's store on the loopback device."""
    stack_file: str
    stays: bool
    """Whether more than one task may come."""


@attrs.frozen(kw_only=True)
class RankTask:
    """What one rank has to do. ``args`` stays pickled until the function's module is loaded."""

    number: int
    """Keeps the keys of this task in the store apart from those of the others."""
    module: str
    file: str | None
    function: str
    args: bytes
    timeout: timedelta
    plan_dir: str


def rank_main(place: RankPlace, connection: Connection) -> None:
    """Run the tasks that the parent sends until it sends None or is gone.

    Answers a task with ``("ok", result)`` or ``("error", traceback)``, waits until the parent says
    that all ranks have answered (until then peers may need this rank's sockets), becomes as a new
    process is, and answers ``("ready", "")``.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()  # so that the parent can kill all that this rank starts
    _leave_with_parent()
    torch.set_num_threads(1)
    status = 0
    with (
        Path(place.stack_file).open("w") as stack_file,
        contextlib.suppress(EOFError, OSError),  # the parent is gone
    ):
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        if place.stays:  # load now what has settings, so that they can be set back
            import overlap_core.inductor.fresh  # noqa: F401
        while (task := connection.recv()) is not None:
            before = ProcessState.now()
            answer = _attempt("ok", _run, place, task)
            connection.send(answer)
            status = int(answer[0] == "error")
            if connection.recv() is None:
                break
            connection.send(_attempt("ready", _make_fresh, before))
    if status == 0:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that a failed collective left behind must not keep the process.
    os._exit(status)


def _attempt(outcome: str, function: Callable[..., Any], *args: Any) -> tuple[str, bytes]:
    try:
        return outcome, pickle.dumps(function(*args))
    except BaseException:  # a rank's SystemExit or Ctrl-C is the parent's to report too
        return "error", traceback.format_exc().encode()


def _run(place: RankPlace, task: RankTask) -> Any:
    os.environ["OVERLAP_CORE_PLAN_DIR"] = task.plan_dir
    torch.manual_seed(SEED)
    fn = _load(task)
    args = pickle.loads(task.args)
    store = TCPStore("127.0.0.1", place.port, is_master=False, timeout=task.timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"task{task.number}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=task.timeout,
    )
    return fn(place.rank, place.world_size, *args)


def _make_fresh(before: ProcessState) -> None:
    """Forget what the task left: groups, the pass and what it knows, Dynamo's caches, settings."""
    from overlap_core.inductor.fresh import reset_process

    if dist.is_initialized():
        dist.destroy_process_group()
    reset_process()
    before.restore()
    gc.collect()


def _load(task: RankTask) -> Callable[..., Any]:
    """The function, by its module's name or, for a test file that is on no path, from its file."""
    module = sys.modules.get(task.module)
    if module is None:
        try:
            module = importlib.import_module(task.module)
        except ModuleNotFoundError:
            if task.file is None:
                raise
            spec = importlib.util.spec_from_file_location(task.module, task.file)
            if spec is None or spec.loader is None:
                raise
            module = importlib.util.module_from_spec(spec)
            sys.modules[task.module] = module  # pickled arguments may name it
            spec.loader.exec_module(module)
    fn: Callable[..., Any] = getattr(module, task.function)
    return fn


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()
