"""Arguments with which the ops can be replayed: split sizes that fit the tensors.

Everything comes from shapes, so ranks that replay one structural key together pass equal split
sizes. Ranks of other local lengths have another key, which is not replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["backward_inputs", "forward_inputs"]


def forward_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp_split_sizes: list[int],
    group: str,
    is_causal: bool,
    scale: float | None,
) -> tuple[Any, ...]:
    """Arguments of a forward op in which every rank has as many rows as `q`."""
    splits = [q.shape[1]] * len(cp_split_sizes)
    return q, k, v, splits, group, is_causal, scale


def backward_inputs(
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
) -> tuple[Any, ...]:
    """Arguments of a backward op in which every rank has as many rows as `q`."""
    splits = [q.shape[1]] * len(cp_split_sizes)
    return grad, q, k, v, out, lse, splits, group, is_causal, scale
