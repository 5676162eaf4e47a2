"""The child's side of ``run_ranks``."""

from __future__ import annotations

import contextlib
import faulthandler
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
from torch.distributed import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from multiprocessing.connection import Connection


@attrs.frozen(kw_only=True)
class RankTask:
    """What one rank has to do. ``args`` stays pickled until the function's module is loaded."""

    module: str
    file: str | None
    function: str
    args: bytes
    rank: int
    world_size: int
    port: int
    timeout: timedelta
    stack_file: str


def rank_main(task: RankTask, connection: Connection) -> None:
    """Run the task, send ``(outcome, payload)``, and stay until the parent says to leave.

    Staying keeps this rank's sockets open until every peer is done with them.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()  # so that the parent can kill all that this rank starts
    _leave_with_parent()
    with Path(task.stack_file).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        try:
            message = ("ok", pickle.dumps(_run(task)))
        except BaseException:  # a rank's SystemExit or Ctrl-C is the parent's to report too
            message = ("error", traceback.format_exc().encode())
        connection.send(message)
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
        if message[0] == "ok":
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads that a failed collective left behind must not keep the process.
        os._exit(0 if message[0] == "ok" else 1)


def _run(task: RankTask) -> Any:
    torch.set_num_threads(1)
    fn = _load(task)
    args = pickle.loads(task.args)
    store = TCPStore("127.0.0.1", task.port, is_master=False, timeout=task.timeout)
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=task.timeout
    )
    return fn(task.rank, task.world_size, *args)


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
