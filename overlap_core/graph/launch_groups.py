"""What moves together with a gather's launch.

A launch group is the launch, the multi-output members that unpack its buffer before any wait,
and the producers (cast, pad, view, bucket copy-in) that serve it alone and depend on graph
inputs only.

Ranks with equal graphs must find equal groups, so nothing here may look at costs, byte counts or
names.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING

from attrs import frozen

from .nodes import NodeKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .graph import OverlapGraph
    from .nodes import Node

__all__ = ["LaunchGroup", "find_input_only", "find_launch_group", "find_waits"]

_PRODUCT = re.compile(
    r"(?:^|[.:])_?(?:mm|addmm|bmm|baddbmm|scaled_mm|grouped_mm|int_mm|mv|addmv|dot|matmul|linear"
    r"|einsum|convolution|conv[123]d|\w*attention\w*)(?:[.]|$)"
)
"""Ops whose result is an activation, whatever they read; a cast, a pad or a copy is none."""


@frozen(kw_only=True)
class LaunchGroup:
    """A launch and the nodes that move with it; all are positions in program order."""

    launch: int
    members: tuple[int, ...]
    """Ascending, the launch among them."""
    waits: tuple[int, ...]
    """The waits that make the gather's outputs readable, ascending."""
    coalesced: tuple[int, ...] = ()
    """All launches of the coalesced call that `launch` is the first of; empty: it is alone."""

    @property
    def launches(self) -> tuple[int, ...]:
        """The launches that are one call, in order."""
        return self.coalesced or (self.launch,)


def find_input_only(graph: OverlapGraph, communicates: Collection[int]) -> tuple[bool | None, ...]:
    """For each node: computed from graph inputs alone (True), from nothing (None), or else False.

    A node that communicates, waits, is opaque, multiplies matrices or reads an activation that is
    an input is False, and so is all that depends on it.
    """
    inputs = frozenset(graph.inputs)
    result: list[bool | None] = []
    for index, node in enumerate(graph.nodes):
        if node.kind is not NodeKind.COMPUTE or index in communicates or _makes_activation(node):
            result.append(False)
            continue
        states: set[bool | None] = {result[before] for before in graph.data_predecessors[index]}
        if not graph.activations.isdisjoint((*node.reads, *node.mutates)):
            states.add(False)
        if not inputs.isdisjoint(node.reads) or not inputs.isdisjoint(node.mutates):
            states.add(True)
        result.append(False if False in states else True if True in states else None)
    return tuple(result)


def _makes_activation(node: Node) -> bool:
    return _is_product(node.op) or any(map(_is_product, node.origins))


@lru_cache(maxsize=4096)
def _is_product(op: str) -> bool:
    return _PRODUCT.search(op) is not None


def find_waits(
    graph: OverlapGraph, launch: int, communicates: Collection[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The multi-output members and the waits of one launch, each ascending.

    A wait for what has been waited for already counts too; it costs nothing.
    """
    nodes, predecessors, successors = graph.nodes, graph.predecessors, graph.successors
    unpacks: list[int] = []
    waits: list[int] = []
    unwaited = {launch}
    reached = {launch}
    stack = [launch]
    while stack:
        current = stack.pop()
        written = {*nodes[current].writes, *nodes[current].mutates}
        for index in successors[current]:
            node = nodes[index]
            if index in reached or written.isdisjoint(node.reads):
                continue
            if node.kind is NodeKind.WAIT:
                reached.add(index)
                waits.append(index)
                stack.append(index)
            elif (
                current in unwaited
                and node.kind is NodeKind.COMPUTE
                and index not in communicates
                and unwaited.issuperset(predecessors[index])
            ):
                # Data cannot be read before the wait, so this only unpacks the launch's buffer.
                reached.add(index)
                unwaited.add(index)
                unpacks.append(index)
                stack.append(index)
    return tuple(sorted(unpacks)), tuple(sorted(waits))


def find_launch_group(
    graph: OverlapGraph,
    launch: int,
    input_only: tuple[bool | None, ...],
    communicates: Sequence[int],
) -> LaunchGroup:
    """The launch group of one gather, in time linear in its size.

    A multi-output member behind the next node of `communicates` (ascending positions) has no
    part in it: moving up with the launch, it would pass communication that the launch does not.
    Neither has a producer that serves the caller too, since it changes an input in place.
    """
    unpacks, waits = find_waits(graph, launch, communicates)
    following = bisect_right(communicates, launch)
    end = communicates[following] if following < len(communicates) else len(graph.nodes)
    members = {launch, *(unpack for unpack in unpacks if unpack < end)}
    stable = {*members, *waits}
    stack = list(graph.data_predecessors[launch])
    while stack:
        index = stack.pop()
        if index in members or input_only[index] is False:
            continue
        node = graph.nodes[index]
        if stable.issuperset(graph.successors[index]) and graph.callers.isdisjoint(
            (*node.writes, *node.mutates)
        ):
            members.add(index)
            stable.add(index)
            stack.extend(graph.data_predecessors[index])
    return LaunchGroup(launch=launch, members=tuple(sorted(members)), waits=waits)
