"""Matrix products of groups of rows, each with a matrix of its own: the local experts.

No communication inside. Where one expert's rows end is a value, not a shape, so that a replay
needs `materialize_inputs` all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from overlap_core import register_custom_op

from ._replay import MATERIALIZE, NAMESPACE

__all__ = ["grouped_mm", "grouped_mm_weight"]

_ALIGNMENT = 8
"""The GPU's kernel takes bfloat16 rows of a multiple of 16 bytes."""


@register_custom_op(
    f"{NAMESPACE}::grouped_mm", materialize_inputs=MATERIALIZE[f"{NAMESPACE}::grouped_mm"]
)
def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows by its matrix.

    Args:
        rows: `(rows, dim)`, sorted by expert.
        weight: `(experts, dim, hidden)`.
        ends: `(experts,)`, int32: where each expert's rows end; the last is `rows`.

    Returns:
        `(rows, hidden)`.
    """
    if _has_kernel(rows, rows.shape[1], weight.shape[2]):
        return F.grouped_mm(rows, weight, offs=ends)
    out = rows.new_zeros((rows.shape[0], weight.shape[2]))
    for expert, part in enumerate(_slices(ends)):
        torch.mm(rows[part], weight[expert], out=out[part])
    return out


@grouped_mm.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[2]))


@register_custom_op(
    f"{NAMESPACE}::grouped_mm_weight",
    materialize_inputs=MATERIALIZE[f"{NAMESPACE}::grouped_mm_weight"],
)
def grouped_mm_weight(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Gradient of `grouped_mm` in its weight.

    Args:
        rows: `(rows, dim)`, sorted by expert.
        grad: `(rows, hidden)`.
        ends: `(experts,)`, int32.

    Returns:
        `(experts, dim, hidden)`; 0 for an expert without rows.
    """
    if _has_kernel(rows, rows.shape[1], grad.shape[1]):
        out = F.grouped_mm(rows.t(), grad, offs=ends)
        has_rows = ends.diff(prepend=ends.new_zeros(1)) > 0
        # The kernel need not write where there is nothing to add up.
        return torch.where(has_rows[:, None, None], out, 0)
    out = rows.new_zeros((ends.numel(), rows.shape[1], grad.shape[1]))
    for expert, part in enumerate(_slices(ends)):
        torch.mm(rows[part].t(), grad[part], out=out[expert])
    return out


@grouped_mm_weight.register_fake
def _(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], grad.shape[1]))


def _has_kernel(rows: torch.Tensor, *sizes: int) -> bool:
    return (
        rows.is_cuda
        and rows.dtype is torch.bfloat16
        and rows.shape[0] > 0
        and all(size % _ALIGNMENT == 0 for size in sizes)
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


def _slices(ends: torch.Tensor) -> list[slice]:
    last = ends.tolist()
    return [slice(start, end) for start, end in zip([0, *last], last, strict=False)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    need_rows, need_weight, _ = ctx.needs_input_grad
    return (
        grouped_mm(grad, weight.transpose(1, 2), ends) if need_rows else None,
        grouped_mm_weight(rows, grad, ends) if need_weight else None,
        None,
    )


grouped_mm.register_autograd(_backward, setup_context=_save)
