"""Times of nodes, keyed by structure."""

from __future__ import annotations

from .dtypes import dtype_bytes
from .files import TableHeader, load_table, save_table
from .keys import key_from_json, key_to_json, request_digest
from .machine import IDEAL, Machine
from .scaling import scale_missing
from .table import FREE, apply_measurements, cost_request, resolve_costs
from .types import Cost, CostRequest, CostSource, Dim

__all__ = [
    "FREE",
    "IDEAL",
    "Cost",
    "CostRequest",
    "CostSource",
    "Dim",
    "Machine",
    "TableHeader",
    "apply_measurements",
    "cost_request",
    "dtype_bytes",
    "key_from_json",
    "key_to_json",
    "load_table",
    "request_digest",
    "resolve_costs",
    "save_table",
    "scale_missing",
]
