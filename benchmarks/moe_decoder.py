"""The other benchmark model: a decoder with a mixture of experts in each layer.

Causal attention over this rank's own sequence, then a dense feed-forward that all tokens pass
beside the experts that each is routed to. Dense weights are sharded; the experts are spread over
the same ranks and stay whole, and tokens travel to them in the ops of the plugin `overlap-ep-moe`.
10 dense parameters a layer; with the default sizes 84 MB in bf16 are gathered for one. Embeddings
and rotary embeddings are left out.

Source: a shared expert beside many small routed ones is DeepSeekMoE's (Dai et al., 2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from overlap_ep_moe import ExpertParallelMoE, expert_capacity
from torch import nn
from torch.nn import functional as F
from video_transformer import fill

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

__all__ = ["MoeConfig", "MoeDecoder", "dense_parts", "example_input"]


@attrs.frozen(kw_only=True)
class MoeConfig:
    """Sizes of a `MoeDecoder`; `tokens` is the length of each rank's own sequence.

    Attributes:
        ffn_dim: of the dense feed-forward.
        experts: of all ranks together.
        capacity_factor: an expert takes so many times an even share of each rank's tokens and the
            rest is dropped; None: nothing is dropped, and the host waits for the counts.
    """

    tokens: int
    n_blocks: int = 8
    dim: int = 2048
    n_heads: int = 16
    ffn_dim: int = 4096
    experts: int = 32
    expert_dim: int = 1024
    top_k: int = 4
    capacity_factor: float | None = 1.25
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def capacity(self) -> int | None:
        """Assignments that an expert takes from each rank."""
        if self.capacity_factor is None:
            return None
        tokens = self.batch * self.tokens
        return expert_capacity(tokens, self.experts, self.top_k, self.capacity_factor)


class MoeDecoder(nn.Module):
    """`(batch, tokens, dim)` to the same shape. Forward only.

    Args:
        config: the sizes.
        device: where the parameters are made, in `config.dtype`. Those that aren't experts get
            equal values on all ranks.
        group: the expert-parallel group.
    """

    def __init__(self, config: MoeConfig, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(Layer(config, group) for _ in range(config.n_blocks))
        self.to_empty(device=device)
        self.requires_grad_(False)
        fill(self, config.seed, device)
        rank = group.rank()
        for number, block in enumerate(self.blocks):
            generator = torch.Generator(device=device)
            generator.manual_seed(config.seed + 1 + number + rank * config.n_blocks)
            assert isinstance(block, Layer)
            for weight in (block.moe.up, block.moe.down):
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers; all ranks must call it, as tokens travel."""
        for block in self.blocks:
            x = block(x)
        return x


class Layer(nn.Module):
    """Attention, then a dense feed-forward beside the experts, each behind a norm."""

    def __init__(self, config: MoeConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        dim, dtype = config.dim, config.dtype
        self.n_heads = config.n_heads
        self.norm_attention = nn.RMSNorm(dim, eps=1e-6, dtype=dtype)
        self.q = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.k = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.v = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.out = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.norm_ffn = nn.RMSNorm(dim, eps=1e-6, dtype=dtype)
        self.gate = nn.Linear(dim, config.ffn_dim, bias=False, dtype=dtype)
        self.up = nn.Linear(dim, config.ffn_dim, bias=False, dtype=dtype)
        self.down = nn.Linear(config.ffn_dim, dim, bias=False, dtype=dtype)
        self.moe = ExpertParallelMoE(
            dim,
            config.expert_dim,
            config.experts,
            config.top_k,
            group,
            capacity=config.capacity,
            dtype=dtype,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, tokens, dim)` to the same shape."""
        x = x + self._attend(self.norm_attention(x))
        y = self.norm_ffn(x)
        out: torch.Tensor = x + self.moe(y) + self.down(F.silu(self.gate(y)) * self.up(y))
        return out

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def dense_parts(model: MoeDecoder) -> Iterator[nn.Module]:
    """The modules whose parameters are equal on all ranks: everything but the experts."""
    for block in model.blocks:
        for child in block.children():
            yield child.router if isinstance(child, ExpertParallelMoE) else child


def example_input(config: MoeConfig, device: torch.device, rank: int) -> torch.Tensor:
    """`(batch, tokens, dim)`, different on each rank."""
    generator = torch.Generator(device=device).manual_seed(1_000 + rank)
    shape = (config.batch, config.tokens, config.dim)
    return torch.randn(shape, generator=generator, device=device, dtype=config.dtype)
