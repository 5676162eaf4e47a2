"""Times of nodes, keyed by structure."""

from __future__ import annotations

from .dtypes import dtype_bytes
from .table import FREE, cost_request, resolve_costs
from .types import Cost, CostRequest, CostSource, Dim

__all__ = [
    "FREE",
    "Cost",
    "CostRequest",
    "CostSource",
    "Dim",
    "cost_request",
    "dtype_bytes",
    "resolve_costs",
]
