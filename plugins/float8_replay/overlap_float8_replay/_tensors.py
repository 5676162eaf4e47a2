"""Tensors whose dtype no generator of random numbers knows.

Values are drawn in fp32 and cast. They depend on the shape alone, so all ranks draw the same, and
torch's global random state stays as it is.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from overlap_core.replay.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    Fill = Callable[[torch.Tensor, torch.Generator], object]

__all__ = ["make_scales", "make_tensor"]

_CHUNK = 1 << 24
"""Elements that are drawn at a time: the fp32 values take 64 MiB at most."""


def make_tensor(spec: TensorSpec) -> torch.Tensor | None:
    """A finite float8 or fp4 tensor as the spec says; None if this torch lacks the dtype."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return None
    if dtype == getattr(torch, "float4_e2m1fn_x2", None):
        # Bytes, looked at as fp4 in the end: nothing can be written to a packed tensor itself.
        return _filled(spec, torch.uint8, _fill_bytes).view(dtype)
    if not spec.dtype.startswith("float8_"):
        return None
    exponents_only = dtype == getattr(torch, "float8_e8m0fnu", None)
    return _filled(spec, dtype, _fill_powers_of_two if exponents_only else _fill_noise)


def make_scales(value: Any) -> Any:
    """Positive values near 1 in place of each floating-point tensor, also inside a list or tuple.

    Shape, stride, dtype and device stay. Anything else is handed back as it is.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(make_scales(member) for member in value)
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return value
    spec = TensorSpec(
        shape=tuple(value.shape),
        stride=value.stride(),
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(value.device),
    )
    return _filled(spec, value.dtype, _fill_scales)


def _filled(spec: TensorSpec, dtype: torch.dtype, fill: Fill) -> torch.Tensor:
    """A tensor whose whole storage was filled, so that strides may be any, 0 among them."""
    out = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=spec.device)
    if out.numel() == 0:
        return out
    extent = 1 + sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
    flat = out.as_strided((extent,), (1,))
    seed = zlib.crc32(repr((spec.shape, spec.stride, spec.dtype)).encode())
    generator = torch.Generator(device=spec.device).manual_seed(seed)
    for part in flat.split(_CHUNK):
        fill(part, generator)
    return out


def _fill_noise(part: torch.Tensor, generator: torch.Generator) -> None:
    """Standard normal noise, cut to the dtype's range: e5m2 turns what lies beyond into inf."""
    limits = torch.finfo(part.dtype)
    noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32)
    part.copy_(noise.clamp_(limits.min, limits.max))


def _fill_powers_of_two(part: torch.Tensor, generator: torch.Generator) -> None:
    """From 1/4 to 4. The dtype holds exponents only, and is used for scales of blocks."""
    exponents = torch.randint(
        -2, 3, part.shape, generator=generator, device=part.device, dtype=torch.float32
    )
    part.copy_(exponents.exp2_())


def _fill_bytes(part: torch.Tensor, generator: torch.Generator) -> None:
    """Any bits, since all 16 patterns of e2m1 are finite."""
    part.random_(0, 256, generator=generator)


def _fill_scales(part: torch.Tensor, generator: torch.Generator) -> None:
    """Uniform noise from 0.5 to 1.5."""
    noise = torch.rand(part.shape, generator=generator, device=part.device, dtype=torch.float32)
    part.copy_(noise.add_(0.5))
