"""The only folder that touches torch's private names: adapter, versions, installation."""

from __future__ import annotations

from .install import disable, enable, enabled, inductor_options
from .job import is_in_force
from .records import add_record, find_record, has_record, records
from .versions import check_torch, missing_names

__all__ = [
    "add_record",
    "check_torch",
    "disable",
    "enable",
    "enabled",
    "find_record",
    "has_record",
    "inductor_options",
    "is_in_force",
    "missing_names",
    "records",
]
