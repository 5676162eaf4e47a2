"""Plugin `analytical_costs`: times from shapes and data sheets, when nobody measured.

A roofline: the longer of arithmetic and memory traffic, plus the least time of a kernel; for a
collective its latency plus its traffic over the link. Right in order of magnitude, on purpose no
more: kernels that are far from the roofline need a measurement.

As seen on a 2-core machine (AVX-512, two gloo ranks on loopback, best of 30 to 40), in µs:

| what | formula | seen |
|---|---|---|
| mm, float32, 64 / 512 / 1024 cubed | 6 / 2,700 / 21,500 | 14 / 1,400 / 37,000 |
| mm, bfloat16, 64 / 512 / 1024 cubed | 6 / 2,700 / 21,500 | 20 / 630 / 13,700 |
| add, float32, 1 Ki / 1 Mi / 4 Mi elements | 1.4 / 390 / 1,600 | 1.2 / 80 / 910 |
| all-gather of 4 KiB / 256 KiB / 16 MiB | 150 / 280 / 8,500 | 240 / 420 / 9,100 |
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core.costs.types import Cost
from overlap_core.graph.nodes import NodeKind
from overlap_core.hookspecs import hookimpl
from overlap_core.registry import canonical_op_name

from ._flops import ATTENTION, count_flops

if TYPE_CHECKING:
    from overlap_core.costs.types import CostRequest

__all__ = ["overlap_measure_cost"]

overlap_plugin_name = "analytical_costs"


@frozen(kw_only=True)
class _Device:
    """What one device can do. Rates are per second."""

    pattern: str
    """Found in the lower-case device text, such as `cuda:nvidia h200`."""
    flops: dict[int, float]
    """Peak of dense matrix products by bits of an input element."""
    memory_bytes: float
    """Peak memory bandwidth."""
    link_bytes: float
    """What a collective gets out of the links of one rank, in one direction."""
    matmul_efficiency: float = 0.75
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.85
    kernel_ns: float = 2_500
    """Least time of one kernel."""
    collective_ns: float = 15_000
    hop_ns: float = 1_000
    """More latency for each further rank in the group."""


# Dense peaks from the makers' data sheets; float32 without TF32. First match wins.
_DEVICES = (
    _Device(
        pattern=r"\bb[23]00",
        flops={8: 4.5e15, 16: 2.25e15, 32: 75e12, 64: 37e12},
        memory_bytes=8e12,
        link_bytes=600e9,
    ),
    _Device(
        pattern=r"h200|gh200",
        flops={8: 1.98e15, 16: 990e12, 32: 67e12, 64: 67e12},
        memory_bytes=4.8e12,
        link_bytes=300e9,
    ),
    _Device(
        pattern=r"h100|h800|h20\b",
        flops={8: 1.98e15, 16: 990e12, 32: 67e12, 64: 67e12},
        memory_bytes=3.35e12,
        link_bytes=300e9,
    ),
    _Device(
        pattern=r"mi3\d\d",
        flops={8: 2.6e15, 16: 1.3e15, 32: 163e12, 64: 163e12},
        memory_bytes=5.3e12,
        link_bytes=250e9,
        matmul_efficiency=0.5,
    ),
    _Device(
        pattern=r"a100|a800",
        flops={8: 624e12, 16: 312e12, 32: 19.5e12, 64: 19.5e12},
        memory_bytes=2e12,
        link_bytes=200e9,
    ),
    # Four cores that share memory, and gloo on loopback: the slowest thing that runs the demo.
    _Device(
        pattern=r"^cpu",
        flops={8: 100e9, 16: 100e9, 32: 100e9, 64: 50e9},
        memory_bytes=32e9,
        link_bytes=1e9,
        matmul_efficiency=1.0,
        attention_efficiency=0.5,
        memory_efficiency=1.0,
        kernel_ns=1_000,
        collective_ns=0,
        hop_ns=150_000,
    ),
    # A GPU of an unknown kind, and where the device is not known at all.
    _Device(
        pattern="",
        flops={8: 250e12, 16: 125e12, 32: 20e12, 64: 1e12},
        memory_bytes=1e12,
        link_bytes=50e9,
    ),
)

_FREE = frozenset(
    f"aten::{name}"
    for name in (
        *("_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute"),
        *("reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
        *("transpose", "unbind", "unfold", "unsqueeze", "view"),
    )
)
_FREE_WORDS = frozenset(("MultiOutput", "multi_output", "unpack", "view"))

_WIDTHS = {8: r"float[48]|int8", 16: r"float16|half", 32: r"float32", 64: r"float64|double"}
"""Which figure of `flops` a dtype takes, by what is found in its name."""


@hookimpl(trylast=True)
def overlap_measure_cost(request: CostRequest) -> Cost | int | None:
    """Estimate a cost from shapes; None if the request doesn't say enough."""
    device = next(one for one in _DEVICES if re.search(one.pattern, request.device.lower()))
    op = canonical_op_name(request.op)
    if request.kind == NodeKind.WAIT or op in _FREE or request.op in _FREE_WORDS:
        return 0
    if request.kind == NodeKind.COLLECTIVE:
        return _collective_ns(request, op or request.op, device)
    compute = _compute_ns(request, op or request.op, device)
    if compute is None or request.kind != NodeKind.OPAQUE or request.group_size is None:
        return compute
    network = _collective_ns(request, op or request.op, device) or 0
    return Cost(ns=compute + network, network_ns=network)


def _collective_ns(request: CostRequest, op: str, device: _Device) -> int | None:
    ranks = request.group_size
    if ranks is not None and ranks < 2:
        return 0
    nbytes = request.nbytes if request.nbytes is not None else request.write_bytes
    if nbytes is None:
        return None
    others = 1 if ranks is None else ranks - 1
    share = 1.0 if ranks is None else others / ranks
    traffic = nbytes * share
    if "all_reduce" in op or "allreduce" in op:
        traffic = 2 * nbytes * share
    elif "reduce_scatter" in op:
        traffic = nbytes * others  # each rank's output is one of as many parts
    elif "broadcast" in op or "send" in op or "recv" in op or "p2p" in op:
        traffic = nbytes
    latency = device.collective_ns + device.hop_ns * others
    return math.ceil(latency + traffic / device.link_bytes * 1e9)


def _compute_ns(request: CostRequest, op: str, device: _Device) -> int | None:
    flops = request.flops if request.flops is not None else count_flops(op, request)
    if not flops and request.read_bytes is None and request.write_bytes is None:
        return None
    moved = (request.read_bytes or 0) + (request.write_bytes or 0)
    longest = moved / (device.memory_bytes * device.memory_efficiency)
    if flops:
        efficiency = device.matmul_efficiency
        if op.startswith(ATTENTION):
            efficiency = device.attention_efficiency
        longest = max(longest, flops / (device.flops[_bits(request)] * efficiency))
    return math.ceil(device.kernel_ns + longest * 1e9)


def _bits(request: CostRequest) -> int:
    """Width of the narrowest input that is a matrix; scales and biases may be wider."""
    matrices = [
        dtype
        for shape, dtype in zip(request.inputs, request.input_dtypes, strict=False)
        if len(shape) > 1
    ]
    widths = [
        bits
        for dtype in matrices or request.output_dtypes
        for bits, pattern in _WIDTHS.items()
        if re.search(pattern, dtype)
    ]
    return min(widths, default=32)
