"""Bytes of buffers, read off a graph without the code under test.

Sizes are evaluated by Python itself, buffers are followed one at a time, and every question is
answered by looking at the whole order again.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING

from overlap_core.graph import NodeKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core import Node, OverlapGraph

__all__ = ["bytes_around", "live_by_looking", "own_bytes"]


def own_bytes(graph: OverlapGraph, node: Node) -> int:
    """Bytes that a node allocates: bfloat16 and float32 only, or as its `nbytes` says."""
    alias = node.kind is NodeKind.WAIT or (node.kind is NodeKind.COLLECTIVE and node.mutates)
    if alias or not node.writes:
        return 0
    if node.nbytes is not None:
        return node.nbytes
    hints = {"Max": max, "__builtins__": {}, **graph.symbols}
    widths = [{"bfloat16": 2, "float32": 4}[dtype] for dtype in node.dtypes]
    return sum(
        width * prod(eval(str(size), dict(hints)) for size in sizes)
        for sizes, width in zip(node.sizes, widths, strict=True)
    )


def _origins(graph: OverlapGraph) -> tuple[list[set[str]], set[str]]:
    """For each node the nodes whose memory it needs, and those whose memory the caller gets.

    A launch makes its input needed by whatever waits for it.
    """
    holds: dict[str, set[str]] = {}
    reading: dict[str, set[str]] = {}
    needs: list[set[str]] = []
    for node in graph.nodes:
        used = (*node.reads, *node.mutates)
        read: set[str] = set().union(*(holds.get(buffer, set()) for buffer in used))
        network: set[str] = set().union(*(reading.get(buffer, set()) for buffer in used))
        makes = {node.name} if own_bytes(graph, node) else set()
        needs.append(read | makes | (network if node.kind is NodeKind.WAIT else set()))
        for buffer in node.writes:
            if node.kind is NodeKind.WAIT:
                flying = [b for b in node.reads if b in reading] or node.reads
                holds[buffer] = set().union(*(holds.get(b, set()) for b in flying))
            elif node.kind is NodeKind.COLLECTIVE and node.mutates:
                holds[buffer] = set().union(*(holds.get(b, set()) for b in node.mutates))
            elif "multi_output" in node.op:
                holds[buffer] = read | makes
            else:
                holds[buffer] = makes
        for buffer in (*node.writes, *node.mutates):
            reading.pop(buffer, None)
            if node.kind is NodeKind.COLLECTIVE:
                reading[buffer] = read
            elif network and node.kind is NodeKind.COMPUTE:
                reading[buffer] = network
    kept: set[str] = set().union(*(holds.get(buffer, set()) for buffer in graph.outputs))
    return needs, kept


def live_by_looking(graph: OverlapGraph, order: Sequence[int]) -> tuple[int, ...]:
    """Bytes alive while each node runs: made before or here, needed here or later.

    A generated kernel that makes one buffer writes it over one of the same size that ends there.
    """
    needs, kept = _origins(graph)
    found = []
    for place, position in enumerate(order):
        sooner = set().union(*(needs[p] for p in order[:place]))
        before = sooner | needs[position]
        afterwards = set().union(*(needs[p] for p in order[place + 1 :])) | kept
        alive = before & (needs[position] | afterwards)
        node = graph.nodes[position]
        sizes = {name: own_bytes(graph, graph.nodes[graph.index[name]]) for name in alive}
        if node.op in ("fused", "ComputedBuffer") and node.name not in sooner:
            ending = (needs[position] & sooner) - afterwards
            if any(sizes[name] == sizes.get(node.name) for name in ending):
                del sizes[node.name]
        found.append(sum(sizes.values()))
    return tuple(found)


def bytes_around(graph: OverlapGraph, order: Sequence[int], launches: Sequence[int]) -> int:
    """The most bytes at once that launches make and read, each from launch to last wait."""
    needs, _ = _origins(graph)
    sizes = {node.name: own_bytes(graph, node) for node in graph.nodes}
    place = {position: spot for spot, position in enumerate(order)}

    @cache
    def last_wait(launch: int) -> int:
        flying = {*graph.nodes[launch].writes, *graph.nodes[launch].mutates}
        last = -1
        for position in range(launch + 1, len(graph.nodes)):
            node = graph.nodes[position]
            if flying.isdisjoint((*node.reads, *node.mutates)):
                continue
            if node.kind is NodeKind.WAIT:
                last = max(last, place[position])
                flying -= set(node.mutates)
            elif node.kind is NodeKind.COMPUTE:
                flying |= set(node.writes)
            if not flying:
                break
        return last

    return max(
        (
            sum(
                sum(sizes[name] for name in needs[launch])
                for launch in launches
                if place[launch] <= spot < last_wait(launch)
            )
            for spot in range(len(order))
        ),
        default=0,
    )
