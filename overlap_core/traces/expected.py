"""What a step must show if it runs the graphs of some reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from overlap_core.graph import NodeKind, find_waits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.report import Report

__all__ = ["Call", "expected_gathers", "expected_waits", "first_launches"]


@frozen(kw_only=True)
class Call:
    """A collective of one report's graph, by the name of its launch, or of its first one."""

    report: int
    name: str


def first_launches(report: Report) -> dict[str, str]:
    """For each launch of a coalesced call the name of the call's first one."""
    if report.graph is None:
        return {}
    nodes = report.graph.nodes
    return {
        nodes[launch].name: nodes[call.launches[0]].name
        for call in report.coalesced
        for launch in call.launches
    }


def expected_gathers(reports: Sequence[Report]) -> dict[str, list[Call]]:
    """All all-gathers of each group, of weights and of anything else, in the final orders."""
    expected: dict[str, list[Call]] = {}
    for index, report in enumerate(reports):
        if report.graph is None:
            continue
        first = first_launches(report)
        for name in report.collectives:
            node = report.graph.nodes[report.graph.index[name]]
            if first.get(name, name) != name:
                continue
            if node.kind is NodeKind.COLLECTIVE and "all_gather" in node.op:
                calls = expected.setdefault(node.group or "?", [])
                calls.append(Call(report=index, name=name))
    return expected


def expected_waits(reports: Sequence[Report]) -> list[Call]:
    """For each wait in the final orders the launch that it waits for."""
    expected: list[Call] = []
    for index, report in enumerate(reports):
        graph = report.graph
        if graph is None:
            continue
        communicates = {graph.index[name] for name in report.collectives}
        first = first_launches(report)
        launch_of: dict[int, str] = {}
        for name in report.collectives:
            for wait in find_waits(graph, graph.index[name], communicates)[1]:
                launch_of.setdefault(wait, first.get(name, name))
        for position in report.positions:
            if graph.nodes[position].kind is NodeKind.WAIT:
                name = launch_of.get(position, graph.nodes[position].name)
                expected.append(Call(report=index, name=name))
    return expected
