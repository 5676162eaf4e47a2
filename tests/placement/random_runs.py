"""Machines, orders and coalesced calls for any graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from overlap_core.costs import Machine
from overlap_core.graph import NodeKind
from overlap_core.placement import Coalesced

if TYPE_CHECKING:
    from random import Random

    from overlap_core import OverlapGraph

__all__ = ["legal_order", "machines", "random_calls"]


def machines() -> st.SearchStrategy[Machine]:
    """Hosts from never late to always late; with and without slowdowns.

    Not on machines whose kernels leave no room: which of two things that happen at one moment came
    first decides everything there, and the simulation has no answer to that.
    """
    host = st.sampled_from((0, 0, 7, 300, 5_000, 40_000))
    slowdown = st.sampled_from((1.0, 1.0, 1.1, 1.5, 3.0))
    return st.builds(
        Machine,
        kernel_host_ns=host,
        opaque_host_ns=host,
        collective_host_ns=host,
        member_host_ns=host,
        wait_host_ns=host,
        gather_slowdown=slowdown,
        compute_slowdown=slowdown,
    )


def legal_order(graph: OverlapGraph, random: Random) -> list[int]:
    """Any order in which no node comes before what it depends on."""
    left = [set(before) for before in graph.predecessors]
    open_nodes = sorted(position for position, before in enumerate(left) if not before)
    order: list[int] = []
    while open_nodes:
        position = open_nodes.pop(random.randrange(len(open_nodes)))
        order.append(position)
        for following in graph.successors[position]:
            left[following].discard(position)
            if not left[following] and following not in order and following not in open_nodes:
                open_nodes.append(following)
    return order


def random_calls(graph: OverlapGraph, order: list[int], random: Random) -> list[Coalesced]:
    """Calls of two or three launches of one group."""
    by_group: dict[str | None, list[int]] = {}
    for position in order:
        if graph.nodes[position].kind is NodeKind.COLLECTIVE:
            by_group.setdefault(graph.nodes[position].group, []).append(position)
    calls = []
    for launches in by_group.values():
        while len(launches) > 1 and random.random() < 0.7:
            chosen = launches[: random.choice((2, 3))]
            del launches[: len(chosen)]
            calls.append(Coalesced(launches=tuple(chosen), ns=random.choice((0, 900, 70_000))))
    return calls
