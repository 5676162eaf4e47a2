"""What overlap_core saw and decided, as files to compare predictions with profiles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from pathlib import Path

    from overlap_core.outcome import RankOutcome

__all__ = ["describe", "dump"]


def describe(report: RankOutcome) -> str:
    """One line on a report."""
    text = (
        f"{report.mode}, {report.hoisted} of {len(report.gathers)} gathers hoisted, predicted "
        f"exposed {report.exposed_ns_before / 1e6:.2f} -> {report.exposed_ns_after / 1e6:.2f} ms, "
        f"step {report.total_ns_before / 1e6:.2f} -> {report.total_ns_after / 1e6:.2f} ms"
    )
    if report.coalesced:
        text += f", {len(report.coalesced)} coalesced calls"
    return text if report.committed else f"{text}; program order kept: {report.why}"


def dump(report: RankOutcome, folder: Path, name: str) -> None:
    """Write `NAME.graph.json` (the graph file) and `NAME.costs.json`.

    The second has the decision, and one row for each node in the final order: name, kind, op,
    predicted nanoseconds, the network's part of them, source, and why no better source answered.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    if report.graph is not None:
        report.graph.save(folder / f"{name}.graph.json")
        costs = report.costs or (None,) * len(report.graph.nodes)
        for position in report.positions or range(len(report.graph.nodes)):
            node, cost = report.graph.nodes[position], costs[position]
            row = {"name": node.name, "position": position, "kind": str(node.kind), "op": node.op}
            row |= {"sizes": node.sizes, "dtypes": node.dtypes, "nbytes": node.nbytes}
            row |= {"group": node.group, "origins": node.origins}
            if cost is not None:
                row |= {"ns": cost.ns, "network_ns": cost.network_ns}
                row |= {"source": str(cost.source), "why": cost.why}
            rows.append(row)
    decision = {
        "mode": str(report.mode),
        "why": report.why,
        "committed": report.committed,
        "notes": report.notes,
        "total_ns_before": report.total_ns_before,
        "total_ns_after": report.total_ns_after,
        "gathers": [
            attrs.asdict(gather) if attrs.has(type(gather)) else str(gather)
            for gather in report.gathers
        ],
        "nodes": rows,
    }
    text = json.dumps(decision, indent=1, default=str)
    (folder / f"{name}.costs.json").write_text(text + "\n", encoding="utf-8")
