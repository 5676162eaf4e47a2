"""What happens when in one order, one known case each, and that it is what `run` sums up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from overlap_core.costs import resolve_costs
from overlap_core.placement import Span, SpanKind, TimelineModel
from overlap_core.testing.strategies import graphs

from ..small_graphs import gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait

if TYPE_CHECKING:
    from overlap_core import Node, OverlapGraph


def model_of(graph: OverlapGraph) -> TimelineModel:
    return TimelineModel(graph, skeleton_of(graph), resolve_costs(graph, lambda request: None))


def spans(*nodes: Node) -> list[tuple[str, str, int, int]]:
    """Kind, node (with the group for time on the network), start, end."""
    graph = graph_of(*nodes)
    return [
        (
            str(span.kind),
            nodes[span.position].name + (f"@{span.queue}" if span.queue else ""),
            span.start_ns,
            span.end_ns,
        )
        for span in model_of(graph).spans(range(len(nodes)))
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


def test_collectives_of_one_group_queue() -> None:
    found = spans(gather("g"), reduce_scatter("r", "x"), gather("h", group="1"))
    assert [span for span in found if span[0] == "network"] == [
        ("network", "g@0", 0, 100),
        ("network", "r@0", 100, 200),
        ("network", "h@1", 0, 100),
    ]


def by_track(found: tuple[Span, ...]) -> dict[str | None, list[Span]]:
    """Spans of the compute stream (None) and of each queue."""
    tracks: dict[str | None, list[Span]] = {}
    for span in found:
        if span.kind is not SpanKind.ISSUED:
            tracks.setdefault(span.queue, []).append(span)
    return tracks


@given(graphs(), st.randoms(use_true_random=False))
def test_spans_say_what_run_sums_up(graph: OverlapGraph, random: object) -> None:
    """In any order, legal or not: the model takes them all."""
    model = model_of(graph)
    order = list(range(len(graph.nodes)))
    for positions in (order, sorted(order, key=lambda _: random.random())):  # type: ignore[attr-defined]
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
