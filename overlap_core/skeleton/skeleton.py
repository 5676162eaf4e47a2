"""The skeleton: a graph's launches of communication, in order, comparable between ranks."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from attrs import frozen

from overlap_core.graph import NodeKind, find_input_only, find_launch_group
from overlap_core.graph.symbols import parse_expression

from .entries import NO_COMMUNICATION, SkeletonEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from overlap_core.graph import LaunchGroup, Node, OverlapGraph

    from .entries import Communication

__all__ = [
    "SYMBOLIC",
    "Skeleton",
    "build_skeleton",
    "comparable_size",
    "describe_entry",
    "entry_from_json",
    "entry_to_json",
    "skeleton_digest",
]

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

SYMBOLIC = "~"
"""Stands for a symbolic dimension, whose expression is each rank's own."""


@frozen(kw_only=True)
class Skeleton:
    """All that the pass knows of a graph's communication; positions are in program order."""

    entries: tuple[SkeletonEntry, ...]
    positions: tuple[int, ...]
    """Position of each entry's node, ascending."""
    communication: dict[int, Communication]
    """By position; holds nodes that issue communication only."""
    gathers: tuple[LaunchGroup, ...]
    """The weight gathers that may move, by position of their launch."""


def build_skeleton(
    graph: OverlapGraph,
    classify: Callable[[Node], Communication | None],
    gathers_too: Collection[int] = (),
) -> Skeleton:
    """Ask `classify` about every node but waits, and find the weight gathers.

    A weight gather is a gather whose input is computed from graph inputs only, none of which is
    known to be an activation, and whose result is waited for by somebody who uses it.

    Args:
        graph: whose communication it is.
        classify: says of a node what it issues.
        gathers_too: positions of gathers that count as weight gathers whatever their input is.

    Raises:
        PluginError: from `classify`.
    """
    communication: dict[int, Communication] = {}
    for position, node in enumerate(graph.nodes):
        if node.kind is NodeKind.WAIT:
            continue
        answer = classify(node) or NO_COMMUNICATION
        if answer.issues:
            communication[position] = answer
    positions = tuple(communication)
    input_only = find_input_only(graph, communication)
    inputs = frozenset(graph.inputs)
    gathers: list[LaunchGroup] = []
    for position, answer in communication.items():
        node = graph.nodes[position]
        if answer.gather and node.kind is NodeKind.COLLECTIVE:
            states = {input_only[before] for before in graph.data_predecessors[position]}
            from_inputs = not inputs.isdisjoint(node.reads) or True in states
            if position in gathers_too or (
                from_inputs
                and False not in states
                and graph.activations.isdisjoint((*node.reads, *node.mutates))
            ):
                group = find_launch_group(graph, position, input_only, positions)
                if _is_used(graph, group):
                    gathers.append(group)
    launches = {group.launch for group in gathers}
    group_ordinals: dict[str, int] = {}
    entries = []
    for ordinal, (position, answer) in enumerate(communication.items()):
        node = graph.nodes[position]
        groups = answer.groups or ((node.group,) if node.group is not None else ())
        entries.append(
            SkeletonEntry(
                ordinal=ordinal,
                op=node.op,
                sizes=tuple(tuple(map(comparable_size, sizes)) for sizes in node.sizes),
                dtypes=node.dtypes,
                groups=tuple(group_ordinals.setdefault(g, len(group_ordinals)) for g in groups),
                group_sizes=tuple(_group_size(node, g) for g in groups),
                weight_gather=position in launches,
                comparable=answer.comparable,
                node=node.name,
            )
        )
    return Skeleton(
        entries=tuple(entries),
        positions=positions,
        communication=communication,
        gathers=tuple(gathers),
    )


def _is_used(graph: OverlapGraph, group: LaunchGroup) -> bool:
    """Whether somebody reads what a wait of the gather makes readable."""
    own = {*group.members, *group.waits}
    for wait in group.waits:
        written = {*graph.nodes[wait].writes, *graph.nodes[wait].mutates}
        if not written.isdisjoint(graph.outputs):
            return True
        for after in graph.successors[wait]:
            user = graph.nodes[after]
            if after not in own and not written.isdisjoint((*user.reads, *user.mutates)):
                return True
    return False


def comparable_size(size: int | str) -> int | str:
    """A dimension as ranks compare it: its value, or `SYMBOLIC`."""
    if isinstance(size, int):
        return size
    constant = parse_expression(size).constant
    return SYMBOLIC if constant is None else constant


def _group_size(node: Node, group: str) -> int | None:
    if node.group_ranks is not None and group == node.group:
        return len(node.group_ranks)
    return None


def skeleton_digest(entries: Sequence[SkeletonEntry]) -> str:
    """Hex digest of everything about the entries that ranks compare."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(_encode(entry_to_json(entry)).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def entry_to_json(entry: SkeletonEntry) -> list[object]:
    """The comparable part of an entry as plain data."""
    return [
        entry.op,
        entry.sizes,
        entry.dtypes,
        entry.groups,
        entry.group_sizes,
        entry.weight_gather,
        entry.comparable,
    ]


def entry_from_json(ordinal: int, data: list[Any]) -> SkeletonEntry:
    """What `entry_to_json` wrote, as an entry again."""
    op, sizes, dtypes, groups, group_sizes, weight_gather, comparable = data
    return SkeletonEntry(
        ordinal=ordinal,
        op=op,
        sizes=tuple(map(tuple, sizes)),
        dtypes=tuple(dtypes),
        groups=tuple(groups),
        group_sizes=tuple(group_sizes),
        weight_gather=bool(weight_gather),
        comparable=tuple(comparable),
    )


def describe_entry(entry: SkeletonEntry) -> str:
    """An entry in words, for messages."""
    sizes = ", ".join("x".join(map(str, s)) or "scalar" for s in entry.sizes)
    dtypes = ", ".join(entry.dtypes)
    groups = ", ".join(
        f"{g} of {n if n is not None else '?'} rank{'s' * (n != 1)}"
        for g, n in zip(entry.groups, entry.group_sizes, strict=True)
    )
    text = f"{entry.op} [{sizes}] {dtypes}".rstrip()
    return f"{text} on group {groups}" if groups else text
