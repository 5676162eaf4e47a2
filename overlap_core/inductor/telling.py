"""Telling the user of an outcome, in the places that people look at already.

One line a graph at level INFO, a warning once for each reason that keeps overlap off, both by the
lowest rank of those that decided, and an artifact in torch's trace log, which `tlparse` shows
beside the graphs. `TORCH_LOGS=overlap_core` shows the lines as it does for torch's own modules.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from attrs import asdict
from torch._logging import trace_structured

from overlap_core.ranks import Mode
from overlap_core.session import session

if TYPE_CHECKING:
    from overlap_core.outcome import RankOutcome

__all__ = ["tell"]

logger = logging.getLogger(__name__)


def tell(outcome: RankOutcome) -> None:
    """Log an outcome, and add it to torch's trace log if there is one."""
    speaks = outcome.rank == min(outcome.scope, default=outcome.rank)
    logger.log(
        logging.INFO if speaks else logging.DEBUG,
        "graph of rank %d: %s, %d of %d gathers hoisted, exposed %.0f -> %.0f µs predicted",
        outcome.rank,
        outcome.mode,
        outcome.hoisted,
        len(outcome.gathers),
        outcome.exposed_ns_before / 1000,
        outcome.exposed_ns_after / 1000,
    )
    said = session.learned.said
    if speaks and outcome.mode is Mode.ABORT and outcome.gathers and outcome.why not in said:
        said.add(outcome.why)
        logger.warning(
            "rank %d: overlap is off for a graph with %d weight gathers, on ranks %s: %s. "
            "`overlap-core explain` shows its report, `overlap-core doctor` what to do",
            outcome.rank,
            len(outcome.gathers),
            ", ".join(map(str, outcome.scope[:8])) + (", ..." if len(outcome.scope) > 8 else ""),
            outcome.why,
        )
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "overlap_core_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(_artifact(outcome), indent=1),
    )


def _artifact(outcome: RankOutcome) -> dict[str, Any]:
    return {
        "rank": outcome.rank,
        "scope": outcome.scope,
        "mode": outcome.mode,
        "why": outcome.why,
        "committed": outcome.committed,
        "exposed_ns": {"before": outcome.exposed_ns_before, "after": outcome.exposed_ns_after},
        "gathers": [asdict(gather) for gather in outcome.gathers],
        "collectives": outcome.collectives,
        "notes": outcome.notes,
    }
