"""Bytes of gathered weights in flight over the order of a graph."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from overlap_core.graph import find_waits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.outcome import RankOutcome

__all__ = ["bytes_in_flight"]


def bytes_in_flight(report: RankOutcome, order: Sequence[str] | None = None) -> tuple[int, ...]:
    """Bytes of weight gathers between launch and first wait, while each node of the order runs.

    Args:
        report: of a graph; without one nothing is known and the result is empty.
        order: names of all nodes, for instance in program order; None: the final order.

    Returns:
        One number a node. Gathers of unknown size count as nothing.
    """
    graph = report.graph
    if graph is None:
        return ()
    names = report.order if order is None else order
    place = {graph.index[name]: spot for spot, name in enumerate(names)}
    communicates = {graph.index[name] for name in report.collectives}
    change = [0] * (len(names) + 1)
    for gather in report.gathers:
        launch = graph.index[gather.name]
        _, waits = find_waits(graph, launch, communicates)
        nbytes = graph.nodes[launch].nbytes or 0
        change[place[launch]] += nbytes
        change[min((place[wait] for wait in waits), default=len(names))] -= nbytes
    return tuple(accumulate(change[:-1]))
