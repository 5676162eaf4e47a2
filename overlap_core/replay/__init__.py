"""Replaying an op for a measurement: arguments, real tensors, timing."""

from __future__ import annotations

from .types import ReplayItem, TensorSpec

__all__ = ["ReplayItem", "TensorSpec"]
