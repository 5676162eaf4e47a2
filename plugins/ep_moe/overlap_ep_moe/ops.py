"""Dispatch and combine as custom ops with their communication inside.

No output has a size that is one rank's own: what depends on the number of tokens is left to the
run time, so that ranks with different token counts have one skeleton even if each compiles with
its own count as a constant.

Source: expert parallelism of GShard (Lepikhin et al., 2020; capacity and dropped tokens) and
MegaBlocks (Gale et al., 2022; no dropped tokens). The code is our own.
"""

from __future__ import annotations

from typing import Any

import torch

from overlap_core import register_custom_op

from ._exchange import (
    all_to_all,
    exchange_counts,
    rows_per_rank,
    to_expert_order,
    to_rank_order,
)
from ._replay import MATERIALIZE, NAMESPACE
from .routing import sorted_positions

__all__ = ["combine", "combine_backward", "combine_padded", "dispatch", "dispatch_padded"]


@register_custom_op(
    f"{NAMESPACE}::dispatch",
    materialize_inputs=MATERIALIZE[f"{NAMESPACE}::dispatch"],
    has_internal_collective=True,
)
def dispatch(
    x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int, local_experts: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each token to its experts, wherever they are; nothing is dropped.

    Issues two all-to-alls on `group`, of counts and of tokens; the host waits for the first.

    Args:
        x: `(tokens, dim)`; ranks may have different numbers of tokens, also none.
        expert_ids: `(tokens, top_k)`, int64, from 0 to `num_experts - 1`.
        num_experts: of all ranks together; rank `r` holds those from `r * local_experts` on.
        local_experts: of each rank; ranks times `local_experts` is `num_experts`.
        group: name of the process group (`ProcessGroup.group_name`).

    Returns:
        `(rows, dim)`, the tokens for this rank's experts, sorted by expert, then by the rank that
        they come from; and `(2, ranks, local_experts)`, int64, the rows that this rank sent to and
        received from each rank, for `combine`.

    Raises:
        ValueError: an expert that doesn't exist.
    """
    flat = expert_ids.flatten()
    sent = torch.bincount(flat, minlength=num_experts)
    if sent.numel() > num_experts:
        raise ValueError(
            f"{NAMESPACE}::dispatch: expert_ids go up to {sent.numel() - 1}; there are "
            f"{num_experts} experts"
        )
    counts = exchange_counts(sent.view(-1, local_experts), group)
    to_send, to_receive = counts.tolist()
    order = flat.argsort(stable=True)
    rows = all_to_all(
        x[order // expert_ids.shape[1]],
        rows_per_rank(to_receive),
        rows_per_rank(to_send),
        group,
    )
    return to_expert_order(rows, to_receive), counts


@dispatch.register_fake
def _(
    x: torch.Tensor, expert_ids: torch.Tensor, num_experts: int, local_experts: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    counts = expert_ids.new_empty((2, num_experts // local_experts, local_experts))
    return x.new_empty((rows, x.shape[1])), counts


@register_custom_op(
    f"{NAMESPACE}::combine",
    materialize_inputs=MATERIALIZE[f"{NAMESPACE}::combine"],
    has_internal_collective=True,
)
def combine(rows: torch.Tensor, counts: torch.Tensor, group: str) -> torch.Tensor:
    """Send rows back to the ranks that dispatched them. Issues one all-to-all on `group`.

    Args:
        rows: `(rows, dim)` in the order of `dispatch`; rows beyond those counted are ignored.
        counts: `(2, ranks, local experts)`, of `dispatch`.
        group: name of the process group.

    Returns:
        `(tokens * top_k, dim)`, sorted by expert; `sorted_positions` says where each assignment's
        row is.
    """
    sent, received = counts.tolist()
    send = rows_per_rank(received)
    ordered = to_rank_order(rows[: sum(send)], received)
    return all_to_all(ordered, rows_per_rank(sent), send, group)


@combine.register_fake
def _(rows: torch.Tensor, counts: torch.Tensor, group: str) -> torch.Tensor:
    # As many as this rank has tokens, which other ranks must not see in the skeleton.
    back = torch.library.get_ctx().new_dynamic_size()
    return rows.new_empty((back, rows.shape[1]))


@register_custom_op(
    f"{NAMESPACE}::combine_backward",
    materialize_inputs=MATERIALIZE[f"{NAMESPACE}::combine_backward"],
    has_internal_collective=True,
)
def combine_backward(
    grad: torch.Tensor, counts: torch.Tensor, rows: int, group: str
) -> torch.Tensor:
    """Gradient of `combine` in its rows: a dispatch with known counts, of one all-to-all.

    Args:
        grad: `(tokens * top_k, dim)`, sorted by expert.
        counts: `(2, ranks, local experts)`, of `dispatch`.
        rows: length of the result; what lies beyond the counts is 0.
        group: name of the process group.

    Returns:
        `(rows, dim)`, in the order of `dispatch`.
    """
    sent, received = counts.tolist()
    send = rows_per_rank(sent)
    arrived = all_to_all(grad[: sum(send)], rows_per_rank(received), send, group)
    ordered = to_expert_order(arrived, received)
    missing = rows - ordered.shape[0]
    return torch.cat((ordered, ordered.new_zeros((missing, grad.shape[1])))) if missing else ordered


@combine_backward.register_fake
def _(grad: torch.Tensor, counts: torch.Tensor, rows: int, group: str) -> torch.Tensor:
    return grad.new_empty((rows, grad.shape[1]))


def _save_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, expert_ids, _, _, ctx.group = inputs
    ctx.save_for_backward(expert_ids, output[1])


def _dispatch_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    expert_ids, counts = ctx.saved_tensors
    back = combine(grad, counts, ctx.group)
    grads = back[sorted_positions(expert_ids)]
    return grads.sum(1), None, None, None, None


def _save_for_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, counts, ctx.group = inputs
    ctx.rows = rows.shape[0]
    ctx.save_for_backward(counts)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (counts,) = ctx.saved_tensors
    return combine_backward(grad, counts, ctx.rows, ctx.group), None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_save_for_dispatch)
combine.register_autograd(_combine_backward, setup_context=_save_for_combine)


@register_custom_op(f"{NAMESPACE}::dispatch_padded", has_internal_collective=True)
def dispatch_padded(slots: torch.Tensor, local_experts: int, group: str) -> torch.Tensor:
    """Send each expert's slots to the rank that holds it. Issues one all-to-all on `group`.

    Args:
        slots: `(experts, capacity, dim)`; the capacity is equal on all ranks.
        local_experts: of each rank.
        group: name of the process group.

    Returns:
        `(local_experts, ranks * capacity, dim)`, by the rank that the slots come from.
    """
    experts, capacity, dim = slots.shape
    ranks = experts // local_experts
    each = [local_experts] * ranks
    arrived = all_to_all(slots, each, each, group).view(ranks, local_experts, capacity, dim)
    return arrived.transpose(0, 1).reshape(local_experts, ranks * capacity, dim)


@dispatch_padded.register_fake
def _(slots: torch.Tensor, local_experts: int, group: str) -> torch.Tensor:
    experts, capacity, dim = slots.shape
    return slots.new_empty((local_experts, experts // local_experts * capacity, dim))


@register_custom_op(f"{NAMESPACE}::combine_padded", has_internal_collective=True)
def combine_padded(rows: torch.Tensor, num_experts: int, group: str) -> torch.Tensor:
    """Send slots back to the ranks that they came from. Issues one all-to-all on `group`.

    Args:
        rows: `(local experts, ranks * capacity, dim)`, as `dispatch_padded` gives them.
        num_experts: of all ranks together.
        group: name of the process group.

    Returns:
        `(num_experts, capacity, dim)`.
    """
    local_experts, slots, dim = rows.shape
    ranks = num_experts // local_experts
    by_rank = rows.view(local_experts, ranks, slots // ranks, dim).transpose(0, 1)
    each = [local_experts] * ranks
    return all_to_all(by_rank.reshape(num_experts, slots // ranks, dim), each, each, group)


@combine_padded.register_fake
def _(rows: torch.Tensor, num_experts: int, group: str) -> torch.Tensor:
    local_experts, slots, dim = rows.shape
    return rows.new_empty((num_experts, slots // (num_experts // local_experts), dim))


def _save_for_dispatch_padded(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.experts, ctx.group = inputs[0].shape[0], inputs[2]


def _dispatch_padded_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return combine_padded(grad, ctx.experts, ctx.group), None, None


def _save_for_combine_padded(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.local_experts, ctx.group = inputs[0].shape[0], inputs[2]


def _combine_padded_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return dispatch_padded(grad, ctx.local_experts, ctx.group), None, None


dispatch_padded.register_autograd(
    _dispatch_padded_backward, setup_context=_save_for_dispatch_padded
)
combine_padded.register_autograd(_combine_padded_backward, setup_context=_save_for_combine_padded)
