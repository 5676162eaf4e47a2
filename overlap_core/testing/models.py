"""A small sharded-friendly transformer with context-parallel attention, for demos and tests.

Diffusion-like: continuous inputs, full attention. Its weights are read by plain ``nn`` modules, so
that ``shard_module`` turns each of them into a gather; its attention is the opaque op of
``ulysses``. A knob makes the ranks' graphs differ in ways that still run.
"""

from __future__ import annotations

import math
from typing import Literal

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from overlap_core.errors import ConfigError
from overlap_core.testing.ulysses import ulysses_attention, visible_ulysses_attention

Diverge = Literal["none", "compute", "skeleton", "count"]


@attrs.frozen(kw_only=True)
class TransformerConfig:
    """Sizes of a ``Transformer``.

    Attributes:
        modulation: each block also has a ``(1, dim)`` parameter, as video transformers do. Over
            more than one rank its shard is empty on all ranks but the first, so the ranks' graphs
            differ in compute even with ``diverge="none"``.
        opaque_attention: False: the all-to-alls of attention are in the graph; forward only.
        diverge: how the graph of the last rank of the context-parallel group differs:
            ``"compute"``: extra matmul and sort in every block, no communication;
            ``"skeleton"``: one more attention op, with its collectives on a group of that rank
            alone, in the middle block;
            ``"count"``: one more weight gather, on a group of that rank alone, in the middle block.
        seed: of the weights; they are equal on all ranks whatever ``diverge`` says.
    """

    n_blocks: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    dim: int = 128
    n_heads: int = 4
    ffn_dim: int = 256
    in_dim: int = 16
    modulation: bool = False
    opaque_attention: bool = True
    diverge: Diverge = attrs.field(
        default="none", validator=attrs.validators.in_(("none", "compute", "skeleton", "count"))
    )
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ConfigError(f"dim {self.dim} doesn't divide by n_heads {self.n_heads}")

    @property
    def n_parameters(self) -> int:
        """The number of parameters, which is the number of gathers of one forward pass."""
        return self.n_blocks * (9 if self.modulation else 8) + 3


