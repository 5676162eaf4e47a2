"""Which expert a token goes to, and where its row lies. Plain code that a compiler sees through."""

from __future__ import annotations

import math

import torch

__all__ = ["assign_slots", "expert_capacity", "route", "sorted_positions"]


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick experts by softmax and top-k.

    The weights of several experts are scaled to a sum of 1 for each token; that of one expert
    stays its probability, since a constant 1 would teach the router nothing.

    Args:
        logits: `(tokens, experts)`; the softmax is taken in float32.
        top_k: experts for each token.

    Returns:
        Weights in float32 and expert ids in int64, both `(tokens, top_k)`.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    weights, expert_ids = torch.topk(probabilities, top_k, dim=-1)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, expert_ids


def sorted_positions(expert_ids: torch.Tensor) -> torch.Tensor:
    """Place of each assignment when all are sorted by expert, ties in the order of tokens.

    Args:
        expert_ids: `(tokens, top_k)`.

    Returns:
        `(tokens, top_k)`, int64, a permutation of all places.
    """
    order = expert_ids.flatten().argsort(stable=True)
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places).view(expert_ids.shape)


def assign_slots(expert_ids: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    """Give each assignment one of its expert's slots, in the order of tokens, while there are any.

    Args:
        expert_ids: `(tokens, top_k)`.
        num_experts: of all ranks together.
        capacity: slots of each expert for the tokens of this rank.

    Returns:
        `(tokens, top_k)`, int64: `expert * capacity + slot`, or `num_experts * capacity` for an
        assignment that is dropped.
    """
    flat = expert_ids.flatten()
    counts = torch.zeros(num_experts, dtype=flat.dtype, device=flat.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    slots = sorted_positions(expert_ids) - starts[expert_ids]
    dropped = num_experts * capacity
    return torch.where(slots < capacity, expert_ids * capacity + slots, dropped)


def expert_capacity(tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Slots of each expert: `factor` times an even share of the assignments, rounded up.

    Use one number of tokens for all ranks, such as the most that a rank can have: ranks must
    agree on the capacity.
    """
    return math.ceil(factor * tokens * top_k / num_experts)
