"""The only folder that touches torch's private names: adapter, versions, installation."""

from __future__ import annotations

from .install import disable, enable, enabled, inductor_options
from .records import clear_records, records
from .versions import check_torch, missing_names

__all__ = [
    "check_torch",
    "clear_records",
    "disable",
    "enable",
    "enabled",
    "inductor_options",
    "missing_names",
    "records",
]
