"""What happens when in one order, one known case each, and that it is what `run` sums up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from overlap_core.costs import IDEAL, Machine, resolve_costs
from overlap_core.placement import Coalesced, Span, SpanKind, TimelineModel
from overlap_core.testing.strategies import graphs

from ..small_graphs import gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait
from .random_runs import machines, random_calls

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from overlap_core import Node, OverlapGraph


def model_of(
    graph: OverlapGraph, machine: Machine = IDEAL, coalesced: Sequence[Coalesced] = ()
) -> TimelineModel:
    costs = resolve_costs(graph, lambda request: None)
    return TimelineModel(graph, skeleton_of(graph), costs, machine, coalesced)


def spans(
    *nodes: Node, machine: Machine = IDEAL, coalesced: Sequence[Coalesced] = ()
) -> list[tuple[str, str, int, int]]:
    """Kind, node (with the group for time on the network), start, end."""
    graph = graph_of(*nodes)
    return [
        (
            str(span.kind),
            nodes[span.position].name + (f"@{span.queue}" if span.queue else ""),
            span.start_ns,
            span.end_ns,
        )
        for span in model_of(graph, machine, coalesced).spans(range(len(nodes)))
    ]


def test_a_gather_that_is_covered_in_part() -> None:
    assert spans(gather("g"), mm("b", ns=30), wait("g"), mm("a", "w.g")) == [
        ("issued", "g", 0, 0),
        ("network", "g@0", 0, 100),
        ("compute", "b", 0, 30),
        ("issued", "w.g", 30, 30),
        ("idle", "g", 30, 100),
        ("compute", "a", 100, 200),
    ]


def test_an_opaque_op_waits_for_its_group_and_then_uses_it() -> None:
    attention = opaque("o", "x", ns=300, group="0", network_ns=200)
    assert spans(gather("g"), attention, wait("g"), mm("a", "w.g")) == [
        ("issued", "g", 0, 0),
        ("network", "g@0", 0, 100),
        ("idle", "g", 0, 100),
        ("compute", "o", 100, 400),
        ("network", "o@0", 100, 300),
        ("issued", "w.g", 400, 400),
        ("compute", "a", 400, 500),
    ]


def test_collectives_of_one_group_queue_and_those_of_two_share() -> None:
    found = spans(gather("g"), reduce_scatter("r", "x"), gather("h", group="1"))
    assert [span for span in found if span[0] == "network"] == [
        ("network", "g@0", 0, 200),
        ("network", "r@0", 200, 300),
        ("network", "h@1", 0, 200),
    ]


def test_the_host_takes_its_time() -> None:
    machine = Machine(kernel_host_ns=10, collective_host_ns=20, wait_host_ns=5)
    assert spans(gather("g"), mm("b", ns=30), wait("g"), mm("a", "w.g"), machine=machine) == [
        ("issued", "g", 0, 20),
        ("network", "g@0", 20, 120),
        ("issued", "b", 20, 30),
        ("compute", "b", 30, 60),
        ("issued", "w.g", 30, 35),
        ("idle", "g", 60, 120),
        ("issued", "a", 35, 45),
        ("compute", "a", 120, 220),
    ]


def test_a_coalesced_call_is_one_stretch_of_its_first_launch() -> None:
    nodes = (gather("g"), mm("b", ns=30), gather("h"), wait("h"), wait("g"))
    call = Coalesced(launches=(0, 2), ns=150)
    machine = Machine(collective_host_ns=20, member_host_ns=4)
    assert spans(*nodes, machine=machine, coalesced=[call]) == [
        ("issued", "g", 0, 24),
        ("network", "g@0", 24, 174),
        ("compute", "b", 24, 54),
        ("issued", "h", 24, 24),
        ("issued", "w.h", 24, 24),
        ("idle", "h", 54, 174),
        ("issued", "w.g", 24, 24),
    ]


def by_track(found: tuple[Span, ...]) -> dict[str, list[Span]]:
    """Spans of the host, of the compute stream, and of each queue."""
    tracks: dict[str, list[Span]] = {}
    for span in found:
        stream = "host" if span.kind is SpanKind.ISSUED else "compute"
        tracks.setdefault(f"queue {span.queue}" if span.queue else stream, []).append(span)
    return tracks


@given(graphs(), machines(), st.randoms(use_true_random=False))
def test_spans_say_what_run_sums_up(graph: OverlapGraph, machine: Machine, random: Random) -> None:
    """In any order, legal or not: the model takes them all."""
    order = list(range(len(graph.nodes)))
    model = model_of(graph, machine, random_calls(graph, order, random))
    for positions in (order, sorted(order, key=lambda _: random.random())):
        timeline, found = model.run(positions), model.spans(positions)
        idle: dict[int, int] = {}
        for span in found:
            assert 0 <= span.start_ns <= span.end_ns <= timeline.total_ns
            if span.kind is SpanKind.IDLE:
                length = span.end_ns - span.start_ns
                idle[span.position] = idle.get(span.position, 0) + length
        assert idle == timeline.exposed_ns
        assert max((span.end_ns for span in found), default=0) == timeline.total_ns
        for track in by_track(found).values():
            ends = [0, *(span.end_ns for span in track)]
            assert all(s.start_ns >= end for s, end in zip(track, ends, strict=False))


def test_every_node_is_there_once() -> None:
    graph = graph_of(mm("a"), gather("g"), wait("g"), mm("b", "a", "w.g"))
    found = model_of(graph).spans([1, 0, 2, 3])
    own = [s.position for s in found if s.kind in (SpanKind.ISSUED, SpanKind.COMPUTE)]
    assert own == [1, 0, 2, 3]
