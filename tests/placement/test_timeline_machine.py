"""What a host, a shared network and coalesced calls do to an order, by hand. Nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlap_core.costs import IDEAL, Machine, resolve_costs
from overlap_core.placement import Coalesced, SpanKind, TimelineModel

from ..small_graphs import gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core import Node
    from overlap_core.placement import Timeline


def model_of(nodes: Sequence[Node], machine: Machine, *calls: Coalesced) -> TimelineModel:
    graph = graph_of(*nodes)
    costs = resolve_costs(graph, lambda request: None)
    return TimelineModel(graph, skeleton_of(graph), costs, machine, calls)


def run(machine: Machine, *nodes: Node) -> Timeline:
    """In program order."""
    return model_of(nodes, machine).program_order


def exposed(machine: Machine, *nodes: Node) -> tuple[dict[str, int], int]:
    """Exposed time by launch, and total time, in program order."""
    timeline = run(machine, *nodes)
    return {nodes[p].name: ns for p, ns in timeline.exposed_ns.items()}, timeline.total_ns


def test_compute_starts_when_it_is_issued() -> None:
    late = run(Machine(kernel_host_ns=100), mm("a", ns=10), mm("b", ns=10))
    assert (late.total_ns, late.host_ns, late.waited_for_host_ns) == (210, 200, 190)
    ahead = run(Machine(kernel_host_ns=10), mm("a"), mm("b"))
    assert (ahead.total_ns, ahead.host_ns, ahead.waited_for_host_ns) == (210, 20, 10)


def test_each_kind_of_node_has_its_host_time() -> None:
    machine = Machine(
        kernel_host_ns=1, opaque_host_ns=20, collective_host_ns=300, wait_host_ns=4_000
    )
    nodes = (gather("g"), opaque("o", "x"), wait("g"), mm("a", "w.g"))
    assert run(machine, *nodes).host_ns == 4_321


def test_compute_that_takes_no_time_is_not_issued() -> None:
    timeline = run(Machine(kernel_host_ns=50), mm("a", ns=0), mm("b", ns=None), mm("c", ns=10))
    assert (timeline.total_ns, timeline.host_ns, timeline.waited_for_host_ns) == (60, 50, 50)


@pytest.mark.parametrize(
    ("wait_host_ns", "exposed_ns", "waited_ns", "total_ns"),
    [(0, {0: 100}, 0, 100), (60, {0: 40}, 60, 100), (150, {}, 150, 150)],
)
def test_until_the_wait_is_issued_the_host_is_to_blame(
    wait_host_ns: int, exposed_ns: dict[int, int], waited_ns: int, total_ns: int
) -> None:
    timeline = run(Machine(wait_host_ns=wait_host_ns), gather("g"), wait("g"))
    assert timeline.exposed_ns == exposed_ns
    assert timeline.waited_for_host_ns == waited_ns
    assert timeline.total_ns == total_ns


def test_a_host_that_is_late_after_the_last_work_keeps_nobody_waiting() -> None:
    timeline = run(Machine(collective_host_ns=70), mm("a", ns=10), reduce_scatter("r", "a", ns=5))
    assert (timeline.total_ns, timeline.host_ns, timeline.waited_for_host_ns) == (75, 70, 0)


def test_a_collective_starts_when_it_is_issued_and_the_compute_before_it_is_done() -> None:
    machine = Machine(collective_host_ns=50)
    assert exposed(machine, gather("g"), wait("g")) == ({"g": 100}, 150)
    assert exposed(machine, mm("a"), gather("g"), wait("g")) == ({"g": 100}, 200)


def coalesced_nodes() -> tuple[Node, ...]:
    return (
        gather("g"),
        mm("a", ns=50),
        gather("h"),
        wait("g"),
        mm("b", "w.g", ns=20),
        wait("h"),
        mm("c", "w.h"),
    )


def test_a_coalesced_call_ends_for_all_its_launches_at_once() -> None:
    model = model_of(coalesced_nodes(), IDEAL, Coalesced(launches=(0, 2), ns=150))
    # The call from 0 to 150; b until 170, c until 270.
    together = model.run(range(7))
    assert (together.exposed_ns, together.total_ns) == ({0: 100}, 270)
    # g from 0 to 100, h until 200; b from 100 to 120, c from 200 to 300.
    apart = model.program_order
    assert (apart.exposed_ns, apart.total_ns) == ({0: 50, 2: 80}, 300)


def test_the_launch_whose_wait_blocks_is_charged() -> None:
    model = model_of(coalesced_nodes(), IDEAL, Coalesced(launches=(0, 2), ns=150))
    assert model.run([0, 1, 2, 5, 3, 4, 6]).exposed_ns == {2: 100}


def test_a_call_is_issued_at_the_first_of_its_launches_in_the_order() -> None:
    machine = Machine(collective_host_ns=100, member_host_ns=7)
    nodes = (gather("g"), mm("a", ns=50), gather("h"), gather("i"), wait("g"), wait("i"))
    model = model_of(nodes, machine, Coalesced(launches=(0, 2, 3), ns=150))
    for order, charged in (([0, 1, 2, 3, 4, 5], 0), ([3, 1, 0, 2, 5, 4], 3)):
        timeline = model.run(order)
        # Issued at 114, done at 264; a from 114 to 164.
        assert (timeline.host_ns, timeline.total_ns) == (114, 264)
        assert timeline.exposed_ns == {charged: 100}
    assert model.program_order.host_ns == 300


def test_an_opaque_op_behind_a_call_is_charged_to_the_launch_that_issued_it() -> None:
    nodes = (gather("g"), gather("h"), opaque("o", "x", group="0", ns=10, network_ns=10))
    model = model_of(nodes, IDEAL, Coalesced(launches=(0, 1), ns=150))
    assert model.run([1, 0, 2]).exposed_ns == {1: 150}


def test_groups_share_the_network_evenly() -> None:
    two = (gather("g", ns=100), gather("h", ns=60, group="1"), wait("h"), wait("g"))
    # Half each until h is done at 120; g has 40 left.
    assert exposed(IDEAL, *two) == ({"h": 120, "g": 40}, 160)
    three = (*(gather(name, ns=30, group=name) for name in "abc"), wait("a"))
    assert exposed(IDEAL, *three) == ({"a": 90}, 90)


def test_an_opaque_op_gets_longer_by_what_its_network_part_is_slowed() -> None:
    nodes = (gather("g", ns=80), opaque("o", "x", ns=300, network_ns=100), wait("g"))
    # Half each until g is done at 160; 20 of the op's network part and 200 of compute follow.
    assert exposed(IDEAL, *nodes) == ({}, 380)


def test_compute_slows_collectives() -> None:
    machine = Machine(gather_slowdown=2.0)
    nodes = (gather("g"), mm("b", ns=60), wait("g"))
    assert exposed(machine, *nodes) == ({"g": 70}, 130)


def test_collectives_slow_compute_as_long_as_they_run() -> None:
    machine = Machine(compute_slowdown=1.5)
    assert exposed(machine, gather("g"), mm("b", ns=60), wait("g")) == ({"g": 10}, 100)
    assert exposed(machine, gather("g", ns=30), mm("b", ns=60), wait("g")) == ({}, 70)


def test_both_slow_each_other() -> None:
    machine = Machine(gather_slowdown=2.0, compute_slowdown=1.5)
    # b takes 90, in which g gets 45.
    assert exposed(machine, gather("g"), mm("b", ns=60), wait("g")) == ({"g": 55}, 145)


def test_slowdown_and_sharing_multiply() -> None:
    machine = Machine(gather_slowdown=2.0)
    nodes = (gather("g"), gather("h", group="1"), mm("b", ns=80), wait("g"))
    # Beside b each gets a quarter: 20 until 80; then half each, until 240.
    assert exposed(machine, *nodes) == ({"g": 160}, 240)


def test_the_network_part_of_an_opaque_op_is_neither_compute_nor_a_collective() -> None:
    machine = Machine(gather_slowdown=2.0, compute_slowdown=2.0)
    nodes = (gather("g", ns=150), opaque("o", "x", ns=300, network_ns=100), wait("g"))
    # Half each until 200. g's last 50 take 100 beside compute, which gets 50 of its 200 done.
    assert exposed(machine, *nodes) == ({}, 450)


FULL = Machine(waits_for_kernel=True)


def test_a_gather_finds_no_room_beside_the_kernel_behind_its_launch() -> None:
    nodes = (mm("a"), gather("g", ns=50), mm("b"), mm("c"), wait("g"), mm("d", "w.g"))
    model = model_of(nodes, FULL)
    network = next(s for s in model.spans(range(6)) if s.kind is SpanKind.NETWORK)
    assert (network.start_ns, network.end_ns) == (200, 250)
    assert exposed(FULL, *nodes) == ({}, 400)
    assert exposed(FULL, *nodes[:3], nodes[4], nodes[5]) == ({"g": 50}, 350)


def test_a_gather_starts_at_once_where_nothing_runs() -> None:
    assert exposed(FULL, gather("g", ns=50), wait("g"), mm("a", "w.g")) == ({"g": 50}, 150)


def test_the_next_gather_of_a_queue_waits_for_room_too() -> None:
    """The first ends in the middle of `b`, so the second starts behind it."""
    nodes = (gather("g", ns=150), gather("h", ns=30), mm("a"), mm("b"), mm("c"))
    spans = model_of(nodes, FULL).spans(range(5))
    starts = [(s.start_ns, s.end_ns) for s in spans if s.kind is SpanKind.NETWORK]
    assert starts == [(100, 250), (300, 330)]


def test_an_opaque_op_leaves_room() -> None:
    nodes = (gather("g", ns=50), opaque("o", "x", ns=300, network_ns=0), wait("g"))
    spans = model_of(nodes, FULL).spans(range(3))
    network = next(s for s in spans if s.kind is SpanKind.NETWORK and s.position == 0)
    assert (network.start_ns, network.end_ns) == (0, 50)
