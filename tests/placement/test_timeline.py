"""Predicted time of an order, one known case each. Times are nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.costs import Cost, resolve_costs
from overlap_core.placement import Timeline, TimelineModel
from overlap_core.placement.timeline import network_share_ns

from ..small_graphs import gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait

if TYPE_CHECKING:
    from overlap_core import Node


def run(*nodes: Node) -> tuple[dict[str, int], int]:
    """Exposed time by launch, and total time, in program order."""
    graph = graph_of(*nodes)
    costs = resolve_costs(graph, lambda request: None)
    timeline = TimelineModel(graph, skeleton_of(graph), costs).program_order
    return {nodes[p].name: ns for p, ns in timeline.exposed_ns.items()}, timeline.total_ns


def test_compute_runs_one_after_another() -> None:
    assert run(mm("a"), mm("b", ns=50)) == ({}, 150)


def test_a_wait_exposes_what_is_left() -> None:
    assert run(gather("g"), wait("g"), mm("a", "w.g")) == ({"g": 100}, 200)
    assert run(gather("g"), mm("b", ns=30), wait("g"), mm("a", "w.g")) == ({"g": 70}, 200)
    assert run(gather("g"), mm("b", ns=100), wait("g"), mm("a", "w.g")) == ({}, 200)


def test_collectives_of_one_group_queue_and_those_of_two_share() -> None:
    def two(group: str) -> tuple[dict[str, int], int]:
        second = gather("h", group=group)
        return run(gather("g"), second, wait("g"), wait("h"), mm("a", "w.g", "w.h"))

    assert two("0") == ({"g": 100, "h": 100}, 300)
    assert two("1") == ({"g": 200}, 300)  # both until 200: they share the network


def test_an_opaque_op_waits_for_its_group_and_then_uses_it() -> None:
    attention = opaque("o", "x", ns=300, group="0", network_ns=200)
    nodes = (gather("g"), attention, gather("h"), wait("h"), wait("g"), mm("a", "w.g", "w.h"))
    # g until 100; the op from 100 to 400, on the network until 300; h from 400 to 500.
    assert run(*nodes) == ({"g": 100, "h": 100}, 600)


def test_an_opaque_op_on_another_group_runs_beside_a_gather() -> None:
    nodes = (gather("g"), opaque("o", "x", group="1"), wait("g"), mm("a", "w.g"))
    # Each at half speed until g is done at 200; the op has 50 of its 150 on the network left.
    assert run(*nodes) == ({}, 500)


def test_a_collective_that_nobody_waits_for_only_ends_later() -> None:
    assert run(mm("a"), reduce_scatter("r", "a", ns=900)) == ({}, 1000)


def test_an_unknown_cost_counts_as_nothing() -> None:
    assert run(gather("g", ns=None), mm("a", ns=None), wait("g"), mm("b", "w.g")) == ({}, 100)


def test_the_share_of_the_network() -> None:
    assert network_share_ns(Cost(ns=101)) == 50
    assert network_share_ns(Cost(ns=100, network_ns=30)) == 30
    assert network_share_ns(Cost(ns=100, network_ns=300)) == 100
    assert network_share_ns(Cost()) == 0


def test_exposed_time_of_some_launches() -> None:
    timeline = Timeline(exposed_ns={3: 5, 7: 11}, total_ns=90)
    assert timeline.gathers_exposed_ns([3, 4]) == 5
