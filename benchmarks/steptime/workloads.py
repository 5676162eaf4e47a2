"""What is measured: a model at one size, what a step of it is, and which weights are sharded."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import attrs
from video_transformer import VideoConfig, VideoTransformer, example_inputs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    import torch
    import torch.distributed as dist
    from torch import nn

__all__ = ["MODELS", "Workload", "make_workload", "missing_plugin"]

MODELS = {
    "video": "a video diffusion transformer, forward only",
    "moe": "a decoder with expert-parallel mixtures of experts, forward only",
    "train": "the video transformer, forward and backward",
}
_SIZES = {
    "video": {"blocks": 6, "dim": 3072, "heads": 24, "ffn": 14336},
    "moe": {"blocks": 8, "dim": 2048, "heads": 16, "ffn": 4096},
}
_SIZES["train"] = _SIZES["video"]
_PLUGINS = {
    "moe": ("overlap_ep_moe", "plugins/ep_moe"),
    "train": ("overlap_cp_attention", "plugins/cp_attention"),
}


@attrs.frozen(kw_only=True)
class Workload:
    """One model at one size."""

    model: str
    tokens: int
    """Length of each rank's part."""
    title: str
    make: Callable[[torch.device, dist.ProcessGroup], Any]
    """The whole model, equal on all ranks in what is sharded; its layers are `blocks`."""
    inputs: Callable[[torch.device, int], tuple[torch.Tensor, ...]]
    """By device and rank."""
    sharded_parts: Callable[[Any], Iterable[nn.Module]]
    """Modules of the model all of whose parameters are sharded; the others stay as they are."""
    trains: bool = False
    """A step is forward and backward of a loss, else forward only."""

    @property
    def name(self) -> str:
        """What progress lines and phases call it."""
        return f"{self.model}/{self.tokens}"

    @property
    def finish(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What a step makes of the model's output: the loss of this rank's tokens, or nothing."""
        return _loss if self.trains else _output


def _loss(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def _output(out: torch.Tensor) -> torch.Tensor:
    return out


def missing_plugin(model: str) -> str:
    """Folder of the plugin that a model needs and that isn't installed, or an empty text."""
    package, folder = _PLUGINS.get(model, ("", ""))
    return folder if package and importlib.util.find_spec(package) is None else ""


def make_workload(
    model: str, tokens: int, dtype: torch.dtype, options: argparse.Namespace
) -> Workload:
    """One of `MODELS`; sizes that the options don't give are the model's own."""
    sizes = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in _SIZES[model].items()
    }
    common: dict[str, Any] = {
        "tokens": tokens,
        "n_blocks": sizes["blocks"],
        "dim": sizes["dim"],
        "n_heads": sizes["heads"],
        "ffn_dim": sizes["ffn"],
        "dtype": dtype,
    }
    title = f"{model}, {tokens:,} tokens a rank, {sizes['blocks']} blocks"
    if model == "moe":
        return _moe(title, common, options)
    config = VideoConfig(
        **common,
        text_tokens=options.text_tokens,
        wan_table=options.wan_table,
        trains=model == "train",
    )
    return Workload(
        model=model,
        tokens=tokens,
        title=title,
        make=lambda device, group: VideoTransformer(config, device, group),
        inputs=lambda device, rank: example_inputs(config, device, rank),
        sharded_parts=lambda whole: (whole,),
        trains=config.trains,
    )


def _moe(title: str, common: dict[str, Any], options: argparse.Namespace) -> Workload:
    from moe_decoder import MoeConfig, MoeDecoder, dense_parts, example_input

    config = MoeConfig(
        **common,
        experts=options.experts,
        expert_dim=options.expert_dim,
        top_k=options.top_k,
        capacity_factor=options.capacity_factor or None,
    )
    return Workload(
        model="moe",
        tokens=config.tokens,
        title=title,
        make=lambda device, group: MoeDecoder(config, device, group),
        inputs=lambda device, rank: (example_input(config, device, rank),),
        sharded_parts=dense_parts,
    )
