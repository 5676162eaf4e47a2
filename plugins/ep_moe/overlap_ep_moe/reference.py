"""A mixture of experts on one rank, as plainly as possible: what the tests compare with."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .routing import route

__all__ = ["mixture_of_experts"]


def mixture_of_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    capacity: int | None = None,
) -> torch.Tensor:
    """Each token's weighted sum over its experts, expert by expert, without any permutation.

    Args:
        x: `(tokens, dim)`.
        router: `(experts, dim)`.
        up: `(experts, dim, hidden)`, of all experts.
        down: `(experts, hidden, dim)`.
        top_k: experts for each token.
        capacity: tokens that an expert takes, first come first served; None: all.

    Returns:
        `(tokens, dim)`; a token that all its experts dropped is 0.
    """
    weights, expert_ids = route(x @ router.t(), top_k)
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in range(router.shape[0]):
        chosen = (expert_ids == expert).flatten()
        if capacity is not None:
            chosen = chosen & (chosen.cumsum(0) <= capacity)
        chosen = chosen.view(expert_ids.shape)
        token = chosen.any(1)
        weight = (weights * chosen).sum(1)[token]
        y = F.silu(x[token] @ up[expert]) @ down[expert]
        out = out.index_add(0, token.nonzero().flatten(), y.to(out.dtype) * weight[:, None])
    return out.to(x.dtype)
