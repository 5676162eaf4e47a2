"""From specifications to real arguments: right shape, stride, dtype, device, plausible values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from overlap_core.costs import dtype_bytes
from overlap_core.errors import ReplayError

from .types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from .types import ReplayItem

__all__ = ["needed_bytes", "realize", "realize_arguments"]


def needed_bytes(item: ReplayItem) -> int:
    """Bytes that all tensors of a replay's arguments take."""
    return sum(_storage_bytes(spec) for spec in _specs((item.args, item.kwargs)))


def realize_arguments(
    item: ReplayItem,
    materialize: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    realize_special: Callable[[TensorSpec], torch.Tensor | None],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which an op can be replayed.

    Args:
        item: the op with generic arguments.
        materialize: from op name, args and kwargs to consistent ones, as `PluginHost.materialize`.
        realize_special: asked first for each tensor, as `PluginHost.realize_tensor`.

    Raises:
        ReplayError: a tensor of this dtype cannot be made.
        OverlapError: from a hook.
    """
    args = realize(item.args, realize_special)
    kwargs = realize(item.kwargs, realize_special)
    return materialize(item.op_name, args, kwargs)


def realize(value: Any, special: Callable[[TensorSpec], torch.Tensor | None]) -> Any:
    """Replace each specification in plain lists, tuples and dicts by a tensor."""
    if isinstance(value, TensorSpec):
        made = special(value)
        return _noise(value) if made is None else made
    if isinstance(value, tuple):
        return tuple(realize(member, special) for member in value)
    if isinstance(value, list):
        return [realize(member, special) for member in value]
    if isinstance(value, dict):
        return {key: realize(member, special) for key, member in value.items()}
    return value


def _noise(spec: TensorSpec) -> torch.Tensor:
    """Small noise for floating point, zeros for integers (a valid index everywhere)."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ReplayError(f"this torch has no dtype {spec.dtype!r}")
    # Overlapping strides cannot be written to, so fill the storage and view it.
    extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    storage = torch.empty(0 if 0 in spec.shape else extent, dtype=dtype, device=spec.device)
    out = storage.as_strided(spec.shape, spec.stride)
    if not (dtype.is_floating_point or dtype.is_complex):
        storage.zero_()
        return out
    try:
        storage.normal_(0.0, 0.5)
    except (RuntimeError, NotImplementedError) as error:
        raise ReplayError(
            f"no noise can be drawn for dtype {spec.dtype}: install a plugin that implements "
            f"overlap_realize_tensor for it, such as overlap-float8-replay ({_first(error)})"
        ) from error
    return out


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _specs(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [spec for member in value for spec in _specs(member)]
    return []


def _storage_bytes(spec: TensorSpec) -> int:
    if 0 in spec.shape:
        return 0
    extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return math.ceil(extent * (dtype_bytes(spec.dtype) or 1))
