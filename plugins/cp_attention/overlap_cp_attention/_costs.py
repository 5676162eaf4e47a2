"""How long the ops take, on the network and in compute, from shapes alone.

The parts of an op are put to the built-in `analytical_costs`: they are an attention and some
transfers, and what a device can do is known there. Causal attention is taken for full attention,
since a request doesn't tell them apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core import Cost
from overlap_core.builtin import costs as analytical
from overlap_core.costs import CostRequest, CostSource, dtype_bytes
from overlap_core.graph import NodeKind
from overlap_core.registry import canonical_op_name

from ._names import OPS, RING, RING_BACKWARD, ULYSSES_BACKWARD

if TYPE_CHECKING:
    from overlap_core.costs import Dim

__all__ = ["estimate"]

_FLASH = "aten::_scaled_dot_product_flash_attention"
_ALL_TO_ALL = "_c10d_functional::all_to_all_single"
_SEND = "c10d::send"


def estimate(request: CostRequest) -> Cost | None:
    """Time of one of this plugin's ops; None for any other op, or where a shape is unknown."""
    op = canonical_op_name(request.op)
    if op not in OPS or request.group_size is None:
        return None
    backward = op in (ULYSSES_BACKWARD, RING_BACKWARD)
    shapes = [_hinted(dims) for dims in request.inputs[backward : backward + 2]]
    dtype = request.input_dtypes[0] if request.input_dtypes else ""
    if len(shapes) < 2 or any(s is None or len(s) != 4 for s in shapes) or not dtype_bytes(dtype):
        return None
    q, k = (shape for shape in shapes if shape is not None)
    call = _Call(
        q=q,
        kv_heads=k[2],
        ranks=request.group_size,
        dtype=dtype,
        backward=backward,
        device=request.device,
    )
    return call.ring() if op in (RING, RING_BACKWARD) else call.ulysses()


@frozen(kw_only=True)
class _Call:
    q: tuple[int, ...]
    """`(batch, local length, heads, head dim)`."""
    kv_heads: int
    ranks: int
    dtype: str
    backward: bool
    device: str

    def ulysses(self) -> Cost:
        """All-to-all, attention, all-to-all, one after another."""
        batch, length, heads, _ = self.q
        shared = math.lcm(self.kv_heads, self.ranks)
        # There: q, k, v and in backward gradient and output. Back: the output or three gradients.
        there, back = heads * (3 if self.backward else 1) + 2 * shared, heads
        back += 2 * shared if self.backward else 0
        total = length * self.ranks
        compute = self._attention_ns((batch, max(heads // self.ranks, 1), total), total)
        network = sum(
            self._transfer_ns(_ALL_TO_ALL, self._bytes(count), self.ranks)
            for count in (there, back)
        )
        return Cost(ns=compute + network, network_ns=network, source=CostSource.ANALYTICAL)

    def ring(self) -> Cost:
        """A block of attention at each step, while the next block arrives."""
        batch, length, heads, _ = self.q
        block = self._attention_ns((batch, heads, length), length)
        others = self.ranks - 1
        if not others:
            return Cost(ns=block, network_ns=0, source=CostSource.ANALYTICAL)
        step = self._transfer_ns(_SEND, self._bytes(2 * self.kv_heads), 2)
        network, longest = others * step, block + others * max(block, step)
        if self.backward:
            # The gradients of a block follow it in float32, and take one step more to get home.
            width = max(4.0, dtype_bytes(self.dtype) or 4.0)
            grads = self._transfer_ns(_SEND, self._bytes(2 * self.kv_heads, width), 2)
            network += self.ranks * grads
            longest = block + others * max(block, step + grads) + grads
        return Cost(ns=longest, network_ns=network, source=CostSource.ANALYTICAL)

    def _bytes(self, heads: int, width: float | None = None) -> int:
        """Bytes of a local tensor with so many heads."""
        batch, length, _, dim = self.q
        width = dtype_bytes(self.dtype) or 4.0 if width is None else width
        return math.ceil(batch * length * heads * dim * width)

    def _attention_ns(self, queries: tuple[int, int, int], keys: int) -> int:
        batch, heads, length = queries
        shapes = tuple((batch, heads, rows, self.q[3]) for rows in (length, keys, keys))
        tensor_bytes = [math.ceil(math.prod(s) * (dtype_bytes(self.dtype) or 4.0)) for s in shapes]
        return _ask(
            CostRequest(
                kind=NodeKind.COMPUTE,
                op=f"{_FLASH}_backward" if self.backward else _FLASH,
                inputs=shapes,
                input_dtypes=(self.dtype,) * 3,
                outputs=shapes[:1],
                output_dtypes=(self.dtype,),
                device=self.device,
                read_bytes=sum(tensor_bytes),
                write_bytes=tensor_bytes[0],
            )
        )

    def _transfer_ns(self, op: str, nbytes: int, ranks: int) -> int:
        return _ask(
            CostRequest(
                kind=NodeKind.COLLECTIVE,
                op=op,
                device=self.device,
                group_size=ranks,
                nbytes=nbytes,
            )
        )


def _ask(request: CostRequest) -> int:
    answer = analytical.overlap_measure_cost(request)
    ns = answer.ns if isinstance(answer, Cost) else answer
    return 0 if ns is None else ns


def _hinted(dims: tuple[Dim, ...]) -> tuple[int, ...] | None:
    """A shape by hints, or None if one dimension has none."""
    sizes = [dim if isinstance(dim, int) else dim[1] for dim in dims]
    known = tuple(size for size in sizes if size is not None)
    return known if len(known) == len(sizes) else None
