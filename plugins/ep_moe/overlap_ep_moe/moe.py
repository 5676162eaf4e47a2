"""The mixture of experts as a module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from overlap_core.errors import ConfigError

from .grouped import grouped_mm
from .ops import combine, combine_padded, dispatch, dispatch_padded
from .routing import assign_slots, route, sorted_positions

__all__ = ["ExpertParallelMoE"]


class ExpertParallelMoE(nn.Module):
    """`(..., dim)` to the same shape; each rank of `group` holds an equal part of the experts.

    An expert is `silu(x @ up) @ down`. The router and whatever else is replicated must be equal on
    all ranks; their gradients are those of this rank's tokens. The gradients of the experts are
    those of all ranks' tokens.

    Args:
        dim: of the tokens.
        hidden: of the experts.
        num_experts: of all ranks together.
        top_k: experts for each token.
        group: its ranks may have different numbers of tokens; None: the default group.
        capacity: assignments that an expert takes from each rank; what is more is dropped. Equal
            on all ranks; `expert_capacity` helps to choose it. None: nothing is dropped.
        dtype, device: of the parameters.

    Raises:
        ConfigError: the experts don't divide by the ranks, or `top_k` or `capacity` is no count.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        group: dist.ProcessGroup | None = None,
        *,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        chosen = dist.group.WORLD if group is None else group
        if chosen is None:
            raise ConfigError("ExpertParallelMoE needs a process group: call init_process_group")
        ranks = dist.get_world_size(chosen)
        if num_experts % ranks:
            raise ConfigError(f"num_experts={num_experts} doesn't divide by {ranks} ranks")
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"top_k={top_k}: expected 1 to num_experts={num_experts}")
        if capacity is not None and capacity < 1:
            raise ConfigError(f"capacity={capacity}: expected at least 1, or None")
        self.num_experts = num_experts
        self.local_experts = num_experts // ranks
        self.top_k = top_k
        self.capacity = capacity
        self.group_name: str = chosen.group_name
        self.router = nn.Linear(dim, num_experts, bias=False, dtype=dtype, device=device)
        shape = (self.local_experts, dim, hidden)
        self.up = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.down = nn.Parameter(
            torch.empty((self.local_experts, hidden, dim), dtype=dtype, device=device)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this rank's experts anew; seed ranks differently, or experts are copies."""
        self.router.reset_parameters()
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: `(..., dim)`. All ranks of the group must call it, also one without tokens."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, expert_ids = route(self.router(tokens), self.top_k)
        apply = self._keep_all if self.capacity is None else self._drop_beyond
        parts = apply(tokens, expert_ids)
        out = (parts * weights.unsqueeze(-1)).sum(1)
        return out.to(x.dtype).reshape(x.shape)

    def _keep_all(self, tokens: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """`(tokens, top_k, dim)`: what each token's experts make of it."""
        rows, counts = dispatch(
            tokens, expert_ids, self.num_experts, self.local_experts, self.group_name
        )
        ends = counts[1].sum(0).cumsum(0).to(torch.int32)
        rows = grouped_mm(F.silu(grouped_mm(rows, self.up, ends)), self.down, ends)
        back: torch.Tensor = combine(rows, counts, self.group_name)
        return back[sorted_positions(expert_ids)]

    def _drop_beyond(self, tokens: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """The same, with zeros for what was dropped."""
        assert self.capacity is not None
        slots = assign_slots(expert_ids, self.num_experts, self.capacity)
        total = self.num_experts * self.capacity
        copies = tokens.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, tokens.shape[-1])
        # One row more, for whatever is dropped.
        filled = tokens.new_zeros((total + 1, tokens.shape[-1]))
        filled = filled.index_copy(0, slots.flatten(), copies)[:total]
        rows = dispatch_padded(
            filled.view(self.num_experts, self.capacity, -1), self.local_experts, self.group_name
        )
        rows = torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)
        back = combine_padded(rows, self.num_experts, self.group_name).flatten(0, 1)
        kept = (slots < total).unsqueeze(-1)
        return torch.where(kept, back[slots.clamp(max=total - 1)], 0)
