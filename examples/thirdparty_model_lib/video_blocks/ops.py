"""Two custom ops that communicate inside; a compiler sees neither exchange. Forward only."""

from __future__ import annotations

import torch
from torch.nn import functional as F


@torch.library.custom_op("video_blocks::attn_cp", mutates_args=())
def attn_cp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, group: str
) -> torch.Tensor:
    """Attention over tokens that are spread over the ranks of a group. Two all-to-alls.

    Args:
        q, k, v: ``(batch, tokens, heads, head dim)``, of equal shape on all ranks; the number of
            ranks divides the heads.
        lengths: ``(ranks,)``, integers: how many tokens of each rank are valid. The others are
            padding, and no valid token sees them.
        group: name of the process group.

    Returns:
        As q; rows of padding hold nothing of use.

    Raises:
        ValueError: a length is below 1 or above the number of tokens.
    """
    tokens, ranks = q.shape[1], lengths.numel()
    if not all(1 <= length <= tokens for length in lengths.tolist()):
        raise ValueError(f"lengths {lengths.tolist()} of {tokens} tokens on each rank")
    whole = _exchange(torch.stack((q, k, v)).unflatten(3, (ranks, -1)).movedim(3, 0), group)
    # (rank, q/k/v, batch, tokens, heads / ranks, dim) -> three of (batch, heads, all tokens, dim)
    whole_q, whole_k, whole_v = whole.permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
    valid = torch.arange(tokens, device=q.device) < lengths.to(q.device).unsqueeze(1)
    mixed = F.scaled_dot_product_attention(
        whole_q, whole_k, whole_v, attn_mask=valid.view(1, 1, 1, -1)
    )
    parts = _exchange(mixed.unflatten(2, (ranks, tokens)).movedim(2, 0), group)
    # (rank, batch, heads / ranks, tokens, dim) -> (batch, tokens, heads, dim)
    return parts.permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous()


@attn_cp.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, group: str
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("video_blocks::dispatch", mutates_args=())
def dispatch(
    tokens: torch.Tensor, in_splits: list[int], out_splits: list[int], group: str
) -> torch.Tensor:
    """Send rows to the ranks whose experts they go to. One all-to-all.

    Args:
        tokens: ``(sum(in_splits), width)``, sorted by the rank that gets them.
        in_splits: rows for each rank.
        out_splits: rows from each rank.
        group: name of the process group.

    Returns:
        ``(sum(out_splits), width)``, sorted by the rank that sent them.
    """
    sent = torch.ops._c10d_functional.all_to_all_single(
        tokens.contiguous(), out_splits, in_splits, group
    )
    received: torch.Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received


@dispatch.register_fake
def _(
    tokens: torch.Tensor, in_splits: list[int], out_splits: list[int], group: str
) -> torch.Tensor:
    return tokens.new_empty(sum(out_splits), tokens.shape[1])


def _exchange(x: torch.Tensor, group: str) -> torch.Tensor:
    """``(ranks, ...)``: slice i goes to rank i, and slice i of the result comes from there."""
    splits = [1] * x.shape[0]
    sent = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), splits, splits, group)
    received: torch.Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received
