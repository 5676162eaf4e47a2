"""What the host and the network cost beside the nodes' own times, probed on a GPU under load.

While the device works off a load, the wall time in which the host issues a call is the host's own.
Collectives are probed with tensors made here, whose sizes are in the probe's name or fixed: ranks
that run a probe of one name do the same calls.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from overlap_core.ranks.lockstep import ProbeOffer
from overlap_core.replay.timing import host_ns_of_call, time_calls
from overlap_core.session import session

from .groups import GroupResolver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["MachineProbes", "slowdown"]

_CALLS, _MEMBERS = 16, 8
_TINY_ELEMENTS = 1024
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
"""Of the gather beside compute: smaller ones end too soon, larger ones say the same."""
_RACE_BYTES, _FEWEST_GATHERS, _MOST_GATHERS = 128 << 20, 2, 32
_RACES = 3
_COVER, _MOST_PRODUCTS = 1.5, 200
"""Products beside gathers take so many times the gathers' time alone, but not without end."""
_PRODUCT_DIM, _PRODUCT_DEPTH = 4096, 512
"""Products of some 30 µs: a gather finds room on the device only where one ends, and that time is
no slowdown."""
_GROUPS = 4
"""Groups whose gathers are probed, by first appearance in the graph."""


class MachineProbes:
    """The probes of one graph.

    Args:
        device: the GPU, for instance `cuda:0`.
        gathers: group name and output bytes of each weight gather, in the order of the graph.
        hold: keeps the device busy for tens of milliseconds.
    """

    def __init__(
        self, device: str, gathers: Iterable[tuple[str, int]], hold: Callable[[], None]
    ) -> None:
        self._device = device
        self._hold = hold
        self._runs: dict[str, Callable[[], Sequence[float]]] = {"kernel": self._kernel}
        self._ranks: dict[str, tuple[int, ...]] = {"kernel": ()}
        resolver = GroupResolver()
        largest: dict[str, int] = {}
        for group, nbytes in gathers:
            largest[group] = max(nbytes, largest.get(group, 0))
        for ordinal, (group, nbytes) in enumerate(list(largest.items())[:_GROUPS]):
            ranks = resolver.ranks(group)
            if ranks is not None:
                self._add_group(ordinal, group, ranks, nbytes)

    def _add_group(self, ordinal: int, group: str, ranks: tuple[int, ...], nbytes: int) -> None:
        bounded = min(_MOST_BYTES, max(_LEAST_BYTES, nbytes))
        rounded = 1 << (bounded.bit_length() - 1)  # so that few sizes are probed in one process
        name = f"contention/{ordinal}/{rounded}"
        self._runs[name] = lambda: self._contention(group, len(ranks), rounded)
        self._ranks[name] = ranks
        if ordinal == 0:
            self._runs["collective"] = lambda: self._collective(group, len(ranks))
            self._ranks["collective"] = ranks

    def offer(self) -> dict[str, ProbeOffer]:
        """All probes, after their memory was found to be there."""
        offers = {
            name: ProbeOffer(ranks=ranks, values=session.learned.probes.get(self._key(name), ()))
            for name, ranks in self._ranks.items()
        }
        if not all(offer.values for offer in offers.values()):
            # What fails for lack of memory fails here, before any communication.
            torch.empty(3 * _RACE_BYTES, dtype=torch.uint8, device=self._device)
        return offers

    def run(self, name: str) -> Sequence[float]:
        """Run one of them; all ranks of its group are here now."""
        with torch.cuda.device(self._device):
            return self._runs[name]()

    def keep(self, values: Mapping[str, Sequence[float]]) -> None:
        """Remember what all ranks agreed on, for the next graphs: a machine does not change."""
        for name in self._runs.keys() & values.keys():
            session.learned.probes[self._key(name)] = tuple(values[name])

    def _key(self, name: str) -> tuple[object, ...]:
        return (self._device, name, self._ranks[name])

    def _kernel(self) -> Sequence[float]:
        """Host time of a small kernel, called as generated code does: into a new buffer."""
        left, right = (_zeros((128, 128), torch.bfloat16, self._device) for _ in range(2))

        def call() -> None:
            out = torch.empty_strided((128, 128), (128, 1), dtype=left.dtype, device=left.device)
            torch.mm(left, right, out=out)

        host_ns = host_ns_of_call(call, self._device, self._hold)
        if host_ns is None:
            raise RuntimeError("the load was over before the host had issued a few kernels")
        return [host_ns]

    def _collective(self, group: str, size: int) -> Sequence[float]:
        """Host times of a gather, of a wait, and of each further member of a coalesced gather."""
        ops = torch.ops._c10d_functional
        members = [_zeros((_TINY_ELEMENTS,), torch.float32, self._device) for _ in range(_MEMBERS)]

        def one() -> Any:
            return ops.all_gather_into_tensor.default(members[0], size, group)

        def coalesced() -> Any:
            return ops.all_gather_into_tensor_coalesced.default(members, size, group)

        for value in (one(), *coalesced()):
            _wait(value)
        torch.cuda.synchronize()
        self._hold()
        launched = [_timed(one) for _ in range(_CALLS)]
        waited = [_timed(partial(_wait, value)) for value, _ in launched]
        many = [_timed(coalesced) for _ in range(_CALLS // 2)]
        for values, _ in many:
            for value in values:
                _wait(value)
        torch.cuda.synchronize()
        launch_ns = _median_ns(launched)
        further_ns = (_median_ns(many) - launch_ns) / (_MEMBERS - 1)
        return [launch_ns, _median_ns(waited), max(0.0, further_ns)]

    def _contention(self, group: str, size: int, nbytes: int) -> Sequence[float]:
        """How many times longer gathers take beside products, and products beside gathers."""
        race = _Race(self._device, group, size, nbytes, self._hold)
        # First what does not communicate: whoever fails here leaves no peer in a gather.
        product_ns = race.product_ns()
        alone_ns = statistics.median(gather_ns for gather_ns, _ in race.run(products=0))
        products = min(_MOST_PRODUCTS, math.ceil(_COVER * alone_ns / product_ns))
        pairs = []
        for gather_ns, compute_ns in race.run(products=products):
            both_ns = min(gather_ns, compute_ns)
            pairs.append(
                (
                    slowdown(alone_ns, gather_ns, both_ns),
                    slowdown(products * product_ns, compute_ns, both_ns),
                )
            )
        return [statistics.median(column) for column in zip(*pairs, strict=True)]


class _Race:
    """Gathers and products that start together. The number of gathers follows from the bytes."""

    def __init__(
        self, device: str, group: str, size: int, nbytes: int, hold: Callable[[], None]
    ) -> None:
        self._device, self._group, self._size = device, group, size
        self._hold = hold
        self._gathers = max(_FEWEST_GATHERS, min(_MOST_GATHERS, _RACE_BYTES // nbytes))
        self._shard = _zeros((max(1, nbytes // size),), torch.uint8, device)
        self._tiny = _zeros((_TINY_ELEMENTS,), torch.uint8, device)
        self._left, self._right, self._out = (
            torch.randn(shape, dtype=torch.bfloat16, device=device)
            for shape in (
                (_PRODUCT_DIM, _PRODUCT_DEPTH),
                (_PRODUCT_DEPTH, _PRODUCT_DIM),
                (_PRODUCT_DIM, _PRODUCT_DIM),
            )
        )
        self._side = torch.cuda.Stream(device)

    def product_ns(self) -> int:
        """Nanoseconds of one product alone."""
        return max(1, time_calls(self._multiply, self._device, hold=self._hold))

    def run(self, products: int) -> list[tuple[float, float]]:
        """Nanoseconds until the gathers and until the products were done, of some races."""
        _wait(self._gather(self._shard))  # loads what the first gather of a size loads
        torch.cuda.synchronize()
        self._hold()
        races = [self._start(products) for _ in range(_RACES)]
        torch.cuda.synchronize()
        return [
            (start.elapsed_time(gathered) * 1e6, start.elapsed_time(computed) * 1e6)
            for start, gathered, computed in races
        ]

    def _start(self, products: int) -> tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]:
        start, gathered, computed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        _wait(self._gather(self._tiny))  # lets all devices start together
        start.record()
        launched = [self._gather(self._shard) for _ in range(self._gathers)]
        for _ in range(products):
            self._multiply()
        computed.record()
        with torch.cuda.stream(self._side):
            # Gathers of one group run one after another, so the last one is done last.
            _wait(launched[-1])
            gathered.record()
        torch.cuda.current_stream().wait_event(gathered)
        for value in launched[:-1]:
            _wait(value)
        return start, gathered, computed

    def _gather(self, shard: torch.Tensor) -> Any:
        ops = torch.ops._c10d_functional
        return ops.all_gather_into_tensor.default(shard, self._size, self._group)

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._out)


def slowdown(alone_ns: float, took_ns: float, both_ns: float) -> float:
    """How many times longer work takes beside other work.

    Args:
        alone_ns: the work's time alone.
        took_ns: its time with other work beside it for a part of it.
        both_ns: that part, at most `took_ns`.
    """
    done_ns = alone_ns - (took_ns - both_ns)
    return both_ns / max(1.0, done_ns)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _wait(value: Any) -> None:
    torch.ops._c10d_functional.wait_tensor.default(value)


def _timed(call: Callable[[], Any]) -> tuple[Any, int]:
    start_ns = time.perf_counter_ns()
    value = call()
    return value, time.perf_counter_ns() - start_ns


def _median_ns(timed: Sequence[tuple[Any, int]]) -> float:
    return statistics.median(ns for _, ns in timed)
