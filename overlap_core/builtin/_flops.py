"""Arithmetic of matrix products, convolutions and attention, from the shapes of a cost request."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_core.costs.types import CostRequest, Dim

__all__ = ["ATTENTION", "count_flops", "hinted"]

ATTENTION = (
    "aten::_scaled_dot_product",
    "aten::scaled_dot_product_attention",
    "aten::_flash_attention",
    "aten::_efficient_attention",
)
"""Beginnings of the names of attention ops."""

_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
        *("_scaled_mm", "_int_mm", "_grouped_mm"),
    )
)
_CONVOLUTIONS = frozenset(("aten::convolution", "aten::conv2d", "aten::conv3d"))

Shape = tuple[int, ...]


def count_flops(op: str, request: CostRequest) -> int | None:
    """Multiplications and additions of one call; None if the op or a shape is not known.

    Args:
        op: as `ns::name`.
        request: its shapes, in the order of the op's arguments. Inputs may be missing, as long
            as one of the two factors is there.
    """
    shapes = [shape for dims in request.inputs if (shape := hinted(dims)) is not None]
    output = hinted(request.outputs[0]) if request.outputs else None
    if output is None:
        return None
    if op in _PRODUCTS:
        depth = _depth([shape for shape in shapes if len(shape) > 1], output)
        return None if depth is None else 2 * math.prod(output) * depth
    if op in _CONVOLUTIONS and len(shapes) > 1 and len(shapes[1]) > 2:
        return 2 * math.prod(output) * math.prod(shapes[1][1:])
    if op.startswith(ATTENTION) and len(shapes) > 1 and len(shapes[0]) == len(shapes[1]) == 4:
        batch, heads, queries, width = shapes[0]
        once = 4 * batch * heads * queries * shapes[1][2] * width
        return once * 5 // 2 if "backward" in op else once
    return None


def _depth(factors: list[Shape], output: Shape) -> int | None:
    """The dimension that a product sums over, from whichever factor shows it."""
    rows, columns = (output[-2] if len(output) > 1 else 1), output[-1]
    for left, right in pairwise(factors):
        if left[-2] == rows and right[-1] == columns and left[-1] == right[-2]:
            return left[-1]
    for factor in factors:
        if factor[-2:] != (rows, columns):  # otherwise more likely what is added
            if factor[-2] == rows:
                return factor[-1]
            if columns in factor[-2:]:  # a linear layer's weight lies the other way
                return factor[-2] if factor[-1] == columns else factor[-1]
    return None


def hinted(dims: tuple[Dim, ...]) -> Shape | None:
    """A shape with hints for symbolic dimensions, or None if one has no hint."""
    sizes = [dim if isinstance(dim, int) else dim[1] for dim in dims]
    return None if None in sizes else tuple(size for size in sizes if size is not None)
