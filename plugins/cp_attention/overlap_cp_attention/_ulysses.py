"""Ulysses attention: an all-to-all from sequence to heads, plain attention, an all-to-all back.

Source: DeepSpeed-Ulysses (Jacobs et al., 2023). Sharing key/value heads among ranks by repeating
them is from USP (Fang and Zhao, 2024). The code is our own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from overlap_core import register_custom_op
from overlap_core.errors import ConfigError

from ._autograd import connect
from ._block import accumulation_dtype, attend, attend_backward, fold_heads, repeat_heads
from ._checks import check_arguments
from ._names import ULYSSES, ULYSSES_BACKWARD
from ._replay import backward_inputs, forward_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ulysses", "ulysses_backward"]


@register_custom_op(ULYSSES, materialize_inputs=forward_inputs, has_internal_collective=True)
def ulysses(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp_split_sizes: list[int],
    group: str,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `(batch, local length, heads, head dim)`, and what backward needs of the scores.

    The second output is the log-sum-exp of this rank's heads over the whole sequence,
    `(batch, heads / ranks, total length)`. Issues two `all_to_all_single` on `group`.
    """
    check_arguments(ULYSSES, q, k, v, cp_split_sizes, group)
    _check_heads(ULYSSES, q, cp_split_sizes)
    k, v = _share(k, len(cp_split_sizes)), _share(v, len(cp_split_sizes))
    q_all, k_all, v_all = _to_heads((q, k, v), cp_split_sizes, group)
    out, lse = attend(q_all, k_all, v_all, is_causal, scale)
    (out,) = _to_sequence((out,), q.shape[1], cp_split_sizes, group)
    return out, lse.contiguous()


@ulysses.register_fake
def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp_split_sizes: list[int], *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[0], q.shape[2] // len(cp_split_sizes), sum(cp_split_sizes))
    lse = q.new_empty(shape, dtype=accumulation_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@register_custom_op(
    ULYSSES_BACKWARD, materialize_inputs=backward_inputs, has_internal_collective=True
)
def ulysses_backward(
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
    """Gradients of q, k and v in their shapes. Issues two `all_to_all_single` on `group`."""
    check_arguments(ULYSSES_BACKWARD, q, k, v, cp_split_sizes, group)
    _check_heads(ULYSSES_BACKWARD, q, cp_split_sizes)
    kv_heads = k.shape[2]
    k, v = _share(k, len(cp_split_sizes)), _share(v, len(cp_split_sizes))
    tensors = (grad, q, k, v, out)
    grad_all, q_all, k_all, v_all, out_all = _to_heads(tensors, cp_split_sizes, group)
    grads = attend_backward(grad_all, q_all, k_all, v_all, out_all, lse, is_causal, scale)
    grad_q, grad_k, grad_v = _to_sequence(grads, q.shape[1], cp_split_sizes, group)
    return grad_q, fold_heads(grad_k, kv_heads, 2), fold_heads(grad_v, kv_heads, 2)


connect(ulysses, ulysses_backward)


def _check_heads(op: str, q: torch.Tensor, splits: Sequence[int]) -> None:
    if q.shape[2] % len(splits):
        raise ConfigError(
            f"{op}: {q.shape[2]} query heads don't divide by the group size {len(splits)}: use "
            "fewer ranks, or ring_attention, which leaves heads together"
        )


def _share(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Repeat key or value heads until they divide by the group size."""
    times = ranks // math.gcd(x.shape[2], ranks)
    return repeat_heads(x, times, 2)


def _to_heads(
    tensors: Sequence[torch.Tensor], splits: Sequence[int], group: str
) -> tuple[torch.Tensor, ...]:
    """From `(batch, local length, n, dim)` each to `(batch, n / ranks, total length, dim)`."""
    size, length = len(splits), tensors[0].shape[1]
    parts = [x.unflatten(2, (size, -1)) for x in tensors]
    heads = [part.shape[3] for part in parts]
    sent = torch.cat(parts, dim=3).permute(2, 1, 0, 3, 4).flatten(0, 1)
    received = _all_to_all(sent, list(splits), [length] * size, group)
    return tuple(torch.split(received.permute(1, 2, 0, 3), heads, dim=1))


def _to_sequence(
    tensors: Sequence[torch.Tensor], length: int, splits: Sequence[int], group: str
) -> tuple[torch.Tensor, ...]:
    """From `(batch, n / ranks, total length, dim)` each to `(batch, local length, n, dim)`.

    Results are contiguous and share no memory, as an op's outputs must not.
    """
    size = len(splits)
    heads = [x.shape[1] for x in tensors]
    sent = torch.cat(tuple(tensors), dim=1).permute(2, 0, 1, 3)
    received = _all_to_all(sent, [length] * size, list(splits), group)
    parts = received.unflatten(0, (size, length)).permute(2, 1, 0, 3, 4).split(heads, dim=3)
    return tuple(part.clone(memory_format=torch.contiguous_format).flatten(2, 3) for part in parts)


def _all_to_all(x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
    """Exchange rows of the first dimension; the numbers of rows are by rank."""
    launched = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), received, sent, group)
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(launched)
    return result
