"""The report file, version 3: JSON with the graph file's content, so that it can be run again.

Its keys are the names of `Report`'s attributes, but for the costs: they are kept as the cost
table (one entry a structural key, with the nodes that share it), and `keys_from_graph` says
whether the keys were known or made from the graph. The bytes in flight are there for programs
that read the file; a report that is loaded counts them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from overlap_core._json import read_json
from overlap_core.errors import ReportFileError
from overlap_core.graph import graph_from_json, graph_to_json

from .converter import structure, unstructure
from .costs import CostEntry, cost_entries
from .report import Report

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from overlap_core.host import PluginHost
    from overlap_core.outcome import RankOutcome

__all__ = ["FILE_VERSION", "load_report", "report_from_json", "report_to_json", "save_report"]

FILE_VERSION = 3
_BYTES = ("in_flight_before", "in_flight_after")
"""What the file has since version 3 of all that a report can tell from its attributes."""


def report_to_json(report: RankOutcome) -> dict[str, Any]:
    """The report as JSON data."""
    report = Report.of(report)
    data: dict[str, Any] = {"version": FILE_VERSION, **unstructure(report)}
    data["keys_from_graph"] = not report.requests
    data["costs"] = [unstructure(entry) for entry in cost_entries(report)]
    data |= {key: [list(step) for step in getattr(report, key)] for key in _BYTES}
    data["graph"] = None if report.graph is None else graph_to_json(report.graph)
    return data


def report_from_json(data: object, where: str = "report") -> Report:
    """Build a report from parsed JSON.

    Raises:
        ReportFileError: the data is of a newer version or breaks the format; says where and why.
    """
    try:
        return _from_json(data)
    except ValueError as error:
        raise ReportFileError(f"{where}: {error}") from None


def load_report(path: str | PathLike[str]) -> Report:
    """Read a report file; see `Report.load`."""
    where = str(path)
    try:
        data = read_json(path, "a report")
    except ValueError as error:
        raise ReportFileError(f"{where}: {error}") from None
    return report_from_json(data, where)


def save_report(
    report: RankOutcome, path: str | PathLike[str], host: PluginHost | None = None
) -> None:
    """Write a report file, with sections of `host`'s plugins; see `Report.save`."""
    text = json.dumps(report_to_json(Report.of(report, host)), indent=1, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ReportFileError(f"{path}: cannot be written: {error.strerror or error}") from None


def _from_json(data: object) -> Report:
    if not isinstance(data, dict):
        raise ValueError(f"not a report: expected a JSON object, got {type(data).__name__}")
    rest = dict(data)
    version = rest.pop("version", None)
    if "nodes" in rest:
        raise ValueError("a graph file, not a report: `overlap-core simulate` reads it")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        problem = "the key 'version' is missing" if version is None else f"version is {version!r}"
        raise ValueError(f"not a report: {problem}")
    if version > FILE_VERSION:
        raise ValueError(
            f"a report of version {version}; this overlap_core reads up to version "
            f"{FILE_VERSION}: update it"
        )
    counted = _BYTES if version >= 3 else ()
    for key in ("graph", "costs", "keys_from_graph", *counted):
        if key not in rest:
            raise ValueError(f"the key {key!r} is missing")
    for key in counted:
        structure(rest.pop(key), tuple[tuple[int, ...], ...], key)
    plain = rest.pop("graph")
    graph = None if plain is None else graph_from_json(plain, "graph")
    entries = structure(rest.pop("costs"), tuple[CostEntry, ...], "costs")
    from_graph = structure(rest.pop("keys_from_graph"), bool, "keys_from_graph")
    spread = _spread(entries, from_graph)
    report = evolve(structure(rest, Report), graph=graph, **spread)
    _check(report)
    return report


def _spread(entries: tuple[CostEntry, ...], from_graph: bool) -> dict[str, Any]:
    """The entries as one cost and one key a node."""
    by_node = {position: entry for entry in entries for position in entry.nodes}
    if sorted(by_node) != list(range(sum(len(entry.nodes) for entry in entries))):
        raise ValueError("costs: every node must be in one entry")
    spread = [by_node[position] for position in range(len(by_node))]
    costs = tuple(entry.cost for entry in spread if entry.cost is not None)
    if len(costs) not in (0, len(spread)):
        raise ValueError("costs: some entries have a cost and some have none")
    requests = () if from_graph else tuple(entry.request for entry in spread)
    return {"costs": costs, "requests": requests}


def _check(report: Report) -> None:
    """Names and numbers that everybody who reads a report relies on."""
    graph = report.graph
    if graph is None:
        if report.order or report.gathers:
            raise ValueError("graph: missing, while there is an order of its nodes")
        return
    if sorted(report.order) != sorted(graph.index):
        raise ValueError("order: not the names of all nodes of the graph, each once")
    if len(report.costs) not in (0, len(graph.nodes)):
        raise ValueError(f"costs: of {len(report.costs)} nodes; the graph has {len(graph.nodes)}")
    for call in report.coalesced:
        if not all(0 <= position < len(graph.nodes) for position in call.launches):
            raise ValueError(f"coalesced: no such positions: {call.launches}")
    named: dict[str, Iterable[str]] = {
        "collectives": report.collectives,
        "gathers": (gather.name for gather in report.gathers),
        "skeleton": (entry.node for entry in report.skeleton),
    }
    for key, names in named.items():
        for position, name in enumerate(names):
            if name not in graph.index:
                raise ValueError(f"{key}[{position}]: the graph has no node {name!r}")
    listed = {entry.node for entry in report.skeleton}
    for name in report.collectives if listed else ():
        if name not in listed:
            raise ValueError(f"skeleton: has no entry of {name!r}, which communicates")
