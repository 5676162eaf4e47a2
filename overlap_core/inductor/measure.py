"""What one rank can measure of the graph that is being compiled."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
from torch.utils._pytree import tree_leaves

from overlap_core.costs import (
    Cost,
    CostSource,
    TableHeader,
    load_table,
    request_digest,
    save_table,
)
from overlap_core.errors import CostTableError, ReplayError
from overlap_core.graph import NodeKind
from overlap_core.replay.realize import needed_bytes, realize_arguments
from overlap_core.replay.timing import LOCKSTEP_ITERATIONS, time_calls

from .bandwidth import calibrate
from .eager import eager_world
from .intercept import SilentCollectives
from .replays import replay_item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from overlap_core.config import OverlapConfig
    from overlap_core.costs import CostRequest
    from overlap_core.host import PluginHost
    from overlap_core.replay import ReplayItem
    from overlap_core.skeleton import Skeleton

    from .sizes import SizeReader

__all__ = ["DeviceMeasurer"]

_LOAD_CALLS = 150
"""About 30 ms on a current data center GPU."""

logger = logging.getLogger(__name__)


class DeviceMeasurer:
    """Measures one graph's nodes, one for each structural key, in the thread that compiles.

    Replays run eagerly, without gradients and outside the enclosing compile's modes; the shape
    environment is only read.
    """

    def __init__(
        self,
        snodes: Sequence[Any],
        requests: Sequence[CostRequest | None],
        skeleton: Skeleton,
        sizes: SizeReader,
        config: OverlapConfig,
        host: PluginHost,
    ) -> None:
        self._config = config
        self._host = host
        self._sizes = sizes
        self._compute: dict[str, tuple[CostRequest, Any]] = {}
        self._issuing: dict[str, tuple[CostRequest, Any]] = {}
        for position, (snode, request) in enumerate(zip(snodes, requests, strict=True)):
            if request is None:
                continue
            key = request_digest(request)
            if position in skeleton.communication:
                self._issuing.setdefault(key, (request, snode))
            else:
                self._compute.setdefault(key, (request, snode))
        self._items: dict[str, ReplayItem] = {}
        self._parts: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._header: TableHeader | None = None
        self.notes: list[str] = []
        self._loads: dict[str, Callable[[], None]] = {}
        self.seconds = 0.0
        """Wall time of all measuring so far."""
        self.peak_growth_bytes = 0
        """By how much measuring raised the process's peak of GPU memory."""

    def saved(self) -> Mapping[str, Cost]:
        path = self._config.cost_table_path
        if path is None:
            return {}
        devices = {request.device for request, _ in self._compute.values()}
        device = sorted(devices, key=lambda name: (name == "cpu", name))[:1] or ["cpu"]
        self._header = TableHeader(device=device[0], torch=torch.__version__)
        try:
            return load_table(path, self._header)
        except CostTableError as error:
            self._header = None  # never overwrite what somebody else measured
            self.notes.append(f"cost table not used: {error}")
            logger.warning("cost table not used: %s", error)
            return {}

    def measure_compute(self, known: Mapping[str, Cost]) -> Mapping[str, Cost]:
        result: dict[str, Cost] = {}
        with self._measuring():
            for key, (request, snode) in sorted(self._compute.items()):
                if key not in known:
                    result[key] = self._measure_one(request, snode)
        return result

    def _measure_one(self, request: CostRequest, snode: Any) -> Cost:
        try:
            if isinstance(snode, (FusedSchedulerNode, SchedulerNode)):
                return self._measure_kernel(request, snode)
            item = replay_item(snode, self._sizes)
            args, kwargs = self._arguments(item)
            return Cost(ns=self._time(item, args, kwargs), source=CostSource.MEASURED)
        except Exception as error:
            return Cost(why=f"{type(error).__name__}: {_first_line(error)}")

    def _measure_kernel(self, request: CostRequest, snode: Any) -> Cost:
        """A kernel that Inductor generates: its own benchmark, or the bandwidth of this device."""
        static = all(
            isinstance(dim, int) for shape in (*request.inputs, *request.outputs) for dim in shape
        )
        device = snode.get_device()
        why = "dynamic shapes"
        if static and device is not None and device.type != "cpu":
            try:
                milliseconds, path = snode.scheduler.benchmark_fused_nodes(snode.get_nodes())
                if 0 < milliseconds < float("inf"):
                    ns = self._time_warm(path, str(device)) or round(milliseconds * 1e6)
                    return Cost(ns=ns, source=CostSource.MEASURED)
                why = f"Inductor's benchmark gave {milliseconds} ms"
            except Exception as error:
                why = f"Inductor's benchmark failed: {_first_line(error)}"
        elif device is not None and device.type == "cpu":
            why = "Inductor cannot benchmark kernels for the CPU alone"
        read, write = request.read_bytes, request.write_bytes
        if read is None or write is None or device is None:
            return Cost(why=why)
        model = calibrate(str(device))
        return Cost(
            ns=model.time_ns(read + write),
            source=CostSource.ANALYTICAL,
            why=f"{why}; {model.describe()}",
        )

    def _time_warm(self, path: str, device: str) -> int | None:
        """Time the kernel that Inductor has just benchmarked, with its inputs in the cache.

        Inductor flushes the cache before each call. In a step the inputs of a fused kernel have
        mostly just been written. None: the kernel changes its inputs, or cannot be called again.
        """
        try:
            [module] = [m for m in PyCodeCache.modules if getattr(m, "__file__", None) == path][-1:]
            if module.triton_.mutated_arg_names:
                return None
            args = module.get_args()
            return time_calls(lambda: module.call(args), device, hold=self._hold(device))
        except Exception as error:
            logger.debug("no warm timing of %s: %s", path, error)
            return None

    def offer(self, known: Mapping[str, Cost]) -> Sequence[str]:
        offered = []
        with self._measuring():
            for key, (_, snode) in sorted(self._issuing.items()):
                if key in known:
                    continue
                try:
                    item = replay_item(snode, self._sizes)
                    self._arguments(item)
                    self._items[key] = item
                    offered.append(key)
                except Exception as error:
                    self._refused[key] = f"{type(error).__name__}: {_first_line(error)}"
        return offered

    def rehearse(self, key: str) -> str:
        item = self._items[key]
        with self._measuring():
            args, kwargs = self._arguments(item)
            with SilentCollectives() as silent:
                self._call(item, args, kwargs)
            if self._issuing[key][0].kind == NodeKind.OPAQUE:
                with SilentCollectives():
                    self._parts[key] = self._time(item, args, kwargs)
        return " ".join(silent.issued)

    def refused(self) -> Mapping[str, str]:
        return self._refused

    def compute_part_ns(self, key: str) -> int | None:
        return self._parts.get(key)

    def replay(self, key: str) -> int:
        item = self._items[key]
        with self._measuring():
            args, kwargs = self._arguments(item)
            return self._time(item, args, kwargs, iterations=LOCKSTEP_ITERATIONS)

    def save(self, table: Mapping[str, Cost]) -> None:
        path = self._config.cost_table_path
        if path is not None and self._header is not None:
            try:
                save_table(path, self._header, table)
            except CostTableError as error:
                self.notes.append(f"cost table not saved: {error}")

    def _hold(self, device: str) -> Callable[[], None] | None:
        if not device.startswith("cuda"):
            return None
        if device not in self._loads:
            self._loads[device] = _load(device)
        return self._loads[device]

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """The eager world; time and growth of the peak of GPU memory are added up."""
        start = time.perf_counter()
        on_gpu = torch.cuda.is_initialized()
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        try:
            with eager_world():
                yield
        finally:
            self.seconds += time.perf_counter() - start
            if on_gpu:
                self.peak_growth_bytes += torch.cuda.max_memory_allocated() - peak

    def _arguments(self, item: ReplayItem) -> tuple[tuple[Any, ...], dict[str, Any]]:
        needed, limit = needed_bytes(item), self._config.max_replay_bytes
        if needed > limit:
            raise ReplayError(
                f"its arguments take {needed} bytes, more than max_replay_bytes={limit}"
            )
        return realize_arguments(item, self._host.materialize, self._host.realize_tensor)

    def _time(
        self,
        item: ReplayItem,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        iterations: int | None = None,
    ) -> int:
        device = _device_of(args, kwargs)
        return time_calls(
            lambda: self._call(item, args, kwargs),
            device,
            iterations=iterations,
            hold=self._hold(device),
        )

    @staticmethod
    def _call(item: ReplayItem, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op and wait for what it issued."""
        result = item.call(*args, **kwargs)
        if item.op_name.startswith("_c10d_functional::"):
            for value in result if isinstance(result, (tuple, list)) else [result]:
                torch.ops._c10d_functional.wait_tensor(value)
        return result


def _device_of(args: Any, kwargs: Any) -> str:
    leaves = tree_leaves((args, kwargs))
    return next((str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")


def _load(device: str) -> Callable[[], None]:
    """Matrix products for tens of milliseconds, in which the host queues what is timed.

    They also bring the GPU to the clocks that it has under load: a kernel timed on a cool and idle
    device is faster than it ever is in a step.
    """
    left, right = (torch.randn(4096, 4096, dtype=torch.bfloat16, device=device) for _ in range(2))

    def run() -> None:
        for _ in range(_LOAD_CALLS):
            torch.mm(left, right)

    return run


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