class Transformer(nn.Module):
    """``(batch, local length, in_dim)`` to the same shape.

    With ``diverge="skeleton"`` or ``"count"`` every rank of the world must build it, as that makes
    process groups.

    Args:
        group: context-parallel group; None: plain attention on this process alone.

    Raises:
        ConfigError: the heads don't divide by the group size.
    """

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.group_size = 1 if group is None else dist.get_world_size(group)
        self.group_rank = 0 if group is None else dist.get_rank(group)
        if config.n_heads % self.group_size:
            raise ConfigError(
                f"n_heads {config.n_heads} doesn't divide by the group size {self.group_size}"
            )
        group_name = None if group is None else group.group_name
        alone = None
        if group is not None and config.diverge in ("skeleton", "count"):
            alone = _group_of_one()
        # The extras draw from a generator of their own: the weights stay equal over ranks.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.proj_in = nn.Linear(config.in_dim, config.dim, bias=False)
            self.blocks = nn.ModuleList(Block(config, group_name) for _ in range(config.n_blocks))
            self.norm_out = nn.LayerNorm(config.dim, bias=False)
            self.proj_out = nn.Linear(config.dim, config.in_dim, bias=False)
        if group is not None and self.group_rank == self.group_size - 1:
            self._diverge(config, alone)

    def _diverge(self, config: TransformerConfig, alone: str | None) -> None:
        middle = config.n_blocks // 2
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if config.diverge == "compute":
                block.extra = ExtraCompute(config)
            elif config.diverge == "skeleton" and index == middle:
                assert alone is not None
                block.extra = ExtraAttention(config, alone)
            elif config.diverge == "count" and index == middle:
                assert alone is not None
                block.extra = ExtraGather(config, alone)

    def forward(self, x: torch.Tensor, splits: list[int] | None = None) -> torch.Tensor:
        """``x``: ``(batch, local length, in_dim)``; ``splits``: the ranks' local lengths.

        Without ``splits`` all ranks must hold the same length. Under
        ``torch.compile(dynamic=True)`` the local length is ``splits[rank]``, so that each rank's
        graph has symbol names of its own.
        """
        if splits is None:
            splits = [x.shape[1]] * self.group_size
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x, splits, splits[self.group_rank])
        out: torch.Tensor = self.proj_out(self.norm_out(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm; ``(batch, local length, dim)`` to the same shape."""

    def __init__(self, config: TransformerConfig, group_name: str | None) -> None:
        super().__init__()
        dim = config.dim
        self.n_heads = config.n_heads
        self.group_name = group_name
        self.attend = ulysses_attention if config.opaque_attention else visible_ulysses_attention
        self.norm_attention = nn.LayerNorm(dim, bias=False)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.norm_mlp = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, dim, bias=False)
        self.modulation = nn.Parameter(torch.randn(1, dim) * 0.02) if config.modulation else None
        self.extra: nn.Module | None = None

    def forward(self, x: torch.Tensor, splits: list[int], length: int) -> torch.Tensor:
        y = self.norm_attention(x)
        shape = (x.shape[0], length, self.n_heads, -1)
        q, k, v = (proj(y).view(shape) for proj in (self.q, self.k, self.v))
        if self.group_name is None:
            heads = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
            attended = heads.transpose(1, 2)
        else:
            attended = self.attend(q, k, v, splits, self.group_name)
        x = x + self.o(attended.flatten(2))
        if self.extra is not None:
            x = self.extra(x, length)
        y = self.norm_mlp(x)
        modulation = self.modulation  # read once: each read is a gather
        if modulation is not None:
            y = y + modulation
        out: torch.Tensor = x + self.down(F.gelu(self.up(y)))
        return out


class ExtraCompute(nn.Module):
    """Two more nodes that Inductor cannot fuse: a small matmul and a sort."""

    probe: torch.Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.register_buffer("probe", _noise(config.dim, 16))

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        ordered = torch.sort(x @ self.probe, dim=-1).values
        result: torch.Tensor = x + 1e-3 * ordered.amax(-1, keepdim=True)
        return result


class ExtraAttention(nn.Module):
    """One more attention op, on a group of this rank alone: it can wait for nobody."""

    def __init__(self, config: TransformerConfig, alone: str) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.alone = alone

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        heads = x.view(x.shape[0], length, self.n_heads, -1)
        attended: torch.Tensor = ulysses_attention(heads, heads, heads, [length], self.alone)
        return x + 1e-3 * attended.flatten(2)


class ExtraGather(nn.Module):
    """One more weight gather, on a group of this rank alone.

    Written as the functional collective, as DTensor leaves out a gather over one rank.
    """

    weight: torch.Tensor

    def __init__(self, config: TransformerConfig, alone: str) -> None:
        super().__init__()
        self.alone = alone
        self.register_buffer("weight", _noise(config.dim, config.dim))

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        launched = torch.ops._c10d_functional.all_gather_into_tensor(self.weight, 1, self.alone)
        weight: torch.Tensor = torch.ops._c10d_functional.wait_tensor(launched)
        result: torch.Tensor = x + 1e-3 * F.linear(x, weight)
        return result


def _noise(*shape: int) -> torch.Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return noise / math.sqrt(shape[0])


def _group_of_one() -> str:
    """Name of a process group of this rank alone. Every rank of the world must call it."""
    own, _all = dist.new_subgroups(group_size=1)
    name: str = own.group_name
    return name


def example_input(
    config: TransformerConfig, lengths: list[int], rank: int, *, batch: int = 1
) -> torch.Tensor:
    """This rank's part, ``(batch, lengths[rank], in_dim)``, of one sequence equal on all ranks."""
    generator = torch.Generator().manual_seed(config.seed + 1)
    whole = torch.randn(batch, sum(lengths), config.in_dim, generator=generator)
    start = sum(lengths[:rank])
    return whole[:, start : start + lengths[rank]].contiguous()
