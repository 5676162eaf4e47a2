"""What `overlap_core` has to know of this library. Nothing else here imports `overlap_core`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import overlap_core

if TYPE_CHECKING:
    import torch


@overlap_core.hookimpl
def overlap_register_ops(registry: Any) -> None:
    """Both ops communicate; `attn_cp` also needs lengths that fit the shapes."""
    registry.register(
        "video_blocks::attn_cp", materialize_inputs=full_lengths, has_internal_collective=True
    )
    registry.register("video_blocks::dispatch", has_internal_collective=True)


def full_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, group: str
) -> tuple[Any, ...]:
    """Arguments for a measurement: every rank's part of the video is full."""
    return q, k, v, lengths.new_full(lengths.shape, q.shape[1]), group
