"""The model against a simulation that shares no code with it: any graph, machine, order, calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

from overlap_core.costs import IDEAL, resolve_costs
from overlap_core.placement import TimelineModel
from overlap_core.testing.strategies import graphs

from ..oracles import launches_of_waits
from ..small_graphs import skeleton_of
from .event_simulation import Simulation
from .random_runs import legal_order, machines, random_calls

if TYPE_CHECKING:
    from random import Random

    from overlap_core import OverlapGraph
    from overlap_core.costs import Machine
    from overlap_core.placement import Coalesced, Timeline

ROUNDING_NS = 1
"""Both ends of a stretch of time are rounded; sums of fractions aren't exact in floats."""


def simulated(
    graph: OverlapGraph, order: list[int], machine: Machine, calls: list[Coalesced]
) -> Simulation:
    costs = resolve_costs(graph, lambda request: None)
    names = [graph.nodes[position].name for position in order]
    return Simulation.of(graph, costs, names, machine, launches_of_waits(graph), calls).run()


def assert_alike(graph: OverlapGraph, timeline: Timeline, simulation: Simulation) -> None:
    found = {graph.nodes[p].name: ns for p, ns in timeline.exposed_ns.items()}
    for name in found.keys() | simulation.exposed.keys():
        assert abs(found.get(name, 0) - simulation.exposed.get(name, 0)) <= ROUNDING_NS, name
    assert abs(timeline.total_ns - simulation.now) <= ROUNDING_NS
    assert timeline.host_ns == simulation.host_ns
    assert abs(timeline.waited_for_host_ns - simulation.waited_for_host) <= ROUNDING_NS


@given(graphs(), machines(), st.randoms(use_true_random=False), st.booleans())
def test_any_order_on_any_machine(
    graph: OverlapGraph, machine: Machine, random: Random, coalesce: bool
) -> None:
    order = legal_order(graph, random)
    assert sorted(order) == list(range(len(graph.nodes)))
    calls = random_calls(graph, order, random) if coalesce else []
    costs = resolve_costs(graph, lambda request: None)
    model = TimelineModel(graph, skeleton_of(graph), costs, machine, calls)
    timeline = model.run(order)
    event(f"calls: {bool(calls)}, waits for the host: {timeline.waited_for_host_ns > 0}")
    assert_alike(graph, timeline, simulated(graph, order, machine, calls))
    program = list(range(len(graph.nodes)))
    assert_alike(graph, model.program_order, simulated(graph, program, machine, []))


@given(graphs(), st.randoms(use_true_random=False))
def test_on_an_ideal_machine_one_group_has_nothing_to_round(
    graph: OverlapGraph, random: Random
) -> None:
    nodes = tuple(evolve(n, group="0", group_ranks=(graph.rank,)) for n in graph.nodes)
    graph = evolve(graph, nodes=nodes)
    order = legal_order(graph, random)
    costs = resolve_costs(graph, lambda request: None)
    timeline = TimelineModel(graph, skeleton_of(graph), costs).run(order)
    simulation = simulated(graph, order, IDEAL, [])
    assert {graph.nodes[p].name: ns for p, ns in timeline.exposed_ns.items()} == simulation.exposed
    assert timeline.total_ns == simulation.now
    assert timeline.host_ns == timeline.waited_for_host_ns == 0
