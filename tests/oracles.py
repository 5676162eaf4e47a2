"""Independent readings of a graph and an order, that tests hold the pass against.

Nothing here uses the pass's own idea of dependencies, launch groups or time: what nodes compute is
followed symbolically, value by value, in the order given.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

from attrs import evolve

from overlap_core.graph import NodeKind
from overlap_core.testing._values import Value, run_symbolically

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from overlap_core import RankOutcome, SkeletonEntry
    from overlap_core.graph import Node, OverlapGraph

__all__ = [
    "bytes_in_flight",
    "find_movable",
    "is_one_sequence",
    "is_restored",
    "issued",
    "issues_communication",
    "launches_of_waits",
    "weight_gathers",
]


def issues_communication(node: Node) -> bool:
    """As the built-in plugin says of the nodes that the strategies make."""
    return node.kind is NodeKind.COLLECTIVE or node.issues_collective


def is_restored(outcome: RankOutcome) -> bool:
    """Whether ranks had come with the same communication in other orders, and left with one."""
    return any("one order was restored on all of them" in note for note in outcome.notes)


def issued(outcome: RankOutcome, order: Iterable[str]) -> list[SkeletonEntry]:
    """What ranks can compare of each operation, in an order: groups are numbered as they come."""
    entries = {entry.node: entry for entry in outcome.skeleton}
    groups: dict[int, int] = {}
    found: list[SkeletonEntry] = []
    for entry in (entries[name] for name in order if name in entries):
        numbers = tuple(groups.setdefault(group, len(groups)) for group in entry.groups)
        found.append(evolve(entry, ordinal=len(found), groups=numbers))
    return found


def is_one_sequence(sequences: Sequence[Sequence[SkeletonEntry]]) -> bool:
    """Whether any two ranks issue the same; sizes count where they are static on both.

    Static sizes may differ where one dimension, but not the last one of several, is a rank's own
    share of the rows, in an all-to-all or a custom op, unless another order explains them better.
    """
    return all(
        len(ours) == len(theirs)
        and all(map(_meet, ours, theirs))
        and not _fit_better_otherwise(ours, theirs)
        for ours, theirs in combinations(sequences, 2)
    )


def _meet(one: SkeletonEntry, other: SkeletonEntry) -> bool:
    return (
        evolve(one, sizes=()) == evolve(other, sizes=())
        and [len(dims) for dims in one.sizes] == [len(dims) for dims in other.sizes]
        and (not _conflicts(one, other) or _has_own_rows(one, other))
    )


def _conflicts(one: SkeletonEntry, other: SkeletonEntry) -> list[tuple[int, int]]:
    """Output and dimension of the static sizes that differ."""
    return [
        (output, dim)
        for output, (ours, theirs) in enumerate(zip(one.sizes, other.sizes, strict=True))
        for dim, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b and isinstance(a, int) and isinstance(b, int)
    ]


def _has_own_rows(one: SkeletonEntry, other: SkeletonEntry) -> bool:
    found = _conflicts(one, other)
    if one.op.startswith("_c10d_functional"):
        return "all_to_all" in one.op and all(dim == 0 for _, dim in found)
    differing = [
        (output, dim)
        for output, (ours, theirs) in enumerate(zip(one.sizes, other.sizes, strict=True))
        for dim, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]
    once = len({output for output, _ in differing}) == len(differing) == len(found)
    return once and all(dim == 0 or dim < len(one.sizes[output]) - 1 for output, dim in found)


def _fit_better_otherwise(ours: Sequence[SkeletonEntry], theirs: Sequence[SkeletonEntry]) -> bool:
    kinds: dict[SkeletonEntry, list[int]] = {}
    for place, entry in enumerate(ours):
        kind = evolve(entry, ordinal=0, sizes=(), groups=())
        kinds.setdefault(kind, []).append(place)
    for places in kinds.values():
        if "all_to_all" in ours[places[0]].op:  # its rows are known, and were compared
            continue
        if not any(_conflicts(ours[place], theirs[place]) for place in places):
            continue
        one, other = ([side[place].sizes for place in places] for side in (ours, theirs))
        equal = sum(a == b for a, b in zip(one, other, strict=True))
        if (Counter(one) & Counter(other)).total() > equal:
            return True
        static = [pair for pair in zip(one, other, strict=True) if "~" not in str(pair)]
        counts = [(_elements(a), _elements(b)) for a, b in static if a != b]
        if any((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(counts, 2)):
            return True
    return False


def _elements(sizes: tuple[tuple[int | str, ...], ...]) -> int:
    return sum(math.prod(size for size in dims if isinstance(size, int)) for dims in sizes)


def weight_gathers(graph: OverlapGraph) -> list[str]:
    """Gathers of values made of shards by copies and casts only, whose result somebody reads."""
    run = run_symbolically(graph)
    by_name = {node.name: node for node in graph.nodes}
    candidates: list[str] = []
    for node in graph.nodes:
        if node.kind is NodeKind.COLLECTIVE and "all_gather" in node.op:
            leaves = _leaves([run.buffers[b] for b in (*node.reads, *node.mutates)], by_name)
            if leaves is not None and not leaves.isdisjoint(graph.inputs):
                candidates.append(node.name)
        run.step(node)
    used = _used_launches(graph)
    return [name for name in candidates if name in used]


def _leaves(values: list[Value | str], by_name: Mapping[str, Node]) -> set[str] | None:
    """The graph inputs and constants that values are copies of; None if they are more."""
    found: set[str] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found.add(value)
        elif by_name[value.node].kind is not NodeKind.COMPUTE or "mm" in by_name[value.node].op:
            return None
        else:
            stack += value.inputs
    return found


def launches_of_waits(graph: OverlapGraph) -> dict[str, frozenset[str]]:
    """For each node the launches whose results it reads before or at a wait for them."""
    waiting: dict[str, frozenset[str]] = {}
    ready: dict[str, frozenset[str]] = {}
    found: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        nothing: frozenset[str] = frozenset()
        launches = nothing.union(*(waiting.get(b, nothing) for b in (*node.reads, *node.mutates)))
        found[node.name] = launches
        for buffer in (*node.writes, *node.mutates):
            waiting.pop(buffer, None)
            ready.pop(buffer, None)
            if node.kind is NodeKind.COLLECTIVE:
                waiting[buffer] = frozenset((node.name,))
            elif node.kind is not NodeKind.WAIT and launches:
                waiting[buffer] = launches
    return found


def _used_launches(graph: OverlapGraph) -> set[str]:
    launches_of = launches_of_waits(graph)
    made: dict[str, frozenset[str]] = {}
    used: set[str] = set()
    for node in graph.nodes:
        for buffer in node.reads:
            used |= made.get(buffer, frozenset())
        for buffer in (*node.writes, *node.mutates):
            made.pop(buffer, None)
            if node.kind is NodeKind.WAIT:
                made[buffer] = launches_of[node.name]
    for buffer in graph.outputs:
        used |= made.get(buffer, frozenset())
    return used


def find_movable(graph: OverlapGraph) -> set[str]:
    """Names of weight gathers, of what unpacks them, and of what only ever serves one of them."""
    serves: dict[str, set[str]] = {name: {name} for name in weight_gathers(graph)}
    launches_of = launches_of_waits(graph)
    for node in graph.nodes:
        if node.kind is NodeKind.COMPUTE and len(launches_of[node.name]) == 1:
            (launch,) = launches_of[node.name]
            if launch in serves:
                serves[node.name] = {launch}
    users: dict[str, set[str]] = {node.name: set() for node in graph.nodes}
    run = run_symbolically(graph)
    for node in graph.nodes:
        for buffer in (*node.reads, *node.mutates):
            value = run.buffers[buffer]
            if isinstance(value, Value):
                users[value.node].add(node.name)
        run.step(node)
    for node in reversed(graph.nodes):
        served: set[str] = set()
        for user in users[node.name]:
            served |= serves.get(user, {user})
        lasting = {*graph.inputs, *graph.constants, *graph.outputs}
        serves_caller = not lasting.isdisjoint((*node.writes, *node.mutates))
        if node.kind is NodeKind.COMPUTE and len(served) == 1 and not serves_caller:
            (only,) = served
            if only in serves:
                serves.setdefault(node.name, served)
    return set(serves)


def find_reductions(graph: OverlapGraph) -> set[str]:
    """Names of collectives that are no weight gathers, of what serves them alone, of their waits.

    And of compute that only such waits lead to: all that may move for reductions.
    """
    gathers = set(weight_gathers(graph))
    launches_of = launches_of_waits(graph)
    reductions = {n.name for n in graph.nodes if n.kind is NodeKind.COLLECTIVE} - gathers
    waits = {name for name, launches in launches_of.items() if launches & reductions}
    found = reductions | waits
    for node, before in zip(graph.nodes, graph.predecessors, strict=True):
        behind = {graph.nodes[position].name for position in before}
        if node.kind is NodeKind.COMPUTE and behind & found:
            found.add(node.name)
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        users = {graph.nodes[after].name for after in graph.successors[position]}
        if node.kind is NodeKind.COMPUTE and users and users <= found:
            found.add(node.name)
    return found


def bytes_in_flight(graph: OverlapGraph, order: Sequence[str], gathers: Iterable[str]) -> int:
    """The most bytes of the given gathers between launch and first wait at any time."""
    launches_of = launches_of_waits(graph)
    by_name = {node.name: node for node in graph.nodes}
    wanted = set(gathers)
    flying: dict[str, int] = {}
    peak = 0
    for name in order:
        if name in wanted:
            flying[name] = by_name[name].nbytes or 0
        elif by_name[name].kind is NodeKind.WAIT:
            for launch in launches_of[name]:
                flying.pop(launch, None)
        peak = max(peak, sum(flying.values()))
    return peak
