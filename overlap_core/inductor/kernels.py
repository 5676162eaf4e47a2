"""Kernels that Inductor generates: compiled all at once, before its own code is, and timed."""

from __future__ import annotations

import concurrent.futures
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch._inductor.config as inductor_config
from attrs import field, frozen
from torch._inductor.async_compile import AsyncCompile, get_compile_threads

from overlap_core._clock import REAL_CLOCK, Clock
from overlap_core.replay.timing import time_calls

from .versions import has_config_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["BUDGET_S", "Kernels", "compile_kernels"]

BUDGET_S = 6.0
"""Seconds after which no more kernels are compiled to be timed: they are compiled once more for
the user's own code, so a graph with many different ones would take twice as long."""

_PER_WORKER = 2
"""Kernels that are given to the pool at once, by worker."""

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class Kernels:
    """Kernels that were compiled, and why others were not, both by what they were asked by."""

    modules: Mapping[str, Any] = field(factory=dict)
    """Python modules in the form of Inductor's benchmarks: `triton_`, `get_args`, `call`."""
    missing: Mapping[str, str] = field(factory=dict)

    def time(self, key: str, device: str, hold: Callable[[], None] | None) -> int:
        """Nanoseconds of a kernel with its inputs in the cache.

        In a step the inputs of a fused kernel have mostly just been written. What a kernel changes
        is copied for each call, and the copies' time is taken off.

        Args:
            key: of a kernel that was compiled.
            device: where it runs.
            hold: keeps the device busy while calls are queued.

        Raises:
            Exception: whatever the kernel or making its inputs raises.
        """
        module = self.modules[key]
        args = module.get_args()
        if not module.triton_.mutated_arg_names:
            return time_calls(lambda: module.call(args), device, hold=hold)

        def copies() -> Any:
            return module.triton_.clone_args(*args)[0]

        both_ns = time_calls(lambda: module.call(copies()), device, hold=hold)
        return max(1, both_ns - time_calls(copies, device, hold=hold))


def compile_kernels(
    nodes: Mapping[str, Any], budget_s: float = BUDGET_S, clock: Clock = REAL_CLOCK
) -> Kernels:
    """Let Inductor's pool of compilers make kernels, as many as it can within a time.

    One by one they would take many times longer. Where there is no pool they are compiled here,
    one by one, as long as there is time. Kernels are not tuned as far as Inductor does later: they
    are not compiled again for a better occupancy.

    Args:
        nodes: scheduler nodes that generate a kernel each, those first that matter most.
        budget_s: seconds to spend.
        clock: tells whether they are spent.
    """
    deadline = clock.now() + budget_s
    modules: dict[str, Any] = {}
    missing: dict[str, str] = {}
    pending: dict[str, tuple[Any, Any]] = {}
    if nodes:
        _await_pool(budget_s / 2)
    running: list[concurrent.futures.Future[Any]] = []
    quick = {"dynamic_scale_rblock": False} if has_config_key("dynamic_scale_rblock") else {}
    for key, snode in nodes.items():
        running = _wait_for_worker(running, deadline, clock)
        if clock.now() > deadline:
            missing[key] = _too_late(budget_s)
            continue
        try:
            with inductor_config.patch(quick):
                future, module = snode.scheduler.compile_kernel(snode.get_nodes())
            if future is None:
                module.triton_.precompile()
                modules[key] = module
            else:
                pending[key] = future, module
                running += [task] if (task := _task(future)) is not None else []
        except Exception as error:
            missing[key] = _failure(error)
    concurrent.futures.wait(running, timeout=max(0.0, deadline - clock.now()))
    for key, (future, module) in pending.items():
        task = _task(future)
        if task is not None and not task.done():
            missing[key] = _too_late(budget_s)
            continue
        try:
            # Else this process would compile what the pool has just compiled.
            module.triton_ = future.result()
            modules[key] = module
        except Exception as error:
            missing[key] = _failure(error)
    return Kernels(modules=modules, missing=missing)


def _await_pool(timeout_s: float) -> None:
    """Give the pool time to start, which it does in the first compile of a process."""
    with suppress(Exception):  # it is not ready, or this torch has no such call
        AsyncCompile.wait_pool_ready(timeout=timeout_s)


def _wait_for_worker(
    running: list[concurrent.futures.Future[Any]], deadline: float, clock: Clock
) -> list[concurrent.futures.Future[Any]]:
    """Those still running, once a worker will soon be free: what is queued cannot be taken back.

    The user's own kernels would stand behind it.
    """
    while True:
        running = [task for task in running if not task.done()]
        left = deadline - clock.now()
        if len(running) < _PER_WORKER * get_compile_threads() or left <= 0:
            return running
        concurrent.futures.wait(running, left, return_when=concurrent.futures.FIRST_COMPLETED)


def _task(future: Any) -> concurrent.futures.Future[Any] | None:
    """What a worker of the pool is doing for a kernel; None: nothing, it was compiled before."""
    task: concurrent.futures.Future[Any] | None = getattr(future, "future", None)
    return task


def _too_late(budget_s: float) -> str:
    return f"Inductor compiled it no sooner than {budget_s:g} s, with other kernels to time"


def _failure(error: Exception) -> str:
    return f"Inductor's benchmark failed: {str(error).partition(chr(10))[0][:300]}"
