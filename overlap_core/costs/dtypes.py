"""Widths of dtypes by name, so that plain graph data needs no torch."""

from __future__ import annotations

import re

__all__ = ["dtype_bytes"]

_NAMED: dict[str, float] = {
    "bool": 1,
    "half": 2,
    "float": 4,
    "double": 8,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
_WIDTH = re.compile(r"^(?:bfloat|float|u?int|bits|q?u?int)(\d+)(?:_|$)")


def dtype_bytes(name: str) -> float | None:
    """Bytes of one element of a dtype such as `bfloat16`, or None if the name says nothing."""
    name = name.removeprefix("torch.")
    if name in _NAMED:
        return _NAMED[name]
    found = _WIDTH.match(name)
    return int(found[1]) / 8 if found else None
