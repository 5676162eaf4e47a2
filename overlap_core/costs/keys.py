"""Structural keys as text and digests, equal on all ranks that ask the same question."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from attrs import asdict

from .types import CostRequest

__all__ = ["key_from_json", "key_to_json", "request_digest"]


def key_to_json(request: CostRequest) -> dict[str, Any]:
    """The key as plain data, without the node that asks."""
    data = asdict(request)
    del data["node"]
    return data


def key_from_json(data: dict[str, Any]) -> CostRequest:
    """What `key_to_json` wrote, as a request again."""
    return CostRequest(
        **{
            **data,
            **{name: _shapes(data[name]) for name in ("inputs", "outputs")},
            **{name: tuple(data[name]) for name in ("input_dtypes", "output_dtypes")},
        }
    )


def _shapes(shapes: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(
        tuple(tuple(dim) if isinstance(dim, list) else dim for dim in shape) for shape in shapes
    )


def request_digest(request: CostRequest) -> str:
    """Hex digest; equal if and only if op, shapes by hint, dtypes and group size are equal."""
    text = json.dumps(key_to_json(request), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
