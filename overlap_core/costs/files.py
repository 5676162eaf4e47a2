"""A cost table that lasts: one JSON file for a device and a torch version.

Group sizes are part of each collective's key, so one file serves several.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from overlap_core._files import write_in_one_step
from overlap_core.errors import CostTableError

from .types import Cost, CostSource

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["TableHeader", "load_table", "save_table"]

_VERSION = 1


@frozen(kw_only=True)
class TableHeader:
    """What a table was measured on."""

    device: str
    """For instance `cuda:NVIDIA H200`."""
    torch: str


def load_table(path: str | os.PathLike[str], expected: TableHeader) -> dict[str, Cost]:
    """Costs by key digest; empty if there is no file yet.

    Raises:
        CostTableError: the file is broken, or of another device or torch; says which.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CostTableError(f"{path}: cannot be read: {error}") from None
    try:
        data = json.loads(text)
        version, entries = data["version"], data["entries"]
        found = TableHeader(device=data["device"], torch=data["torch"])
    except (ValueError, KeyError, TypeError) as error:
        raise CostTableError(
            f"{path}: not a cost table ({type(error).__name__}: {error}); delete it to measure anew"
        ) from None
    if version != _VERSION:
        raise CostTableError(f"{path}: version is {version!r}; this one reads {_VERSION}")
    if found != expected:
        raise CostTableError(
            f"{path}: measured on {found.device} with torch {found.torch}, but this is "
            f"{expected.device} with torch {expected.torch}; name another file in cost_table_path"
        )
    try:
        return {str(key): _cost(entry) for key, entry in entries.items()}
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CostTableError(f"{path}: broken entry: {error}; delete it to measure anew") from None


def _cost(entry: dict[str, Any]) -> Cost:
    ns, network_ns = entry["ns"], entry.get("network_ns")
    for value in (ns, network_ns):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"expected nanoseconds, got {value!r}")
    if ns is None or ns < 0:
        raise ValueError(f"expected nanoseconds, got {ns!r}")
    return Cost(ns=ns, network_ns=network_ns, source=CostSource.MEASURED, why="from a saved table")


def save_table(
    path: str | os.PathLike[str], header: TableHeader, table: Mapping[str, Cost]
) -> None:
    """Write the table in one step; ranks that write the same file at once write the same content.

    Raises:
        CostTableError: the file cannot be written.
    """
    entries = {
        key: {"ns": cost.ns, "network_ns": cost.network_ns} for key, cost in sorted(table.items())
    }
    data = {
        "version": _VERSION,
        "device": header.device,
        "torch": header.torch,
        "entries": entries,
    }
    try:
        write_in_one_step(path, json.dumps(data, indent=1))
    except OSError as error:
        raise CostTableError(f"{path}: cannot be written: {error}") from error
