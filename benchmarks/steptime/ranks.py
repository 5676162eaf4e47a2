"""Starting ranks, agreeing on failures, and never hanging.

Agreement goes through the store and a gloo group of its own, never over the communicators that are
measured.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .progress import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Control", "PeerFailedError", "first_line", "gated_compiles", "join", "launch"]

_STORE_PORT = "STEP_TIME_STORE_PORT"
_POLL_S = 0.02


class PeerFailedError(RuntimeError):
    """Another rank could not compile, so this one must not run what it compiled."""


def first_line(error: BaseException) -> str:
    """Type and first non-empty line of an error; of what a compiler's error wraps."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


# --- starting --------------------------------------------------------------------------------


def launch(script: str, arguments: Sequence[str], n_ranks: int, deadline_s: float) -> int:
    """Run the script once a rank on this machine; its exit status is that of the worst rank.

    The store lives here, so it outlives any rank. When one rank fails, the others get ten seconds.
    """
    with contextlib.ExitStack() as stack:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = []
        for rank in range(n_ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n_ranks),
                _STORE_PORT: str(store.port),
            }
            process = subprocess.Popen([sys.executable, script, *arguments], env=environment)
            stack.callback(_end, process)
            ranks.append(process)
        until = time.monotonic() + deadline_s + 30
        while any(process.poll() is None for process in ranks):
            time.sleep(0.1)
            if any(process.poll() for process in ranks):
                until = min(until, time.monotonic() + 10)
            if time.monotonic() > until:
                late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
                print(f"ranks {late} did not finish and are killed", file=sys.stderr, flush=True)
                return 1
        return max(abs(int(process.returncode)) for process in ranks)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def join(device_type: str, timeout_s: float, deadline_s: float) -> Control:
    """Initialize this rank's process groups; from here on the process ends at the deadline."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    _leave_with_parent()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    if sys.platform.startswith("linux") and _STORE_PORT in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device_type == "cuda" else "gloo"
    if port := os.environ.get(_STORE_PORT):
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    else:
        dist.init_process_group(backend, timeout=timeout)
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        store = dist.TCPStore(address, int(port), is_master=False, timeout=timeout)
    return Control(
        rank=rank,
        world_size=world_size,
        store=dist.PrefixStore("step_time", store),
        group=dist.new_group(backend="gloo", timeout=timeout),
        deadline_s=deadline_s,
    )


def _leave_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()


# --- agreeing --------------------------------------------------------------------------------


class Control:
    """Agreement between the ranks of a run, its clock, and what it prints."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: dist.Store,
        group: dist.ProcessGroup,
        deadline_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.report = Report(quiet=rank != 0)
        self._store = store
        self._group = group
        self._deadline_s = deadline_s
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this rank joined."""
        return time.monotonic() - self._start

    def limit(self, seconds: float | None) -> None:
        """End this process, showing all stacks, in so many seconds; None: at the deadline."""
        left = max(1.0, self._deadline_s - self.elapsed_s)
        faulthandler.dump_traceback_later(
            left if seconds is None else min(left, seconds), exit=True
        )

    def say(self, text: str) -> None:
        """Print a line on rank 0, at once."""
        self.report.say(text)

    def barrier(self) -> None:
        """All ranks are here."""
        dist.barrier(group=self._group)

    def enough_time(self, share: float) -> bool:
        """Whether less than a share of the deadline has passed, by the clock of rank 0."""
        answer = torch.tensor([int(self.elapsed_s < share * self._deadline_s)])
        dist.broadcast(answer, 0, group=self._group)
        return bool(answer.item())

    def largest(self, values: Sequence[float]) -> list[float]:
        """Elementwise maximum over ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def smallest(self, values: Sequence[float]) -> list[float]:
        """Elementwise minimum over ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op, group=self._group)
        return [float(value) for value in tensor.tolist()]

    def agree(self, phase: str, error: str = "", *, gate: str = "", timeout_s: float = 240) -> str:
        """Wait until every rank has reached a phase; what kept ranks from it, or an empty text.

        Args:
            phase: a name that is used once.
            error: what went wrong on this rank.
            gate: name of a point before the end of the phase. A rank that ends the phase with
                an error never comes to its gates, so those who wait there look at the end too.
            timeout_s: how long a rank may be behind.
        """
        own = f"{phase}/{gate}" if gate else phase
        self._store.set(f"{own}/{self.rank}", error or "-")
        until = time.monotonic() + timeout_s
        why = [""] * self.world_size
        for rank in range(self.world_size):
            keys = [f"{key}/{rank}" for key in dict.fromkeys((own, phase))]
            while True:
                found = next((key for key in keys if self._store.check([key])), None)
                if found is not None:
                    text = self._store.get(found).decode()
                    why[rank] = "" if text == "-" else text
                    break
                if time.monotonic() > until:
                    why[rank] = f"no answer in {timeout_s:g} s"
                    break
                time.sleep(_POLL_S)
        return _merged(why)

    def pass_gate(self, phase: str, gate: str) -> None:
        """Wait at a point before the end of a phase.

        Raises:
            PeerFailedError: a rank ended the phase with an error.
        """
        why = self.agree(phase, gate=gate)
        if why:
            raise PeerFailedError(f"not run, as another rank failed ({why})")


def _merged(why: Sequence[str]) -> str:
    """What kept ranks, once where all say the same; empty if nothing did."""
    if why[0] and len(set(why)) == 1:
        return why[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(why) if text)


@contextlib.contextmanager
def gated_compiles(control: Control, phase: str) -> Iterator[None]:
    """Let no rank run what it compiled before all ranks have compiled it.

    A rank that fails to compile would leave the others in their collectives for ever. So each
    compile of Inductor ends with an agreement; if one rank failed, all raise.
    """
    import torch._inductor.compile_fx as compile_fx_module

    original = compile_fx_module.compile_fx
    depth = 0
    gates = 0

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth, gates
        depth += 1  # it calls itself, by its name in the module, to apply options
        try:
            compiled = original(*args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            gates += 1
            control.pass_gate(phase, f"compile{gates}")
        return compiled

    compile_fx_module.compile_fx = compile_fx
    try:
        yield
    finally:
        # overlap_core may have wrapped ours meanwhile: then ours stays below, and does nothing.
        if compile_fx_module.compile_fx is compile_fx:
            compile_fx_module.compile_fx = original
        else:
            depth = 1
