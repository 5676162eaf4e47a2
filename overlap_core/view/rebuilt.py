"""The prediction that a report rests on, made again from what its file holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.errors import ReportFileError
from overlap_core.placement import TimelineModel
from overlap_core.skeleton import Communication, Skeleton

if TYPE_CHECKING:
    from overlap_core.graph import OverlapGraph
    from overlap_core.report import Report

__all__ = ["queue_labels", "rebuild_models"]


def rebuild_models(report: Report) -> tuple[OverlapGraph, TimelineModel, TimelineModel]:
    """The graph of a report, and the models that predict its program order and its final one.

    Each group's queue is called after the group's number in the skeleton. Predictions are those
    of the report itself: the skeleton says all that the model asks of a classification.

    Raises:
        ReportFileError: the report lacks the graph or its costs.
    """
    graph = report.graph
    if graph is None or len(report.costs) != len(graph.nodes):
        missing = "graph" if graph is None else "costs"
        raise ReportFileError(
            f"the report of rank {report.rank} has no {missing}, so there is no timeline to "
            f"draw: {report.why}"
        )
    communication = {
        graph.index[entry.node]: Communication(groups=tuple(map(str, entry.groups)))
        for entry in report.skeleton
    }
    skeleton = Skeleton(
        entries=report.skeleton,
        positions=tuple(communication),
        communication=communication,
        gathers=(),
    )
    before = TimelineModel(graph, skeleton, report.costs, report.machine)
    if not report.coalesced:
        return graph, before, before
    after = TimelineModel(graph, skeleton, report.costs, report.machine, report.coalesced)
    return graph, before, after


def queue_labels(report: Report, graph: OverlapGraph) -> dict[str, str]:
    """What to call each queue of the model: the group's name on this rank, and its size."""
    labels: dict[str, str] = {}
    for entry in report.skeleton:
        name = graph.nodes[graph.index[entry.node]].group
        if not entry.groups:
            labels.setdefault(name or "?", f"group {name}" if name else "unknown group")
        for number, size in zip(entry.groups, entry.group_sizes, strict=False):
            # A node has the name of one group only; ops on several groups are told by number.
            known = name is not None and len(entry.groups) == 1
            ranks = "" if size is None else f", {size} rank{'s' if size != 1 else ''}"
            label = f"group {name}{ranks}" if known else f"group no. {number}{ranks}"
            if known or str(number) not in labels:
                labels[str(number)] = label
    return labels
