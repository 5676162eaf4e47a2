"""Which gathers become one coalesced call.

Ranks must coalesce alike, so a partition is written as one label a gather, in program order: the
number of the first gather that it shares a call with. What is proposed here depends on weights
and their groups, which all ranks have in common; what one rank cannot do is cut off by
`refine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from .timeline import Coalesced

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from overlap_core.costs import Cost
    from overlap_core.graph import LaunchGroup, Node, OverlapGraph
    from overlap_core.skeleton import Skeleton

    from .frame import Frame

__all__ = [
    "REGION_BYTES",
    "alone",
    "call_ns",
    "calls_of",
    "cut_illegal",
    "form_units",
    "join",
    "largest_region_bytes",
    "refine",
    "units_of",
]

_PLAIN_GATHERS = frozenset({"_c10d_functional.all_gather_into_tensor.default"})
"""Gathers of one tensor into a new one, which a coalesced call can stand for."""
REGION_BYTES = 64 << 20
"""How many bytes of weights make a region as long as nobody asks for another size."""


def alone(gathers: int) -> tuple[int, ...]:
    """The partition in which nothing is coalesced."""
    return tuple(range(gathers))


def form_units(
    graph: OverlapGraph, gathers: Sequence[LaunchGroup], region_bytes: int, head_bytes: int = 0
) -> tuple[int, ...]:
    """Cut the gathers into regions, and coalesce those of one group and dtype in each.

    Args:
        graph: of one rank.
        gathers: in program order.
        region_bytes: a region is closed before it would grow beyond this; a larger gather is
            one by itself.
        head_bytes: if not 0 the first region has this size, and each following one twice that of
            the one before, until they have `region_bytes`: compute starts early then.

    Returns:
        One label a gather.
    """
    labels: list[int] = []
    limit = min(head_bytes, region_bytes) or region_bytes
    used = 0
    first: dict[tuple[str, tuple[str, ...]], int] = {}
    for number, group in enumerate(gathers):
        node = graph.nodes[group.launch]
        nbytes = node.nbytes or 0
        if used and used + nbytes > limit:
            used, first = 0, {}
            limit = min(region_bytes, 2 * limit)
        used += nbytes
        if node.group is None or node.nbytes is None or not _is_plain(node, group):
            labels.append(number)
        else:
            labels.append(first.setdefault((node.group, node.dtypes), number))
    return tuple(labels)


def _is_plain(node: Node, group: LaunchGroup) -> bool:
    """Whether a coalesced call can stand for this launch, which nothing unpacks."""
    return node.op in _PLAIN_GATHERS and max(group.members) == group.launch


def largest_region_bytes(
    graph: OverlapGraph, gathers: Sequence[LaunchGroup], region_bytes: int
) -> int:
    """Bytes of the largest region that `form_units` makes; 0 without gathers."""
    largest = used = 0
    for group in gathers:
        nbytes = graph.nodes[group.launch].nbytes or 0
        used = used + nbytes if used + nbytes <= region_bytes else nbytes
        largest = max(largest, used)
    return largest


def refine(partitions: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The coarsest partition that is finer than all the given ones, of equal lengths.

    Raises:
        ValueError: the lengths differ.
    """
    first: dict[tuple[int, ...], int] = {}
    columns = zip(*partitions, strict=True)
    return tuple(first.setdefault(column, number) for number, column in enumerate(columns))


def cut_illegal(
    labels: Sequence[int], frame: Frame, keep_alone: Collection[int]
) -> tuple[int, ...]:
    """Cut off what cannot be launched together on this rank.

    Args:
        labels: a partition of the gathers of `frame`, in which each is alone.
        frame: of this rank.
        keep_alone: numbers of gathers that must not be coalesced.
    """
    current: dict[int, tuple[int, int, int]] = {}
    result: list[int] = []
    for number, label in enumerate(labels):
        floor, original = frame.floors[number], frame.originals[number]
        if number in keep_alone:
            result.append(number)
            continue
        first, highest, earliest = current.get(label, (number, 0, original))
        if max(highest, floor) > earliest:
            first, highest, earliest = number, 0, original
        current[label] = (first, max(highest, floor), earliest)
        result.append(first)
    return tuple(result)


def units_of(labels: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The gathers of each unit, units in order of their first gather."""
    members: dict[int, list[int]] = {}
    for number, label in enumerate(labels):
        members.setdefault(label, []).append(number)
    return tuple(map(tuple, members.values()))


def join(gathers: Sequence[LaunchGroup], labels: Sequence[int]) -> tuple[LaunchGroup, ...]:
    """One launch group for each unit."""
    joined = []
    for unit in units_of(labels):
        groups = [gathers[number] for number in unit]
        if len(groups) == 1:
            joined.append(groups[0])
            continue
        joined.append(
            evolve(
                groups[0],
                members=tuple(sorted(member for group in groups for member in group.members)),
                waits=tuple(sorted({wait for group in groups for wait in group.waits})),
                coalesced=tuple(group.launch for group in groups),
            )
        )
    return tuple(joined)


def call_ns(ns: Sequence[int], start_up_ns: int) -> int:
    """Time of a coalesced call from those of its gathers alone: they share one start-up.

    Args:
        ns: of each gather alone.
        start_up_ns: the part of a gather's time that doesn't depend on its size.
    """
    start_up_ns = min(start_up_ns, *ns)
    return start_up_ns + sum(one - start_up_ns for one in ns)


def calls_of(
    graph: OverlapGraph, skeleton: Skeleton, gathers: Sequence[LaunchGroup], costs: Sequence[Cost]
) -> tuple[Coalesced, ...]:
    """The coalesced calls among launch groups, with their predicted times."""
    start_up: dict[str | None, int] = {}
    calls = []
    for group in gathers:
        if not group.coalesced:
            continue
        name = graph.nodes[group.launch].group
        if name not in start_up:
            start_up[name] = _start_up_ns(graph, skeleton, costs, name)
        ns = [costs[launch].ns or 0 for launch in group.coalesced]
        calls.append(Coalesced(launches=group.coalesced, ns=call_ns(ns, start_up[name])))
    return tuple(calls)


def _start_up_ns(
    graph: OverlapGraph, skeleton: Skeleton, costs: Sequence[Cost], name: str | None
) -> int:
    """Time of a gather of nothing on a group: the line through its smallest and largest gather."""
    known = [
        (graph.nodes[group.launch].nbytes or 0, costs[group.launch].ns or 0)
        for group in skeleton.gathers
        if graph.nodes[group.launch].group == name
    ]
    (few, short), (many, long) = min(known), max(known)
    if many == few:
        return 0
    return min(short, max(0, round(short - (long - short) * few / (many - few))))
