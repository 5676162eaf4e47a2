"""Looks at the folder of plan files."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

from overlap_core.ranks.plan_file import VERSION, load_plan_file

from .facts import PlanFacts

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["look_at_plans"]


def look_at_plans(folder: Path, rank: int | None) -> dict[str, Any]:
    """Facts about the plan files, as values for `RankFacts`.

    Args:
        folder: may not exist yet.
        rank: whose files to read; None: those of all ranks.
    """
    plans: list[PlanFacts] = []
    broken: list[str] = []
    for path in sorted(folder.glob(f"*/rank{'*' if rank is None else rank}.json")):
        try:
            plan = _read(path)
            if plan is not None:
                plans.append(plan)
        except (OSError, ValueError, KeyError, TypeError) as error:
            broken.append(f"{path}: {type(error).__name__}: {error}")
    return {
        "plan_folder": str(folder),
        "plan_folder_fault": _why_unusable(folder),
        "plans": tuple(plans),
        "plans_broken": tuple(broken),
    }


def _read(path: Path) -> PlanFacts | None:
    """None: written by an earlier version of this package; no start reads it."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["version"] < VERSION:
        return None
    header = data["header"]
    file = load_plan_file(path, header)
    if file is None:
        raise ValueError("not a plan file of this version")
    return PlanFacts(
        setting=path.parent.name, name=file.name, world_size=str(header.get("world_size", ""))
    )


def _why_unusable(folder: Path) -> str:
    """Why no file can be written there; what is missing of the path can be made."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there}: {error.strerror or error}"
