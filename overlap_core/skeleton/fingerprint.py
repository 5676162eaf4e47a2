"""The fingerprint: equal if and only if some renaming of symbols makes two graphs equal.

What is each rank's own by nature stays out: names of nodes, buffers, groups and symbols, size
hints, the ranks in a group, costs and byte counts.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from overlap_core.graph.symbols import parse_expression

from .canonical import canonical_sites

if TYPE_CHECKING:
    from overlap_core.graph import Node, OverlapGraph
    from overlap_core.graph.symbols import Expression

__all__ = ["fingerprint", "structure"]

_VERSION = "overlap-fingerprint-1"
_STRUCTURE_VERSION = "overlap-structure-1"
_STATIC = "#"
"""Stands for any static size, where these do not count."""
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def fingerprint(graph: OverlapGraph) -> str:
    """Hex digest of the node sequence, equal for graphs that differ only in symbol names.

    Op identity, kinds, sizes, dtypes, fused origin targets, the groups by order of first
    appearance with their sizes, and the whole dependency structure count. Symbols count by their
    pattern of occurrence in sizes, through a canonical labelling (`canonical_sites`).
    """
    return _digest(graph, _VERSION, static=True)


def structure(graph: OverlapGraph) -> str:
    """Hex digest of a graph but for its static sizes, of which only the places count.

    Equal for graphs that one program makes of other numbers of rows: what may be moved where does
    not depend on sizes.
    """
    return _digest(graph, _STRUCTURE_VERSION, static=False)


def _digest(graph: OverlapGraph, version: str, *, static: bool) -> str:
    numbers = _BufferNumbers(graph)
    groups: dict[str, int] = {}
    sites: list[Expression] = []
    site_numbers: dict[int | str, Expression] = {}
    digest = hashlib.sha256()
    digest.update(version.encode())
    for node in graph.nodes:
        shape: list[list[int | str]] = []
        for sizes in node.sizes:
            dims: list[int | str] = []
            for size in sizes:
                if isinstance(size, int):
                    dims.append(size if static else _STATIC)
                    continue
                expression = site_numbers.get(size)
                if expression is None:
                    expression = site_numbers[size] = parse_expression(size)
                if expression.constant is not None:
                    dims.append(expression.constant if static else _STATIC)
                else:
                    dims.append("~")
                    sites.append(expression)
            shape.append(dims)
        digest.update(_describe(graph, node, shape, numbers, groups).encode())
    outputs = [numbers[buffer] for buffer in graph.outputs]
    digest.update(_encode(["outputs", outputs]).encode())
    for text in canonical_sites(sites):
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()


class _BufferNumbers(dict[str, "int | str"]):
    """Buffers numbered by first use, so that neither their names nor unused inputs count.

    Which inputs come before a used one is each rank's own: a local length that is read from a
    list of split sizes is the first number of the list on one rank and the second on another.
    """

    def __init__(self, graph: OverlapGraph) -> None:
        super().__init__()
        self._inputs = frozenset(graph.inputs)
        self._constants = frozenset(graph.constants)

    def __missing__(self, buffer: str) -> int | str:
        number: int | str = len(self)
        if buffer in self._inputs:
            number = f"i{number}"
        elif buffer in self._constants:
            number = f"c{number}"
        self[buffer] = number
        return number


def _describe(
    graph: OverlapGraph,
    node: Node,
    shape: list[list[int | str]],
    numbers: _BufferNumbers,
    groups: dict[str, int],
) -> str:
    group = None
    if node.group is not None:
        size = None if node.group_ranks is None else len(node.group_ranks)
        group = (groups.setdefault(node.group, len(groups)), size)
    return _encode(
        [
            node.kind,
            node.op,
            [numbers[b] for b in node.reads],
            [numbers[b] for b in node.writes],
            [numbers[b] for b in node.mutates],
            sorted(graph.index[name] for name in node.after),
            shape,
            node.dtypes,
            group,
            node.issues_collective,
            sorted(set(node.origins)),
        ]
    )
