"""Replay arguments whose routing metadata fits together, made from shapes alone.

Within a replay all ranks have the same shapes, so what depends on nothing else is equal on all of
them. Where both sides of an exchange must know the counts, every rank sends the same number of
rows to every other rank: the only counts that fit whatever the rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["COMMUNICATING", "MATERIALIZE", "NAMESPACE"]

NAMESPACE = "overlap_ep"

COMMUNICATING = frozenset(
    f"{NAMESPACE}::{name}"
    for name in ("dispatch", "combine", "combine_backward", "dispatch_padded", "combine_padded")
)
"""Ops that issue collectives. The padded ones have no metadata and need no special arguments."""


def _dispatch(
    x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int, local_experts: int, group: str
) -> tuple[Any, ...]:
    """Experts in turn. The counts travel, so they need not be equal between ranks."""
    import torch

    turns = torch.arange(expert_ids.numel(), device=expert_ids.device) % num_experts
    return x, turns.view(expert_ids.shape), num_experts, local_experts, group


def _combine(rows: torch.Tensor, counts: torch.Tensor, group: str) -> tuple[Any, ...]:
    return rows, _even_counts(counts, rows.shape[0]), group


def _combine_backward(
    grad: torch.Tensor, counts: torch.Tensor, rows: int, group: str
) -> tuple[Any, ...]:
    return grad, _even_counts(counts, min(grad.shape[0], rows)), rows, group


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> tuple[Any, ...]:
    return rows, weight, _even_ends(ends, rows.shape[0])


def _grouped_mm_weight(
    rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor
) -> tuple[Any, ...]:
    return rows, grad, _even_ends(ends, rows.shape[0])


def _even_counts(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """`(2, ranks, local experts)`: as many rows as divide by the ranks, the same for each pair."""
    import torch

    _, ranks, experts = counts.shape
    share, left = divmod(rows // ranks, experts)
    row = share + (torch.arange(experts, device=counts.device) < left).to(counts.dtype)
    return row.expand(counts.shape).contiguous()


def _even_ends(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """`(local experts,)`: where each expert's rows end when all have equally many."""
    import torch

    experts = ends.numel()
    return (torch.arange(1, experts + 1, device=ends.device) * rows // experts).to(ends.dtype)


MATERIALIZE: dict[str, Callable[..., tuple[Any, ...]]] = {
    f"{NAMESPACE}::dispatch": _dispatch,
    f"{NAMESPACE}::combine": _combine,
    f"{NAMESPACE}::combine_backward": _combine_backward,
    f"{NAMESPACE}::grouped_mm": _grouped_mm,
    f"{NAMESPACE}::grouped_mm_weight": _grouped_mm_weight,
}
"""By op: from generic arguments to consistent ones. None of them changes a shape."""
