"""Memory along an order: when buffers come and go, and how many bytes of gathers are in flight.

A model of what the nodes themselves allocate. Left out: what the caller holds anyway, workspaces
that nobody measured and rounding by the allocator. Sizes that are unknown count as nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from overlap_core.costs import dtype_bytes
from overlap_core.graph import NodeKind, find_waits
from overlap_core.graph.symbols import parse_expression

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from overlap_core.graph import Node, OverlapGraph, Size

__all__ = [
    "Memory",
    "build_memory",
    "in_flight_bytes",
    "live_bytes",
    "peak_bytes",
    "timeline_of_bytes",
]

_UNPACKS = frozenset({"multi_output", "MultiOutput", "unpack"})
_GENERATED = frozenset({"ComputedBuffer", "fused"})
"""Kernels that Inductor generates; they may write over an input that nothing needs later."""


@frozen(kw_only=True)
class Memory:
    """Who allocates what, and who keeps it alive; independent of the order of the nodes.

    Memory is named after the buffer it was allocated for. A wait, an unpack or a collective that
    works in place allocates nothing: its buffers are further names of what they alias.
    """

    nbytes: Mapping[str, int]
    """Bytes by the buffer that they were allocated for."""
    touches: tuple[tuple[str, ...], ...]
    """For each node the memory that must exist while it runs, by the buffer it is named after."""
    lasting: frozenset[str]
    """Memory that the caller gets, alive to the end."""
    generated: frozenset[int] = frozenset()
    """Positions of kernels that may write their output over an input."""

    def in_order(self, order: Sequence[int]) -> Memory:
        """The same for nodes that are numbered by their places in an order."""
        return evolve(
            self,
            touches=tuple(self.touches[position] for position in order),
            generated=frozenset(
                place for place, position in enumerate(order) if position in self.generated
            ),
        )

    def with_workspaces(self, workspaces: Mapping[int, int]) -> Memory:
        """The same with bytes that nodes need while they run and at no other time, by position."""
        nbytes, touches = dict(self.nbytes), list(self.touches)
        for position, needed in workspaces.items():
            owner = f"workspace of {position}"
            nbytes[owner] = needed
            touches[position] = (*touches[position], owner)
        return evolve(self, nbytes=nbytes, touches=tuple(touches))

    def node_bytes(self, position: int) -> int:
        """Bytes that exist while a node runs because of it: what it makes, reads and changes."""
        return sum(self.nbytes[owner] for owner in self.touches[position])


def build_memory(graph: OverlapGraph) -> Memory:
    """Follow the buffers of a graph through aliases, in time linear in its size."""
    ledger = _Ledger(hints=graph.known_hints)
    for node in graph.nodes:
        ledger.add(node)
    outputs = (owner for buffer in graph.outputs for owner in ledger.owners.get(buffer, ()))
    return Memory(
        nbytes=ledger.nbytes,
        touches=tuple(tuple(touched) for touched in ledger.touches),
        lasting=frozenset(outputs),
        generated=frozenset(i for i, node in enumerate(graph.nodes) if node.op in _GENERATED),
    )


def live_bytes(
    graph: OverlapGraph, order: Sequence[int], memory: Memory | None = None
) -> tuple[int, ...]:
    """Bytes that are allocated while each node of an order runs.

    A buffer lives from the node that makes it to the last one that reads it under any name, and
    to the end if the caller gets it. What a collective reads lives until its last wait. The
    output of a generated kernel takes the place of an input of the same size that dies there.

    Args:
        graph: one rank's graph.
        order: a legal order of its positions.
        memory: of the graph, from `build_memory`, where several orders are looked at.

    Returns:
        One number for each place in the order.
    """
    memory = build_memory(graph) if memory is None else memory
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, position in enumerate(order):
        for owner in memory.touches[position]:
            first.setdefault(owner, place)
            last[owner] = place
    change = [0] * (len(order) + 1)
    for owner, place in first.items():
        change[place] += memory.nbytes[owner]
    for place, position in enumerate(order):
        if position in memory.generated:
            made: Counter[int] = Counter()
            dying: Counter[int] = Counter()
            for owner in memory.touches[position]:
                if first[owner] == place:
                    made[memory.nbytes[owner]] += 1
                elif last[owner] == place and owner not in memory.lasting:
                    dying[memory.nbytes[owner]] += 1
            written_over = sum((made & dying).elements())
            change[place] -= written_over
            change[place + 1] += written_over
    for owner in first:
        end = len(order) if owner in memory.lasting else last[owner] + 1
        change[end] -= memory.nbytes[owner]
    return tuple(accumulate(change[:-1]))


def peak_bytes(graph: OverlapGraph, order: Sequence[int], memory: Memory | None = None) -> int:
    """The most bytes that are allocated at once along an order; see `live_bytes`."""
    return max(live_bytes(graph, order, memory), default=0)


def in_flight_bytes(
    graph: OverlapGraph,
    order: Sequence[int],
    launches: Iterable[int],
    communicates: Collection[int],
) -> tuple[int, ...]:
    """Bytes of gathers between launch and first wait, while each node of an order runs.

    Args:
        graph: one rank's graph.
        order: a legal order of its positions.
        launches: positions of the gathers that count.
        communicates: positions of all nodes that issue communication.

    Returns:
        One number for each place in the order. A gather whose wait is missing is in flight to
        the end.
    """
    place_of = {position: place for place, position in enumerate(order)}
    change = [0] * (len(order) + 1)
    for launch in launches:
        nbytes = _output_bytes(graph.nodes[launch], graph.known_hints)
        _, waits = find_waits(graph, launch, communicates)
        change[place_of[launch]] += nbytes
        change[min((place_of[wait] for wait in waits), default=len(order))] -= nbytes
    return tuple(accumulate(change[:-1]))


def timeline_of_bytes(
    graph: OverlapGraph,
    order: Sequence[int],
    launches: Iterable[int],
    communicates: Collection[int],
) -> tuple[tuple[int, int], ...]:
    """What `in_flight_bytes` says, as (place in the order, bytes).

    Only places at which the number changes are listed; it holds up to the next one, and is 0
    before the first.
    """
    steps: list[tuple[int, int]] = []
    before = 0
    for place, nbytes in enumerate(in_flight_bytes(graph, order, launches, communicates)):
        if nbytes != before:
            steps.append((place, nbytes))
        before = nbytes
    return tuple(steps)


@define(kw_only=True)
class _Ledger:
    """Buffers and the memory behind them, while nodes are read in program order."""

    hints: Mapping[str, int]
    nbytes: dict[str, int] = field(factory=dict)
    owners: dict[str, tuple[str, ...]] = field(factory=dict)
    """By buffer, the memory that it keeps alive; buffers of the caller have none."""
    touches: list[dict[str, None]] = field(factory=list)
    made_at: dict[str, int] = field(factory=dict)
    """By memory, the position of the node that allocates it."""
    known: dict[object, list[int]] = field(factory=dict)
    """Bytes of outputs by their sizes and dtypes."""
    network: dict[str, tuple[str, ...]] = field(factory=dict)
    """By buffer that is not waited for yet, the memory that its collective still reads."""

    def add(self, node: Node) -> None:
        read = self._behind((*node.reads, *node.mutates))
        touched = dict.fromkeys(read)
        self.touches.append(touched)
        unwaited = [b for b in (*node.reads, *node.mutates) if b in self.network]
        in_flight = dict.fromkeys(owner for b in unwaited for owner in self.network[b])
        aliased: tuple[str, ...] | None = None
        if node.kind is NodeKind.WAIT:
            # It may read the collective's input too, to keep it alive up to here and no longer.
            aliased = self._behind(unwaited or node.reads)
            touched.update(in_flight)
        elif node.kind is NodeKind.COLLECTIVE and (node.mutates or _is_in_place(node.op)):
            aliased = self._behind(node.mutates or node.reads)
        fresh = [buffer for buffer in node.writes if buffer not in node.mutates]
        if aliased is None:
            parents = read if node.op in _UNPACKS else ()
            aliased = self._allocate(node, fresh, parents)
        touched.update(dict.fromkeys(aliased))
        for buffer in fresh:
            self.owners.setdefault(buffer, aliased)
        self._mark_flying(node, read, tuple(in_flight), unpacks=bool(unwaited))

    def _behind(self, buffers: Iterable[str]) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(owner for buffer in buffers for owner in self.owners.get(buffer, ()))
        )

    def _allocate(self, node: Node, fresh: list[str], parents: tuple[str, ...]) -> tuple[str, ...]:
        """Give a node's new buffers their memory, and say what stands behind them all.

        An unpack takes its part out of its parents' memory, which existed since they ran.
        """
        tensors = [node.nbytes] if node.nbytes is not None else self._tensor_bytes(node)
        if len(tensors) == len(node.writes) > 1:
            sizes = dict(zip(node.writes, tensors, strict=True))
            for buffer in fresh:
                self.owners[buffer] = (*parents, buffer)
                self._own(buffer, sizes[buffer], parents)
            return (*parents, *fresh)
        if fresh:
            self._own(fresh[0], sum(tensors), parents)
        return (*parents, *fresh[:1])

    def _tensor_bytes(self, node: Node) -> list[int]:
        """As the function; few shapes occur again and again."""
        shapes = node.sizes, node.dtypes
        found = self.known.get(shapes)
        if found is None:
            found = self.known[shapes] = _tensor_bytes(node, self.hints)
        return found

    def _own(self, buffer: str, nbytes: int, parents: tuple[str, ...]) -> None:
        position = len(self.touches) - 1
        self.nbytes[buffer] = nbytes
        for parent in parents:
            taken = min(nbytes, self.nbytes[parent])
            if taken:
                self.nbytes[parent] -= taken
                position = self.made_at[parent]
                break
        self.made_at[buffer] = position
        self.touches[position][buffer] = None

    def _mark_flying(
        self, node: Node, read: tuple[str, ...], in_flight: tuple[str, ...], *, unpacks: bool
    ) -> None:
        made = (*node.writes, *node.mutates)
        if node.kind is NodeKind.COLLECTIVE:
            self.network.update(dict.fromkeys(made, read))
        elif node.kind is NodeKind.COMPUTE and unpacks:
            self.network.update(dict.fromkeys(made, in_flight))
        else:
            for buffer in made:
                self.network.pop(buffer, None)


def _is_in_place(op: str) -> bool:
    """Whether a functional collective writes into its arguments, going by torch's naming."""
    name = op.split(".")[1] if "." in op else op
    return name.endswith(("_", "_out"))


def _output_bytes(node: Node, hints: Mapping[str, int]) -> int:
    return sum(_tensor_bytes(node, hints)) if node.nbytes is None else node.nbytes


def _tensor_bytes(node: Node, hints: Mapping[str, int]) -> list[int]:
    """Bytes of each output of a node, 0 where a size or the dtype is unknown."""
    widths = [dtype_bytes(dtype) for dtype in node.dtypes]
    widths += [None] * (len(node.sizes) - len(widths))
    return [_nbytes(sizes, width, hints) for sizes, width in zip(node.sizes, widths, strict=False)]


def _nbytes(sizes: Sequence[Size], width: float | None, hints: Mapping[str, int]) -> int:
    numbers = [s if isinstance(s, int) else parse_expression(s).evaluate(hints) for s in sizes]
    known = [number for number in numbers if number is not None]
    if width is None or len(known) != len(numbers):
        return 0
    return max(0, math.ceil(math.prod(known) * width))
