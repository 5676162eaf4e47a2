"""Names of the ops that this plugin speaks for."""

from __future__ import annotations

__all__ = ["OPS", "RING", "RING_BACKWARD", "TORCH_OPS", "ULYSSES", "ULYSSES_BACKWARD"]

ULYSSES = "overlap_cp::ulysses_attention"
ULYSSES_BACKWARD = "overlap_cp::ulysses_attention_backward"
RING = "overlap_cp::ring_attention"
RING_BACKWARD = "overlap_cp::ring_attention_backward"

OPS = (ULYSSES, ULYSSES_BACKWARD, RING, RING_BACKWARD)
"""Ops of this package."""

TORCH_OPS = ("cplib::flex_cp_allgather", "cplib::flex_cp_allgather_backward")
"""Opaque ops of torch's own context parallelism: gathers of keys and values, reduced backward."""
