"""`OverlapGraph`: one rank's nodes in program order, checked when it is made."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import field, frozen

from .dependencies import build_predecessors, build_successors, check_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from .nodes import InputKind, Node

__all__ = ["OverlapGraph"]


@frozen(kw_only=True, slots=False)
class OverlapGraph:
    """What one rank compiles, as plain data: nodes in program order and the buffers they use.

    Raises:
        GraphFormatError: the nodes break a rule of the format (a cycle, a read of a buffer that
            nothing writes, two nodes of one name, a negative cost, ...); says which node.
    """

    rank: int = 0
    world_size: int = 1
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...] = ()
    """Buffers that the caller passes in, such as sharded parameters."""
    outputs: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    """Buffers baked into the compiled graph; a gather fed by them alone is not of weights."""
    input_kinds: Mapping[str, InputKind] = field(factory=dict)
    """What the compiler knows of inputs; one that is not named may be anything."""
    input_bytes: int | None = None
    """Bytes of the inputs, which the caller holds the whole time; None: not known."""
    symbols: Mapping[str, int | None] = field(factory=dict)
    """Size hints of the shape symbols as this rank saw them first."""

    def __attrs_post_init__(self) -> None:
        check_nodes(self)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each node by name."""
        return {node.name: position for position, node in enumerate(self.nodes)}

    @cached_property
    def known_hints(self) -> dict[str, int]:
        """Size hints of the symbols that have one."""
        return {name: hint for name, hint in self.symbols.items() if hint is not None}

    @cached_property
    def producers(self) -> dict[str, int]:
        """Position of the node that writes each buffer first."""
        found: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            for buffer in node.writes:
                found.setdefault(buffer, position)
        return found

    @cached_property
    def callers(self) -> frozenset[str]:
        """Buffers that the caller sees too: inputs, constants and outputs."""
        return frozenset((*self.inputs, *self.constants, *self.outputs))

    @cached_property
    def activations(self) -> frozenset[str]:
        """Inputs that are no weights, as the compiler knows."""
        return frozenset(name for name, kind in self.input_kinds.items() if kind.is_activation)

    @cached_property
    def _edges(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        return build_predecessors(self)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Positions that must stay before each node: data, mutation and explicit ordering."""
        return self._edges[0]

    @cached_property
    def data_predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the nodes whose values each node sees."""
        return self._edges[1]

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Positions that must stay behind each node."""
        return build_successors(self.predecessors)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the graph file (JSON, version 1) that `load` reads back to an equal graph."""
        from .files import save_graph

        save_graph(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> OverlapGraph:
        """Read a graph file.

        Raises:
            GraphFileError: the file is no graph file of this version; says where and why.
        """
        from .files import load_graph

        return load_graph(path)
