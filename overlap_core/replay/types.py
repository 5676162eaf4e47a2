"""What a replay needs: how its tensors look, and what is called with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReplayItem", "TensorSpec"]


@frozen(kw_only=True)
class TensorSpec:
    """A tensor to be made for a replay: sizes and strides in elements, symbolic ones by hint."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """Name without the `torch.` prefix, for instance `float8_e4m3fn`."""
    device: str
    """For instance `cpu` or `cuda:0`."""


@frozen(kw_only=True, eq=False)
class ReplayItem:
    """One op and generic arguments for it: any nesting of lists and tuples over leaves."""

    op_name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    """Leaves are `TensorSpec`s, numbers, text, dtypes, devices or None."""
    kwargs: dict[str, Any]
