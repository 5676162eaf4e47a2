"""Reports of graphs whose compiled code comes from a cache.

The pass doesn't run for such a graph. Its generated code calls `note_loaded` when it is loaded,
for the first time and from a cache alike. Inductor's caches keep the plan in their keys; code that
comes otherwise, such as from a saved package, is refused under another plan.
"""

from __future__ import annotations

import logging
from pathlib import Path

from overlap_core.errors import DivergenceError, OverlapError
from overlap_core.inductor import add_record, find_record, has_record, is_in_force

from .files import load_report, save_report

__all__ = ["note_loaded"]

logger = logging.getLogger(__name__)


def note_loaded(folder: str, name: str, plan: str = "") -> None:
    """Keep the report of a graph that was compiled just now, or bring back an earlier one.

    Args:
        folder: where reports lie.
        name: of the report, unique to one compiled graph.
        plan: the name of the plan that the code was made under; empty: any.

    Raises:
        DivergenceError: the ranks of this job go by another plan. Nothing else: it runs while
            compiled code is loaded.
    """
    if plan and not is_in_force(plan):
        raise DivergenceError(
            "this code was compiled under a plan of overlap_core that the ranks do not share now, "
            "so their communication would part. Compile it in this job, instead of loading it from "
            "a package or a cache that does not know the plan"
        )
    try:
        path = Path(folder) / f"{name}.json"
        outcome = find_record(name)
        if outcome is not None:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                save_report(outcome, path)
        elif not has_record(name):
            add_record(load_report(path), name)
            logger.info("a graph was loaded from a cache; its report is %s", path)
    except (OverlapError, OSError) as error:
        logger.info("the report of a graph from a cache is not available: %s", error)
