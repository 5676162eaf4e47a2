"""What a replay tensor must look like."""

from __future__ import annotations

from attrs import frozen

__all__ = ["TensorSpec"]


@frozen(kw_only=True)
class TensorSpec:
    """A tensor to be made for a replay: sizes and strides in elements, symbolic ones by hint."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """Name without the `torch.` prefix, for instance `float8_e4m3fn`."""
    device: str
    """For instance `cpu` or `cuda:0`."""
