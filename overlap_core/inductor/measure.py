"""What one rank can measure of the graph that is being compiled."""

from __future__ import annotations

import logging
import statistics
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
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
from overlap_core.ranks.lockstep import ProbeOffer, Rehearsal
from overlap_core.replay import TensorSpec
from overlap_core.replay.realize import needed_bytes, realize_arguments
from overlap_core.replay.timing import (
    calls_in_flight,
    host_ns_of_call,
    time_calls,
    time_in_lockstep,
)
from overlap_core.session import session

from .bandwidth import calibrate
from .eager import eager_world
from .groups import GroupResolver
from .intercept import Allocations, SilentCollectives
from .kernels import Kernels, compile_kernels
from .probes import MachineProbes
from .replays import replay_item
from .signatures import is_one_sided

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
_OPAQUE_PROBES = 4
"""Silent opaque ops whose host time is looked at; each takes one load."""

_SILENT_CALLS = 5
"""Timed calls of an op whose communication is held back; the same on all ranks."""

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
        self._gathers: list[tuple[str, int, Any]] = []
        """Group name, output bytes and node of each weight gather."""
        for gather in skeleton.gathers:
            request = requests[gather.launch]
            for group in skeleton.communication[gather.launch].groups[:1]:
                nbytes = (request and request.nbytes) or 0
                self._gathers.append((group, nbytes, snodes[gather.launch]))
        groups = GroupResolver()
        self._groups: dict[str, tuple[int, ...]] = {}
        """Ranks that take part in the replay of what communicates."""
        for position, (snode, request) in enumerate(zip(snodes, requests, strict=True)):
            if request is None:
                continue
            key = request_digest(request)
            if position in skeleton.communication:
                if key not in self._issuing:
                    self._issuing[key] = (request, snode)
                    names = skeleton.communication[position].groups
                    # An op on several groups is left to the order in which ranks meet them.
                    self._groups[key] = (len(names) == 1 and groups.ranks(names[0])) or ()
            else:
                self._compute.setdefault(key, (request, snode))
        self._items: dict[str, ReplayItem] = {}
        self._prepared: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._parts: dict[str, int] = {}
        self._opaque_host_ns: list[int] = []
        self._probes: MachineProbes | None = None
        self._refused: dict[str, str] = {}
        self._header: TableHeader | None = None
        self.notes: list[str] = []
        self._loads: dict[str, Callable[[], None]] = {}
        self.seconds: dict[str, float] = {}
        """Wall time of all measuring so far, by what was measured."""
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
        wanted = {key: one for key, one in sorted(self._compute.items()) if key not in known}
        with self._measuring("compute"):
            kernels = compile_kernels(_generated(wanted))
            return {key: self._measure_one(key, kernels) for key in wanted}

    def _measure_one(self, key: str, kernels: Kernels) -> Cost:
        _, snode = self._compute[key]
        try:
            if isinstance(snode, (FusedSchedulerNode, SchedulerNode)):
                return self._measure_kernel(key, kernels)
            item = replay_item(snode, self._sizes)
            args, kwargs = self._arguments(item)
            return Cost(ns=self._time(item, args, kwargs), source=CostSource.MEASURED)
        except Exception as error:
            return Cost(why=f"{type(error).__name__}: {_first_line(error)}")

    def _measure_kernel(self, key: str, kernels: Kernels) -> Cost:
        """A kernel that Inductor generates: timed, or by the bandwidth of this device."""
        request, snode = self._compute[key]
        device = snode.get_device()
        why = kernels.missing.get(key, "dynamic shapes")
        if key in kernels.modules:
            try:
                ns = kernels.time(key, str(device), self._hold(str(device)))
                return Cost(ns=ns, source=CostSource.MEASURED)
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

    def offer(self, known: Mapping[str, Cost]) -> Mapping[str, tuple[int, ...]]:
        offered = {}
        with self._measuring("communication"):
            for key, (_, snode) in sorted(self._issuing.items()):
                if key in known:
                    continue
                try:
                    item = replay_item(snode, self._sizes)
                    if is_one_sided(item.op_name):
                        raise ReplayError("each rank sends or receives with another peer")
                    self._arguments(item)
                    self._items[key] = item
                    offered[key] = self._groups.get(key, ())
                except Exception as error:
                    self._refused[key] = f"{type(error).__name__}: {_first_line(error)}"
        return offered

    def rehearse(self, key: str) -> Rehearsal:
        item, (request, _) = self._items[key], self._issuing[key]
        with self._measuring("communication"):
            args, kwargs = self._arguments(item)
            silent, nbytes = _call_silently(item, args, kwargs)
            if request.kind == NodeKind.OPAQUE:
                session.learned.workspaces[key] = nbytes
                # One that issues nothing here may communicate all the same, past the dispatcher:
                # then all ranks must call it as often as each other.
                if silent.issued:
                    with SilentCollectives():
                        self._parts[key] = self._time(item, args, kwargs, calls=_SILENT_CALLS)
            self._make_room(_device_of(args, kwargs), request.nbytes)
        if silent.is_uneven:
            raise ReplayError("its ranks exchange pieces of different sizes")
        return Rehearsal(calls=tuple(silent.calls), exchanges=silent.exchanges)

    def prepare(self, key: str) -> None:
        self._prepared.clear()  # of a key that a peer could not prepare
        with self._measuring("communication"):
            self._prepared[key] = self._arguments(self._items[key])

    def _make_room(self, device: str, nbytes: int | None) -> None:
        """Take what the replay will take, so that a lack of memory is told and not met there."""
        if self._hold(device) is not None and nbytes:
            torch.empty(calls_in_flight(nbytes) * nbytes, dtype=torch.uint8, device=device)

    def refused(self) -> Mapping[str, str]:
        return self._refused

    def workspace_bytes(self, key: str) -> int:
        # What may communicate is only called together with the peers: it was rehearsed, or not.
        if key not in session.learned.workspaces and key in self._compute:
            session.learned.workspaces[key] = self._look_inside(key)
        return session.learned.workspaces.get(key, 0)

    def _look_inside(self, key: str) -> int:
        """Workspace of an op that is pure compute; 0 if it can't be called here."""
        _, snode = self._compute[key]
        try:
            with self._measuring("compute"):
                item = replay_item(snode, self._sizes)
                _, nbytes = _call_silently(item, *self._arguments(item))
        except Exception as error:
            logger.debug("no workspace of %s: %s", snode.get_name(), error)
            return 0
        return nbytes

    def compute_part_ns(self, key: str) -> int | None:
        return self._parts.get(key)

    def replay(self, key: str) -> int:
        item, (request, _) = self._items[key], self._issuing[key]
        args, kwargs = self._prepared.pop(key)
        with self._measuring("communication"):
            device = _device_of(args, kwargs)
            timing = time_in_lockstep(
                lambda: item.call(*args, **kwargs),
                lambda result: _wait_for(item, result),
                device,
                nbytes=request.nbytes,
                hold=self._hold(device),
            )
        if request.kind == NodeKind.OPAQUE and timing.host_ns is not None:
            self._opaque_host_ns.append(timing.host_ns)
        return timing.ns

    def offer_probes(self) -> Mapping[str, ProbeOffer]:
        with self._measuring("machine"):
            device = self._gather_device()
            hold = self._hold(device)
            if hold is None:
                return {}  # compute runs on the host itself, which is never late for it
            gathers = [(group, nbytes) for group, nbytes, _ in self._gathers]
            self._probes = MachineProbes(device, gathers, hold)
            offered = self._probes.offer()
            if self._opaque_host_ns or self._silent_opaque():
                offered["opaque"] = ProbeOffer()
            return offered

    def probe(self, name: str) -> Sequence[float]:
        with self._measuring("machine"):
            if name == "opaque":
                return [self._probe_opaque()]
            assert self._probes is not None
            return self._probes.run(name)

    def keep_probes(self, values: Mapping[str, Sequence[float]]) -> None:
        if self._probes is not None:
            self._probes.keep(values)

    def _gather_device(self) -> str:
        """Where the first weight gather runs."""
        for _, _, snode in self._gathers[:1]:
            item = replay_item(snode, self._sizes)
            for leaf in tree_leaves((item.args, item.kwargs)):
                if isinstance(leaf, TensorSpec):
                    return leaf.device
        return "cpu"

    def _silent_opaque(self) -> list[Any]:
        """Nodes of opaque ops that do not communicate, one for each key."""
        compute = (self._compute[key] for key in sorted(self._compute))
        nodes = [snode for request, snode in compute if request.kind == NodeKind.OPAQUE]
        return nodes[:_OPAQUE_PROBES]

    def _probe_opaque(self) -> float:
        """Host time of an opaque op, over those that were replayed and those that are silent."""
        found = [*self._opaque_host_ns]
        for snode in self._silent_opaque():
            try:
                item = replay_item(snode, self._sizes)
                args, kwargs = self._arguments(item)
                device = _device_of(args, kwargs)
                hold = self._hold(device)
                if hold is None:
                    continue
                host_ns = host_ns_of_call(partial(item.call, *args, **kwargs), device, hold)
                found += [] if host_ns is None else [host_ns]
            except Exception as error:
                logger.debug("no host time of %s: %s", snode.get_name(), error)
        return statistics.median(found)

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
    def _measuring(self, what: str) -> Iterator[None]:
        """The eager world; time and growth of the peak of GPU memory are added up."""
        start = time.perf_counter()
        on_gpu = torch.cuda.is_initialized()
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        try:
            with eager_world():
                yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start
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
        calls: int | None = None,
    ) -> int:
        device = _device_of(args, kwargs)
        return time_calls(
            lambda: item.call(*args, **kwargs), device, hold=self._hold(device), calls=calls
        )


