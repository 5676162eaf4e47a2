"""What the nodes of a graph compute in some order, followed symbolically, value by value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from overlap_core.graph import Node, OverlapGraph

__all__ = ["Run", "Value", "run_symbolically"]


@frozen(eq=False)
class Value:
    """What one node made of the values that it read."""

    node: str
    inputs: tuple[Value | str, ...]


@define
class Run:
    """Buffers and the values in them, while nodes are run one by one."""

    buffers: dict[str, Value | str]
    seen: dict[str, tuple[tuple[str, str], ...]] = field(factory=dict)
    """What each node saw: buffers, and who made the value in each."""

    def step(self, node: Node) -> None:
        """Run one node.

        Raises:
            KeyError: it reads a buffer that nobody has written yet.
        """
        read = [(buffer, self.buffers[buffer]) for buffer in (*node.reads, *node.mutates)]
        self.seen[node.name] = tuple((buffer, maker(value)) for buffer, value in read)
        made = Value(node.name, tuple(value for _, value in read))
        for buffer in (*node.writes, *node.mutates):
            self.buffers[buffer] = made


def maker(value: Value | str) -> str:
    """The node that made a value, or the caller's buffer that it is."""
    return value if isinstance(value, str) else value.node


def run_symbolically(graph: OverlapGraph, order: Iterable[Node] = ()) -> Run:
    """Run nodes, none by default, from the graph's inputs and constants on."""
    run = Run({name: name for name in (*graph.inputs, *graph.constants)})
    for node in order:
        run.step(node)
    return run
