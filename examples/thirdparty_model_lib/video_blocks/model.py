"""The model: each rank holds a part of one video, and one expert of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from video_blocks.ops import attn_cp, dispatch

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Sizes; the number of ranks divides `heads` and `tokens`."""

    channels: int = 16
    width: int = 128
    heads: int = 4
    blocks: int = 2
    tokens: int = 512
    """Of each rank; a shorter part of the video is padded to it."""


class VideoModel(nn.Module):
    """``(batch, local length, channels)`` to the same shape."""

    def __init__(self, config: VideoConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tokens = config.tokens
        self.proj_in = nn.Linear(config.channels, config.width, bias=False)
        self.blocks = nn.ModuleList(Block(config, group) for _ in range(config.blocks))
        self.proj_out = nn.Linear(config.width, config.channels, bias=False)

    def forward(self, video: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """``lengths``: ``(ranks,)``, the local length of each rank."""
        local = video.shape[1]
        if local < self.tokens:
            video = F.pad(video, (0, 0, 0, self.tokens - local))
        x = self.proj_in(video)
        for block in self.blocks:
            x = block(x, lengths)
        out: torch.Tensor = self.proj_out(x)[:, :local]
        return out

    def shared_parts(self) -> list[nn.Module]:
        """Modules whose weights are equal on all ranks: everything but the experts."""
        parts: list[nn.Module] = [self.proj_in, self.proj_out]
        for block in self.blocks:
            assert isinstance(block, Block)
            parts += [block.attention, block.router]
        return parts


class Block(nn.Module):
    """Attention, then an expert for each token; ``(batch, tokens, width)`` to the same shape."""

    def __init__(self, config: VideoConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group.group_name, group.size()
        self.attention = Attention(config, self.group)
        self.router = nn.Linear(config.width, self.ranks, bias=False)
        self.expert = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, lengths)
        tokens = x.flatten(0, 1)
        # Every expert takes the same number of tokens: those that favour it come first.
        order = self.router(tokens).argmax(-1).argsort(stable=True)
        share = [tokens.shape[0] // self.ranks] * self.ranks
        mine = dispatch(tokens[order], share, share, self.group)
        back = dispatch(self.expert(mine), share, share, self.group)
        out: torch.Tensor = x + back[order.argsort()].view_as(x)
        return out


class Attention(nn.Module):
    """Full attention over all ranks' tokens; ``(batch, tokens, width)`` to the same shape."""

    def __init__(self, config: VideoConfig, group: str) -> None:
        super().__init__()
        self.heads, self.group = config.heads, group
        self.norm = nn.LayerNorm(config.width)
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (proj(y).unflatten(-1, (self.heads, -1)) for proj in (self.q, self.k, self.v))
        out: torch.Tensor = self.out(attn_cp(q, k, v, lengths, self.group).flatten(2))
        return out
