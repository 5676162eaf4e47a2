"""The report file, version 1: JSON with the graph file's content, so that it can be run again.

Its keys are the names of `Report`'s attributes, but for the costs: they are kept as the cost
table (one entry a structural key, with the nodes that share it), and `keys_from_graph` says
whether the keys were known or made from the graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attrs import evolve, resolve_types
from cattrs import Converter, transform_error
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from overlap_core.costs import Cost, CostRequest, CostSource, Dim
from overlap_core.errors import ReportFileError
from overlap_core.graph import OverlapGraph, Size, graph_from_json, graph_to_json
from overlap_core.outcome import GatherOutcome
from overlap_core.ranks import Mode, Vote
from overlap_core.skeleton import SkeletonEntry

from .costs import CostEntry, cost_entries
from .report import Report, Section

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from overlap_core.host import PluginHost
    from overlap_core.outcome import RankOutcome

__all__ = ["FILE_VERSION", "load_report", "report_from_json", "report_to_json", "save_report"]

FILE_VERSION = 1
_MOST_BITS = 63
_BY_HAND = ("graph", "costs", "requests")
"""Attributes that the file holds in another form."""
_TYPES: dict[str, Any] = {
    "Any": Any,
    "Cost": Cost,
    "CostRequest": CostRequest,
    "GatherOutcome": GatherOutcome,
    "Mapping": Mapping,
    "Mode": Mode,
    "OverlapGraph": OverlapGraph,
    "SkeletonEntry": SkeletonEntry,
    "Vote": Vote,
}
"""What annotations name that their own modules import for type checkers only."""
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def report_to_json(report: RankOutcome) -> dict[str, Any]:
    """The report as JSON data."""
    report = Report.of(report)
    data: dict[str, Any] = {"version": FILE_VERSION, **_converter.unstructure(report)}
    data["keys_from_graph"] = not report.requests
    data["costs"] = _converter.unstructure(cost_entries(report), tuple[CostEntry, ...])
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
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ReportFileError(f"{where}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ReportFileError(f"{where}: not a report: the file is no text") from None
    if not text.strip():
        raise ReportFileError(f"{where}: not a report: the file is empty")
    try:
        data = json.loads(text, parse_int=_parse_int, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # also an integer of too many digits
        raise ReportFileError(f"{where}: not JSON, or cut off: {error}") from None
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
    for key in ("graph", "costs", "keys_from_graph"):
        if key not in rest:
            raise ValueError(f"the key {key!r} is missing")
    plain = rest.pop("graph")
    graph = None if plain is None else graph_from_json(plain, "graph")
    entries = _structure(rest.pop("costs"), tuple[CostEntry, ...], "costs")
    from_graph = _structure(rest.pop("keys_from_graph"), bool, "keys_from_graph")
    spread = _spread(entries, from_graph)
    report = evolve(_structure(rest, Report), graph=graph, **spread)
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
    named: dict[str, Iterable[str]] = {
        "collectives": report.collectives,
        "gathers": (gather.name for gather in report.gathers),
        "skeleton": (entry.node for entry in report.skeleton),
    }
    for key, names in named.items():
        for position, name in enumerate(names):
            if name not in graph.index:
                raise ValueError(f"{key}[{position}]: the graph has no node {name!r}")


def _structure(value: object, target: type[T], place: str = "") -> T:
    try:
        return _converter.structure(value, target)
    except BaseValidationError as error:
        reasons = transform_error(error, path=place, format_exception=_say)
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        reason, _, where = reasons[0].rpartition(" @ ")
        where = where.lstrip(".")
        raise ValueError(f"{where}: {reason}{more}" if where else f"{reason}{more}") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}" if place else str(error)) from None


def _say(error: BaseException, _: type | None) -> str:
    if isinstance(error, KeyError):
        return "this key is missing"
    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown key {min(error.extra_fields)!r}"
    return str(error)


def _check_width(value: T) -> T:
    """Times and bytes beyond this are damage, and would overflow where they are shown."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of more than 64 bits: {value!s:.12}...")
    return value


def _parse_int(text: str) -> int:
    return _check_width(int(text))


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _strict(kind: type[T]) -> Any:
    """Take a value only if it is of the type already; JSON has no need for conversions."""

    def structure(value: object, _: object) -> T:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return _check_width(value) if kind is int else value
        raise ValueError(f"expected {kind.__name__}, got {value!r:.60}")

    return structure


def _structure_enum(value: object, target: type[E]) -> E:
    """Text enums are text too, so without this they would be taken for it."""
    try:
        return target(cast("str", value))
    except ValueError:
        raise ValueError(f"expected one of {', '.join(target)}, got {value!r:.60}") from None


def _structure_size(value: object, _: object) -> Size:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise ValueError(f"expected a size, got {value!r:.60}")


def _structure_dim(value: object, _: object) -> Dim:
    match value:
        case bool():
            pass
        case int():
            return value
        case ["~", None | int() as hint] if not isinstance(hint, bool):
            return ("~", hint)
    raise ValueError(f'expected an integer or ["~", hint], got {value!r:.60}')


def _structure_content(value: object, _: object) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"expected an object, got {value!r:.60}")


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True)

    def structure_tuple(value: object, target: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, got {value!r:.60}")
        return tuple(converter.structure(value, list[target.__args__[0]]))

    for kind in (int, str, bool):
        converter.register_structure_hook(kind, _strict(kind))
    for enum in (Mode, CostSource):
        converter.register_structure_hook(enum, _structure_enum)
    converter.register_structure_hook_func(lambda t: t == Size, _structure_size)
    converter.register_structure_hook_func(lambda t: t == Dim, _structure_dim)
    converter.register_structure_hook_func(
        lambda t: getattr(t, "__origin__", None) is tuple, structure_tuple
    )
    converter.register_structure_hook_func(lambda t: t == Mapping[str, Any], _structure_content)
    for cls in (Report, Section, CostEntry):
        resolve_types(cls, localns=_TYPES)
    omitted = {name: override(omit=True) for name in _BY_HAND}
    converter.register_structure_hook(
        Report,
        make_dict_structure_fn(Report, converter, _cattrs_forbid_extra_keys=True, **omitted),  # type: ignore[arg-type]
    )
    converter.register_unstructure_hook(
        Report,
        make_dict_unstructure_fn(Report, converter, **omitted),  # type: ignore[arg-type]
    )
    return converter


_converter = _make_converter()
