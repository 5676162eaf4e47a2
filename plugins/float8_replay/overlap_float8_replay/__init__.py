"""Plugin `float8_replay`: replay inputs in float8 and packed fp4, so that their ops are measured.

torch is imported when a tensor is made and not before: whoever only lists plugins need not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_core import get_materialize_inputs_hook, hookimpl
from overlap_core.registry import canonical_op_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from overlap_core.replay.types import TensorSpec

__all__ = ["overlap_materialize_inputs", "overlap_realize_tensor"]

_SCALES = {
    "aten::_scaled_mm": {"scale_a": 2, "scale_b": 3, "scale_result": 5},
    "aten::_scaled_mm_v2": {"scale_a": 2, "scale_b": 5},
}
"""Position of each scale among the positional arguments of torch's own scaled matmuls."""


@hookimpl
def overlap_realize_tensor(spec: TensorSpec) -> torch.Tensor | None:
    """Make a float8 or packed fp4 tensor of just this shape and stride.

    None for every other dtype, and for one that this torch doesn't have.
    """
    if not spec.dtype.startswith(("float8_", "float4_")):
        return None
    from ._tensors import make_tensor

    return make_tensor(spec)


@hookimpl
def overlap_materialize_inputs(
    op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """Replace the scales of torch's scaled matmuls, which generic noise makes negative, by ~1.

    None for every other op: what a scale means there is its library's to know. None too if a
    function is registered for the op, since whoever did so knows more.
    """
    scales = _SCALES.get(canonical_op_name(op_name) or "")
    if scales is None or get_materialize_inputs_hook(op_name) is not None:
        return None
    from ._tensors import make_scales

    positions = frozenset(scales.values())
    return (
        tuple(make_scales(arg) if i in positions else arg for i, arg in enumerate(args)),
        {name: make_scales(arg) if name in scales else arg for name, arg in kwargs.items()},
    )
