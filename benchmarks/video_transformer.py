"""The benchmark model: a stack of video diffusion transformer blocks as in Wan 2.x.

Self-attention runs under Ulysses context parallelism inside one opaque custom op; cross-attention
goes to text tokens; a time embedding and a table give shift, scale and gate. Sizes default to
those of Wan 2.2 5B. 18 parameters a block, so 108 weight gathers with 6 blocks. Rotary embeddings,
patch embedding and the output head are left out: they add no weight worth a gather.

Inference takes the attention of `overlap_core.testing`, training that of the plugin
`overlap-cp-attention`, whose backward doesn't write the scores to memory.

Source: the block is that of Wan 2.x (Apache-2.0) as published; the code is our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from overlap_core.testing.ulysses import ulysses_attention

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Block",
    "VideoConfig",
    "VideoTransformer",
    "detach_shards",
    "example_inputs",
    "fill",
    "resident_bytes",
]


@attrs.frozen(kw_only=True)
class VideoConfig:
    """Sizes of a `VideoTransformer`; `tokens` is the local length of each rank.

    Attributes:
        wan_table: keep the modulation table as `(1, 6, dim)`, as Wan does. Over more than one rank
            its shard is empty on all ranks but the first, so the ranks' graphs differ in compute.
            False: `(6 * dim,)`, which shards evenly, so that all ranks compile the same graph.
        trains: parameters require gradients, and attention has a backward.
    """

    tokens: int
    n_blocks: int = 6
    dim: int = 3072
    n_heads: int = 24
    ffn_dim: int = 14336
    text_tokens: int = 512
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    wan_table: bool = False
    trains: bool = False
    seed: int = 0


class VideoTransformer(nn.Module):
    """`(x, text, time)` to the shape of `x`.

    Args:
        config: the sizes.
        device: where the parameters are made, in `config.dtype`. All ranks get equal values.
        group: the context-parallel group, all of which hold `config.tokens` tokens.
    """

    def __init__(self, config: VideoConfig, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.blocks = nn.ModuleList(Block(config, group) for _ in range(config.n_blocks))
        self.to_empty(device=device)
        self.requires_grad_(config.trains)
        fill(self, config.seed, device)

    def forward(self, x: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Run all blocks.

        Args:
            x: `(batch, tokens, dim)`, this rank's part of the sequence.
            text: `(batch, text tokens, dim)`, equal on all ranks.
            time: `(batch, 6, dim)`, the projected time embedding, equal on all ranks.
        """
        for block in self.blocks:
            x = block(x, text, time)
        return x


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward, the first and last of them modulated."""

    def __init__(self, config: VideoConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        dim, dtype = config.dim, config.dtype
        self.dim = dim
        shape = (1, 6, dim) if config.wan_table else (6 * dim,)
        self.table = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.self_attention = SelfAttention(config, group)
        self.norm_cross = nn.LayerNorm(dim, bias=False, dtype=dtype)
        self.cross_attention = CrossAttention(config)
        self.up = nn.Linear(dim, config.ffn_dim, dtype=dtype)
        self.down = nn.Linear(config.ffn_dim, dim, dtype=dtype)

    def forward(self, x: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Shapes as in `VideoTransformer.forward`."""
        table = self.table.view(1, 6, self.dim)
        parts = (table.float() + time.float()).chunk(6, dim=1)
        attention_shift, attention_scale, attention_gate, ffn_shift, ffn_scale, ffn_gate = parts
        y = self._modulated(x, attention_shift, attention_scale)
        x = (x.float() + self.self_attention(y).float() * attention_gate).to(x.dtype)
        x = x + self.cross_attention(self.norm_cross(x), text)
        y = self._modulated(x, ffn_shift, ffn_scale)
        y = self.down(F.gelu(self.up(y), approximate="tanh"))
        out: torch.Tensor = (x.float() + y.float() * ffn_gate).to(x.dtype)
        return out

    def _modulated(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x.float(), (self.dim,))
        return (y * (1 + scale) + shift).to(x.dtype)


class _Attention(nn.Module):
    """The six parameters that both kinds of attention have."""

    def __init__(self, config: VideoConfig) -> None:
        super().__init__()
        dim, dtype = config.dim, config.dtype
        self.n_heads = config.n_heads
        self.q = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.k = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.v = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.out = nn.Linear(dim, dim, bias=False, dtype=dtype)
        self.norm_q = nn.RMSNorm(dim, eps=1e-6, dtype=dtype)  # over all heads, as Wan does
        self.norm_k = nn.RMSNorm(dim, eps=1e-6, dtype=dtype)

    def _heads(
        self, x: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of `x`, keys and values of `source`: `(batch, length, heads, head dim)`."""
        shape = (self.n_heads, -1)
        return (
            self.norm_q(self.q(x)).unflatten(-1, shape),
            self.norm_k(self.k(source)).unflatten(-1, shape),
            self.v(source).unflatten(-1, shape),
        )


class SelfAttention(_Attention):
    """Full attention over the sequence of all ranks: one custom op with two all-to-alls inside."""

    def __init__(self, config: VideoConfig, group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self.splits = [config.tokens] * dist.get_world_size(group)
        self.group_name = group.group_name
        self.attend = _differentiable_attention() if config.trains else ulysses_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, tokens, dim)` to the same shape."""
        q, k, v = self._heads(x, x)
        y = self.attend(q, k, v, self.splits, self.group_name)
        out: torch.Tensor = self.out(y.flatten(2))
        return out


def _differentiable_attention() -> Callable[..., torch.Tensor]:
    """The plugin's attention, with the arguments of `ulysses_attention` of `overlap_core`."""
    from overlap_cp_attention import ulysses_attention as attention

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: list[int], group: str
    ) -> torch.Tensor:
        return attention(q, k, v, group=group, cp_split_sizes=splits)

    return attend


class CrossAttention(_Attention):
    """Attention to the text, which every rank holds whole: no communication."""

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """`(batch, tokens, dim)` and `(batch, text tokens, dim)` to the shape of the first."""
        q, k, v = self._heads(x, text)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


@torch.no_grad()
def fill(model: nn.Module, seed: int, device: torch.device) -> None:
    """Random values, made on the device; activations keep their order of magnitude in bf16."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        elif "norm" in name:
            parameter.normal_(1.0, 0.02, generator=generator)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def example_inputs(
    config: VideoConfig, device: torch.device, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(x, text, time)` for `VideoTransformer`; `x` differs between ranks."""
    own = torch.Generator(device=device).manual_seed(1_000 + rank)
    shared = torch.Generator(device=device).manual_seed(999)

    def noise(length: int, generator: torch.Generator) -> torch.Tensor:
        shape = (config.batch, length, config.dim)
        return torch.randn(shape, generator=generator, device=device, dtype=config.dtype)

    return (
        noise(config.tokens, own),
        noise(config.text_tokens, shared),
        0.1 * noise(6, shared),
    )


@torch.no_grad()
def detach_shards(model: nn.Module) -> None:
    """Give each shard memory of its own, so that the full parameters it was cut from are freed."""
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in list(parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > local.numel() * local.itemsize:
                copy = DTensor.from_local(
                    local.clone(),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                parameters[name] = nn.Parameter(copy, requires_grad=parameter.requires_grad)


def resident_bytes(model: nn.Module) -> int:
    """Bytes of the parameters, or of their shards, on this rank."""
    total = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += local.numel() * local.itemsize
    return total
