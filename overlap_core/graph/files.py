"""The graph file, version 1: JSON that bug reports, the simulator and tests share.

Structure and errors come from `cattrs`; the rules of the graph itself are `check_nodes`'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attrs import field, fields, frozen
from cattrs import Converter, transform_error
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from overlap_core._json import read_json, strictly
from overlap_core.errors import GraphFileError, GraphFormatError

from .graph import OverlapGraph
from .nodes import InputKind, Node, NodeKind, Size
from .symbols import ExpressionError, parse_expression

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["FILE_VERSION", "graph_from_json", "graph_to_json", "load_graph", "save_graph"]

FILE_VERSION = 1
_REQUIRED = ("version", "nodes")
T = TypeVar("T")


def _structure_size(value: object, _: object) -> Size:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"a size is an integer or an expression, got {value!r:.60}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a size is negative: {value}")
        return value
    try:
        expression = parse_expression(value)
    except ExpressionError as error:
        raise ValueError(f"not a size expression: {error}") from None
    constant = expression.constant
    if constant is not None and constant < 0:
        raise ValueError(f"a size is negative: {value!r}")
    return value if constant is None else constant


def _structure_kind(value: object, _: object) -> NodeKind:
    try:
        return NodeKind(cast("str", value))
    except ValueError:
        kinds = ", ".join(NodeKind)
        raise ValueError(f"unknown kind {value!r:.60}; expected one of {kinds}") from None


def _structure_list(converter: Converter, value: object, target: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {value!r:.60}")
    member = target.__args__[0]
    found = []
    for position, item in enumerate(value):
        if member is Node and not isinstance(item, dict):
            raise _PlacedError((f"[{position}]: expected an object, got {item!r:.60}",))
        try:
            found.append(converter.structure(item, member))
        except BaseValidationError as error:
            reasons = _place_reasons(error, f"[{position}]")
            raise _PlacedError(tuple(reasons)) from None
        except ValueError as error:
            raise _PlacedError(_prefix(error, f"[{position}]")) from None
    return tuple(found)


class _PlacedError(ValueError):
    """Reasons with their places inside the value, for instance `[3].sizes[0]: ...`."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def _prefix(error: Exception, place: str) -> tuple[str, ...]:
    if isinstance(error, _PlacedError):
        return tuple(place + reason for reason in error.reasons)
    return (f"{place}: {error}",)


def _place_reasons(error: BaseValidationError, place: str) -> list[str]:
    found: list[str] = []
    for inner in error.exceptions:
        if isinstance(inner, ForbiddenExtraKeysError):
            found.append(f"{place}: unknown key {min(inner.extra_fields)!r}")
            continue
        notes = [n for n in getattr(inner, "__notes__", ()) if hasattr(n, "name")]
        where = f"{place}.{notes[0].name}" if notes else place
        if isinstance(inner, KeyError):
            found.append(f"{place}: the key {inner.args[0]!r} is missing")
        elif isinstance(inner, BaseValidationError):
            found += _place_reasons(inner, where)
        elif isinstance(inner, (ValueError, TypeError)):
            found += _prefix(inner, where)
        else:
            found += [f"{where}: {text}" for text in transform_error(error)]
    return found