def _can_benchmark(request: CostRequest, snode: Any) -> bool:
    """Whether Inductor can benchmark a node: generated code for a GPU, of static shapes."""
    if not isinstance(snode, (FusedSchedulerNode, SchedulerNode)):
        return False
    device = snode.get_device()
    dims = (dim for shape in (*request.inputs, *request.outputs) for dim in shape)
    return device is not None and device.type != "cpu" and all(isinstance(d, int) for d in dims)


def _generated(wanted: Mapping[str, tuple[CostRequest, Any]]) -> Mapping[str, Any]:
    """The nodes whose kernels Inductor can benchmark, those first that move most bytes."""
    found = {key: one for key, one in wanted.items() if _can_benchmark(*one)}

    def traffic(key: str) -> int:
        request, _ = found[key]
        return (request.read_bytes or 0) + (request.write_bytes or 0)

    return {key: found[key][1] for key in sorted(found, key=traffic, reverse=True)}


def _call_silently(
    item: ReplayItem, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[SilentCollectives, int]:
    """What an op would issue, and the bytes that it allocates beside its outputs."""
    allocated = Allocations()
    with SilentCollectives(allocated) as silent:
        result = item.call(*args, **kwargs)
    return silent, allocated.beside(result)


def _wait_for(item: ReplayItem, result: Any) -> None:
    """Wait for what the op issued, if it is one that returns before that is done."""
    if item.op_name.startswith("_c10d_functional::"):
        for value in result if isinstance(result, (tuple, list)) else [result]:
            torch.ops._c10d_functional.wait_tensor(value)


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
