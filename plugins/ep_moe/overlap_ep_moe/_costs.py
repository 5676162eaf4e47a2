"""Times from shapes and data sheets, when nobody measured; right in order of magnitude."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core import Cost
from overlap_core.costs import dtype_bytes
from overlap_core.costs.types import CostSource
from overlap_core.registry import canonical_op_name

from ._replay import COMMUNICATING, NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.costs.types import CostRequest, Dim

__all__ = ["estimate"]


@frozen(kw_only=True)
class _Device:
    """Rates are per second and as reached, not as on the data sheet."""

    pattern: str
    """Found in the lower-case device text, such as `cuda:nvidia h200`."""
    flops: float
    """Of matrix products in 16 bits; wider dtypes take half for each doubling."""
    memory_bytes: float
    link_bytes: float
    """What an all-to-all gets out of the links of one rank, in one direction."""
    kernel_ns: int
    exchange_ns: int
    """Latency of one all-to-all."""
    sync_ns: int
    """For the host to read the counts."""


_DEVICES = (
    _Device(
        pattern=r"^cpu",
        flops=200e9,
        memory_bytes=32e9,
        link_bytes=1e9,
        kernel_ns=1_000,
        exchange_ns=150_000,
        sync_ns=1_000,
    ),
    _Device(
        pattern=r"h[12]00|h800|gh200|\bb[23]00",
        flops=600e12,
        memory_bytes=3.3e12,
        link_bytes=250e9,
        kernel_ns=3_000,
        exchange_ns=20_000,
        sync_ns=15_000,
    ),
    _Device(
        pattern="",
        flops=100e12,
        memory_bytes=1e12,
        link_bytes=50e9,
        kernel_ns=5_000,
        exchange_ns=20_000,
        sync_ns=15_000,
    ),
)


def estimate(request: CostRequest) -> Cost | None:
    """A cost for one of this plugin's ops; None for another op or if a size has no hint."""
    op = canonical_op_name(request.op)
    if op is None or not op.startswith(f"{NAMESPACE}::"):
        return None
    device = next(one for one in _DEVICES if re.search(one.pattern, request.device.lower()))
    if op in COMMUNICATING:
        return _exchange(op, request, device)
    return _grouped(op, request, device)


def _exchange(op: str, request: CostRequest, device: _Device) -> Cost | None:
    if not request.inputs or not request.input_dtypes:
        return None
    rows = _numel(request.inputs[0])
    if op == f"{NAMESPACE}::dispatch" and rows is not None:
        # Each token goes to top_k experts.
        top_k = _hint(request.inputs[1][-1]) if len(request.inputs) > 1 else None
        rows = None if top_k is None else rows * top_k
    width = dtype_bytes(request.input_dtypes[0])
    if rows is None or width is None:
        return None
    nbytes = rows * width
    ranks = request.group_size or 2
    others = (ranks - 1) / ranks
    exchanges = 2 if op == f"{NAMESPACE}::dispatch" else 1
    network = 0.0
    if ranks > 1:
        network = exchanges * device.exchange_ns + nbytes * others / device.link_bytes * 1e9
    # Rows are sorted before or after they travel, on both sides: two reads and two writes.
    local = 2 * device.kernel_ns + 4 * nbytes / device.memory_bytes * 1e9
    if op.endswith(("::dispatch", "::combine", "::combine_backward")):
        local += device.sync_ns
    return _cost(local + network, network)


def _grouped(op: str, request: CostRequest, device: _Device) -> Cost | None:
    """Rows times a matrix of `(dim, hidden)`: the arithmetic or the memory traffic, if longer."""
    width = dtype_bytes(request.input_dtypes[0]) if request.input_dtypes else None
    sizes = [_hint(dim) for shape in request.inputs for dim in shape]
    known = [size for size in sizes if size is not None]
    if len(request.inputs) != 3 or width is None or len(known) < len(sizes):
        return None
    rows, dim, *_, hidden, experts = known
    arithmetic = 2 * rows * dim * hidden / (device.flops * 2 / max(width, 2))
    moved = width * (rows * (dim + hidden) + experts * dim * hidden)
    seconds = max(arithmetic, moved / device.memory_bytes)
    return _cost(device.kernel_ns + seconds * 1e9, None)


def _cost(ns: float, network_ns: float | None) -> Cost:
    network = None if network_ns is None else math.ceil(network_ns)
    return Cost(ns=math.ceil(ns), network_ns=network, source=CostSource.ANALYTICAL)


def _hint(dim: Dim) -> int | None:
    return dim if isinstance(dim, int) else dim[1]


def _numel(shape: Sequence[Dim]) -> int | None:
    hints = [_hint(dim) for dim in shape]
    return None if None in hints else math.prod(hint for hint in hints if hint is not None)
