"""Ring attention: blocks of keys and values go from rank to rank, while queries stay.

The next block is on its way while the present one is computed with. Outputs of blocks are merged
by their log-sum-exp; in backward, gradients of keys and values travel with the block they belong
to and end where they started.

Source: "Ring Attention with Blockwise Transformers" (Liu et al., 2023), and the merging of torch's
own `_templated_ring_attention`. The code is our own.
"""

from __future__ import annotations

import torch

from overlap_core import register_custom_op

from ._autograd import connect
from ._block import accumulation_dtype, attend, attend_backward
from ._checks import check_arguments
from ._names import RING, RING_BACKWARD
from ._replay import backward_inputs, forward_inputs
from ._transfer import Ring, Transfer

__all__ = ["ring", "ring_backward"]


@register_custom_op(RING, materialize_inputs=forward_inputs, has_internal_collective=True)
def ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp_split_sizes: list[int],
    group: str,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `(batch, local length, heads, head dim)`, and what backward needs of the scores.

    The second output is the log-sum-exp of the local queries over the whole sequence,
    `(batch, heads, local length)`. Sends and receives once less than `group` has ranks.
    """
    route = Ring(group=check_arguments(RING, q, k, v, cp_split_sizes, group), splits=cp_split_sizes)
    queries = q.contiguous().transpose(1, 2)
    block = _message(k, v)
    total: tuple[torch.Tensor, torch.Tensor] | None = None
    for step in range(route.size):
        coming = route.pass_on(block, step) if step + 1 < route.size else None
        if _is_seen(route, step, is_causal):
            keys, values = block.transpose(2, 3).unbind(0)
            part = attend(queries, keys, values, is_causal and step == 0, scale)
            total = _merge(total, *part)
        if coming is not None:
            block = coming.wait()
    if total is None:  # no local queries
        return torch.empty_like(q, memory_format=torch.contiguous_format), _lse_like(q)
    out = total[0].transpose(1, 2).to(q.dtype, copy=True, memory_format=torch.contiguous_format)
    return out, total[1].contiguous()


@ring.register_fake
def _fake(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), _lse_like(q)


@register_custom_op(RING_BACKWARD, materialize_inputs=backward_inputs, has_internal_collective=True)
def ring_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cp_split_sizes: list[int],
    group: str,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v in their shapes.

    Sends and receives keys and values once less than `group` has ranks, and their gradients, in
    float32 (float64 for float64), once for each rank.
    """
    route = Ring(
        group=check_arguments(RING_BACKWARD, q, k, v, cp_split_sizes, group),
        splits=cp_split_sizes,
    )
    dtype = accumulation_dtype(q.dtype)
    # Gradients come in any layout, expanded ones too, and kernels want dense rows.
    grad_out, queries, outputs = (x.contiguous().transpose(1, 2) for x in (grad, q, out))
    grad_q = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    block = _message(k, v)
    grad_block = torch.zeros_like(block, dtype=dtype)
    coming_grads: Transfer | None = None
    for step in range(route.size):
        coming = route.pass_on(block, step) if step + 1 < route.size else None
        parts = None
        if _is_seen(route, step, is_causal):
            causal = is_causal and step == 0
            keys, values = block.transpose(2, 3).unbind(0)
            part_q, *parts = attend_backward(
                grad_out, queries, keys, values, outputs, lse, causal, scale
            )
            grad_q += part_q.transpose(1, 2)
        if coming_grads is not None:
            grad_block = coming_grads.wait()
        if parts is not None:
            grad_block += torch.stack(parts).transpose(2, 3)
        if route.size > 1:
            coming_grads = route.pass_on(grad_block, step)
        if coming is not None:
            block = coming.wait()
    if coming_grads is not None:
        grad_block = coming_grads.wait()
    grad_k, grad_v = grad_block[:, :, : k.shape[1]].to(q.dtype).unbind(0)
    whole = torch.contiguous_format  # clones, as an op's outputs may share no memory
    return grad_q.to(q.dtype), grad_k.clone(memory_format=whole), grad_v.clone(memory_format=whole)


connect(ring, ring_backward)


def _message(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values as one block to send, `(2, batch, rows, heads, dim)`, of one row at least."""
    if k.shape[1]:
        return torch.stack((k, v))
    return k.new_zeros((2, k.shape[0], 1, *k.shape[2:]))


def _is_seen(route: Ring, step: int, is_causal: bool) -> bool:
    """Whether a local query attends to any key of the block held at a step."""
    own, owner = route.owner(0), route.owner(step)
    if not route.splits[own] or not route.splits[owner]:
        return False
    return owner <= own or not is_causal


def _merge(
    total: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys so far and those of one more block."""
    out = out.to(accumulation_dtype(out.dtype))
    if total is None:
        return out, lse
    share = torch.sigmoid(lse - total[1])  # of the new block in the sum of exponentials
    return torch.lerp(total[0], out, share.unsqueeze(-1)), torch.logaddexp(total[1], lse)


def _lse_like(q: torch.Tensor) -> torch.Tensor:
    """Room for a log-sum-exp, `(batch, heads, local length)`."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
