"""What replaying an op for a measurement needs."""

from __future__ import annotations

from .types import TensorSpec

__all__ = ["TensorSpec"]