@frozen(kw_only=True)
class _Document:
    """The file as it lies on disk."""

    version: int
    nodes: tuple[Node, ...]
    rank: int = 0
    world_size: int = 1
    symbols: dict[str, int | None] = field(factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    input_kinds: dict[str, InputKind] = field(factory=dict)
    input_bytes: int | None = None


def _structure_kinds(value: object, _: object) -> dict[str, InputKind]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object of kinds, got {value!r:.60}")
    found = {}
    for name, kind in value.items():
        try:
            found[name] = InputKind(kind)
        except ValueError:
            kinds = ", ".join(InputKind)
            text = f".{name}: unknown kind {kind!r:.60}; expected one of {kinds}"
            raise _PlacedError((text,)) from None
    return found


def _structure_symbols(value: object, _: object) -> dict[str, int | None]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object of hints, got {value!r:.60}")
    for name, hint in value.items():
        if hint is not None and (isinstance(hint, bool) or not isinstance(hint, int)):
            raise _PlacedError((f".{name}: a hint is an integer or null, got {hint!r:.60}",))
    return dict(value)


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True)
    for kind in (int, str, bool):
        converter.register_structure_hook(kind, strictly(kind))
    converter.register_structure_hook(NodeKind, _structure_kind)
    converter.register_structure_hook_func(lambda t: t == dict[str, int | None], _structure_symbols)
    converter.register_structure_hook_func(lambda t: t == dict[str, InputKind], _structure_kinds)
    converter.register_structure_hook_func(lambda t: t == Size, _structure_size)
    converter.register_structure_hook_func(
        lambda target: getattr(target, "__origin__", None) is tuple,
        lambda value, target: _structure_list(converter, value, target),
    )
    for cls in (Node, _Document):
        converter.register_structure_hook(
            cls, make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)
        )
    optional = {
        a.name: override(omit_if_default=True)
        for a in fields(Node)
        if a.name not in ("name", "kind", "op", "reads", "writes")
    }
    converter.register_unstructure_hook(
        Node,
        make_dict_unstructure_fn(Node, converter, **optional),  # type: ignore[arg-type]
    )
    return converter


_converter = _make_converter()


def graph_from_json(data: object, where: str = "graph") -> OverlapGraph:
    """Build a graph from parsed JSON.

    Raises:
        GraphFileError: the data breaks the format; says where (key, node) and why.
    """
    if not isinstance(data, dict):
        raise GraphFileError(f"{where}: expected a JSON object, got {type(data).__name__}")
    if "gathers" in data and "nodes" not in data:
        raise GraphFileError(
            f"{where}: a report, not a graph file: `overlap-core explain` reads it"
        )
    for key in _REQUIRED:
        if key not in data:
            raise GraphFileError(f"{where}: the key {key!r} is missing")
    if data["version"] != FILE_VERSION or isinstance(data["version"], bool):
        raise GraphFileError(
            f"{where}: version is {data['version']!r:.60}; this overlap_core reads version "
            f"{FILE_VERSION}"
        )
    try:
        document = _converter.structure(data, _Document)
    except BaseValidationError as error:
        reasons = [reason.lstrip(".") for reason in _place_reasons(error, "")]
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise GraphFileError(f"{where}: {reasons[0].removeprefix(': ')}{more}") from None
    try:
        return OverlapGraph(
            rank=document.rank,
            world_size=document.world_size,
            nodes=document.nodes,
            inputs=document.inputs,
            outputs=document.outputs,
            constants=document.constants,
            input_kinds=document.input_kinds,
            input_bytes=document.input_bytes,
            symbols=document.symbols,
        )
    except GraphFormatError as error:
        raise GraphFileError(f"{where}: {error}") from None


def graph_to_json(graph: OverlapGraph) -> dict[str, Any]:
    """The graph as JSON data; optional keys that hold nothing are left out."""
    nodes = [_converter.unstructure(node) for node in graph.nodes]
    for node in nodes:
        if "sizes" in node:
            node["sizes"] = [[str(size) for size in sizes] for sizes in node["sizes"]]
    data: dict[str, Any] = {
        "version": FILE_VERSION,
        "rank": graph.rank,
        "world_size": graph.world_size,
        "symbols": dict(graph.symbols),
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
    }
    if graph.constants:
        data["constants"] = list(graph.constants)
    if graph.input_kinds:
        data["input_kinds"] = {name: str(kind) for name, kind in graph.input_kinds.items()}
    if graph.input_bytes is not None:
        data["input_bytes"] = graph.input_bytes
    data["nodes"] = nodes
    return data


def load_graph(path: str | PathLike[str]) -> OverlapGraph:
    """Read a graph file; see `OverlapGraph.load`."""
    where = str(path)
    try:
        data = read_json(path, "a graph file")
    except ValueError as error:
        raise GraphFileError(f"{where}: {error}") from None
    return graph_from_json(data, where)


def save_graph(graph: OverlapGraph, path: str | PathLike[str]) -> None:
    """Write a graph file; see `OverlapGraph.save`."""
    lines = json.dumps(graph_to_json(graph), indent=1)
    try:
        Path(path).write_text(lines + "\n", encoding="utf-8")
    except OSError as error:
        raise GraphFileError(f"{path}: cannot be written: {error.strerror or error}") from None
