"""Graphs with reductions, and how their launches and waits are moved, for the tests of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve
from hypothesis import strategies as st

from overlap_core import Node, NodeKind, OverlapConfig, OverlapGraph
from overlap_core.costs import resolve_costs
from overlap_core.placement import TimelineModel, build_frame, propose, rebuild_order
from overlap_core.placement.reductions import wait_late
from overlap_core.testing.strategies import costs, graphs

from ..small_graphs import cast, reduce_scatter, skeleton_of, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.costs import Cost

Order = tuple[int, ...]


def words(graph: OverlapGraph, order: Sequence[int]) -> str:
    return " ".join(graph.nodes[position].name for position in order)


def sink(
    graph: OverlapGraph,
    order: Sequence[int],
    bound_bytes: int | None = None,
    slack_ns: int | None = 0,
    contention: float = 1,
) -> Order:
    return wait_late(
        graph,
        skeleton_of(graph),
        costs_of(graph),
        order,
        bound_bytes=bound_bytes,
        slack_ns=slack_ns,
        contention=contention,
    )


def exposed_ns(graph: OverlapGraph, order: Sequence[int]) -> int:
    """Over all collectives."""
    return sum(model_of(graph).run(order).exposed_ns.values())


def total_ns(graph: OverlapGraph, order: Sequence[int]) -> int:
    return model_of(graph).run(order).total_ns


def model_of(graph: OverlapGraph) -> TimelineModel:
    return TimelineModel(graph, skeleton_of(graph), costs_of(graph))


def costs_of(graph: OverlapGraph) -> tuple[Cost, ...]:
    """As the nodes say, and else unknown."""
    return resolve_costs(graph, lambda request: None)


def permuted(graph: OverlapGraph, order: Sequence[int]) -> OverlapGraph:
    """The graph as if it had come in that order."""
    return evolve(graph, nodes=tuple(graph.nodes[position] for position in order))


def place_gathers(graph: OverlapGraph) -> Order:
    """What one rank alone would make of the gathers."""
    skeleton = skeleton_of(graph)
    frame = build_frame(graph, skeleton)
    config = OverlapConfig(contention=1, slack_ns=0)
    plan = propose(graph, skeleton, frame, costs_of(graph), config)
    return rebuild_order(frame, [p.boundary for p in plan.placements])


@st.composite
def training_graphs(draw: st.DrawFn) -> OverlapGraph:
    """A graph in which some results are gradients: reduced, waited for, and cast for the caller."""
    graph = draw(graphs())
    nodes: list[Node] = []
    outputs = list(graph.outputs)
    for position, node in enumerate(graph.nodes):
        nodes.append(node)
        if node.kind is not NodeKind.COMPUTE or not node.sizes or not draw(st.booleans()):
            continue
        name, group = f"grad{position}", draw(st.sampled_from(("0", "0", "1", None)))
        launch = reduce_scatter(name, node.writes[0], ns=draw(costs()), group=group)
        nodes += [
            evolve(launch, sizes=node.sizes, dtypes=node.dtypes, group_ranks=None),
            wait(name),
        ]
        outputs.append(f"w.{name}")
        if draw(st.booleans()):
            nodes.append(cast(f"cast{position}", f"w.{name}", ns=draw(costs())))
            outputs.append(f"cast{position}")
    return evolve(graph, nodes=tuple(nodes), outputs=tuple(outputs))


def reductions(graph: OverlapGraph) -> list[int]:
    gathers = {group.launch for group in skeleton_of(graph).gathers}
    return [
        position
        for position, node in enumerate(graph.nodes)
        if node.kind is NodeKind.COLLECTIVE and position not in gathers
    ]


def communication(graph: OverlapGraph, order: Sequence[int]) -> list[int]:
    issuing = set(skeleton_of(graph).positions)
    return [position for position in order if position in issuing]
