"""Ordering between nodes: through data, through mutation, and by explicit request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.errors import GraphFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .graph import OverlapGraph
    from .nodes import Node

__all__ = ["build_predecessors", "build_successors", "check_nodes", "first_violation"]


def check_nodes(graph: OverlapGraph) -> None:
    """Refuse a graph whose program order is not a legal order of its own nodes.

    Raises:
        GraphFormatError: with the first node that breaks a rule, and the rule.
    """
    if not 0 <= graph.rank < graph.world_size:
        raise GraphFormatError(
            f"rank {graph.rank} does not lie in a world of {graph.world_size} ranks"
        )
    if graph.input_bytes is not None and graph.input_bytes < 0:
        raise GraphFormatError(f"input_bytes is negative ({graph.input_bytes})")
    for name in graph.input_kinds:
        if name not in graph.inputs:
            raise GraphFormatError(f"input_kinds names {name!r}, which is no input of the graph")
    position: dict[str, int] = {}
    writer: dict[str, int] = {}
    known = {*graph.inputs, *graph.constants}
    for index, node in enumerate(graph.nodes):
        if node.name in position:
            raise _broken(graph, index, f"the name is taken by nodes[{position[node.name]}]")
        position[node.name] = index
        _check_numbers(graph, index)
        for buffer in node.writes:
            if buffer in node.mutates:
                continue
            if buffer in writer:
                other = graph.nodes[writer[buffer]].name
                raise _broken(
                    graph, index, f"writes {buffer!r}, which {other!r} writes already "
                    "(list it under 'mutates' if it is changed in place)"
                )  # fmt: skip
            if buffer in known:
                raise _broken(graph, index, f"writes {buffer!r}, which is an input of the graph")
            writer[buffer] = index
    for index, node in enumerate(graph.nodes):
        for what, buffers in (("reads", node.reads), ("mutates", node.mutates)):
            for buffer in buffers:
                if buffer not in known and buffer not in writer:
                    raise _broken(graph, index, f"{what} {buffer!r}, which nothing writes")
        for name in node.after:
            if name not in position:
                raise _broken(graph, index, f"is to come after {name!r}, which is not a node")
    for buffer in graph.outputs:
        if buffer not in known and buffer not in writer:
            raise GraphFormatError(f"outputs: {buffer!r} is written by nothing")
    _check_order(graph, position, writer)


def _check_numbers(graph: OverlapGraph, index: int) -> None:
    node = graph.nodes[index]
    for what in ("nbytes", "cost_ns", "network_ns"):
        value = getattr(node, what)
        if value is not None and value < 0:
            raise _broken(graph, index, f"{what} is negative ({value})")
    if node.group_ranks is not None:
        ranks = node.group_ranks
        if len(set(ranks)) != len(ranks):
            raise _broken(graph, index, f"group_ranks names a rank twice: {list(ranks)}")
        outside = [rank for rank in ranks if not 0 <= rank < graph.world_size]
        if outside:
            raise _broken(
                graph,
                index,
                f"group_ranks has {outside[0]}, outside a world of {graph.world_size} ranks",
            )
    for what, rows in (("sent", node.sent), ("received", node.received)):
        if rows and node.group_ranks is not None and len(rows) != len(node.group_ranks):
            raise _broken(
                graph,
                index,
                f"{what} has {len(rows)} numbers of rows for {len(node.group_ranks)} ranks",
            )


def _check_order(graph: OverlapGraph, position: dict[str, int], writer: dict[str, int]) -> None:
    """Every producer and every `after` lies before; if not, say whether it is a cycle."""
    for index, node in enumerate(graph.nodes):
        wanted = [(f"reads {b!r}", writer[b]) for b in node.reads if b in writer]
        wanted += [(f"mutates {b!r}", writer[b]) for b in node.mutates if b in writer]
        wanted += [(f"is to come after {name!r}", position[name]) for name in node.after]
        for what, before in wanted:
            if before >= index:
                path = _find_path(graph, position, writer, before, index)
                if path is not None:
                    names = " -> ".join(graph.nodes[i].name for i in [*path, path[0]])
                    raise _broken(graph, index, f"lies on a cycle: {names}")
                raise _broken(
                    graph, index, f"{what}, from {graph.nodes[before].name!r} further down; "
                    "nodes must stand in program order"
                )  # fmt: skip


def _find_path(
    graph: OverlapGraph, position: dict[str, int], writer: dict[str, int], start: int, goal: int
) -> list[int] | None:
    """Positions from `goal` over its consumers to `start`, if `start` depends on `goal`."""
    came_from: dict[int, int] = {}
    stack, seen = [start], {start}
    while stack:
        current = stack.pop()
        if current == goal:
            path = [goal]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path
        node = graph.nodes[current]
        needs = [writer[b] for b in (*node.reads, *node.mutates) if b in writer]
        needs += [position[name] for name in node.after]
        for before in needs:
            if before not in seen:
                seen.add(before)
                came_from[before] = current
                stack.append(before)
    return None


def _broken(graph: OverlapGraph, index: int, why: str) -> GraphFormatError:
    node: Node = graph.nodes[index]
    return GraphFormatError(f"nodes[{index}] ({node.name!r}, {node.op}): {why}")


Edges = tuple[tuple[int, ...], ...]


def build_predecessors(graph: OverlapGraph) -> tuple[Edges, Edges]:
    """For each node the positions that must precede it, and those whose values it sees.

    Both ascending. A reader follows the last writer. A node that changes a buffer in place
    follows the last writer and all readers since, and everything later follows it.
    """
    position = graph.index
    last_writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    every: list[tuple[int, ...]] = []
    data: list[tuple[int, ...]] = []
    for index, node in enumerate(graph.nodes):
        seen: set[int] = set()
        for buffer in (*node.reads, *node.mutates) if node.mutates else node.reads:
            if buffer in last_writer:
                seen.add(last_writer[buffer])
        values = tuple(sorted(seen)) if len(seen) > 1 else tuple(seen)
        data.append(values)
        if node.mutates or node.after:
            for buffer in node.mutates:
                seen.update(readers.get(buffer, ()))
            seen.update(position[name] for name in node.after)
            seen.discard(index)
            values = tuple(sorted(seen))
        every.append(values)
        for buffer in (*node.writes, *node.mutates) if node.mutates else node.writes:
            last_writer[buffer] = index
            readers.pop(buffer, None)
        for buffer in node.reads:
            readers.setdefault(buffer, []).append(index)
    return tuple(every), tuple(data)


def build_successors(predecessors: Edges) -> Edges:
    """The same edges seen from the other end, ascending."""
    result: list[list[int]] = [[] for _ in predecessors]
    for index, before in enumerate(predecessors):
        for earlier in before:
            result[earlier].append(index)
    return tuple(map(tuple, result))


def first_violation(predecessors: Edges, order: Iterable[int]) -> tuple[int, int] | None:
    """The first (earlier, later) pair of positions that `order` has the wrong way round."""
    place = {index: spot for spot, index in enumerate(order)}
    for index, before in enumerate(predecessors):
        for earlier in before:
            if place[earlier] > place[index]:
                return earlier, index
    return None
