"""Orders of skeleton entries other than program order, and graphs that take them."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.graph import OverlapGraph, first_violation, restore_order
from overlap_core.skeleton import (
    Skeleton,
    arrange,
    captured_order,
    match_order,
    occurrences,
    order_digest,
)
from overlap_core.testing.strategies import graphs

from ..small_graphs import gather, graph_of, mm, opaque, skeleton_of, wait


def three(*captured: int | None) -> tuple[OverlapGraph, Skeleton]:
    """Two equal gathers on group 0 and an op on group 1, with their captured places."""
    graph = graph_of(
        gather("g0", captured=captured[0]),
        gather("g1", captured=captured[1]),
        opaque("op", "x", captured=captured[2]),
        wait("g0"),
        wait("g1"),
        mm("m", "op", "w.g0", "w.g1"),
    )
    return graph, skeleton_of(graph)


def test_captured_order() -> None:
    assert captured_order(*three(7, 9, 2)) == (2, 0, 1)
    assert captured_order(*three(7, None, 2)) is None
    assert captured_order(*three(7, 7, 2)) is None, "two entries of one captured operation"


def test_an_unknown_order_has_no_digest() -> None:
    assert order_digest(None) == ""
    assert len({order_digest(()), order_digest((0, 1)), order_digest((1, 0)), ""}) == 4


def test_arranging_numbers_groups_anew() -> None:
    _, skeleton = three(0, 1, 2)
    arranged = arrange(skeleton.entries, (2, 1, 0))
    assert [entry.node for entry in arranged] == ["op", "g1", "g0"]
    assert [entry.groups for entry in arranged] == [(0,), (1,), (1,)]
    assert [entry.ordinal for entry in arranged] == [0, 1, 2]
    assert arrange(arranged, (2, 1, 0)) == skeleton.entries


def test_occurrences_tell_equal_entries_apart_only() -> None:
    entries = three(0, 1, 2)[1].entries
    known = [(0, 1)] * 3
    for ranks in (known, [None] * 3):
        assert occurrences(entries, (0, 1, 2), ranks) == (0, 1, 0)
        assert occurrences(entries, (2, 0, 1), ranks) == (0, 1, 0)
        assert occurrences(entries, (1, 2, 0), ranks) == (1, 0, 0)


def test_groups_of_other_ranks_tell_entries_apart() -> None:
    entries = three(0, 1, 2)[1].entries
    two = (entries[0], evolve(entries[1], groups=(1,)))
    assert occurrences(two, (1, 0), [(0, 1), (0, 1)]) == (1, 0), "either could be the other"
    assert occurrences(two, (1, 0), [(0, 1), (0, 2)]) == (0, 0)
    assert occurrences(two, (1, 0), [None, None]) == (0, 0)


def test_orders_are_matched_where_no_two_entries_are_equal() -> None:
    entries = three(0, 1, 2)[1].entries
    other = (entries[0], evolve(entries[1], sizes=((7,),)), entries[2])
    assert match_order(other, arrange(other, (2, 0, 1))) == (2, 0, 1)
    assert match_order(entries, entries) is None, "two are equal"
    assert match_order(other, other[:2]) is None
    assert match_order(other, arrange(entries, (1, 0, 2))) is None


def test_a_node_waits_for_its_turn_rather_than_others_being_pulled_ahead() -> None:
    graph, skeleton = three(0, 1, 2)
    names = [graph.nodes[p].name for p in restore_order(graph.predecessors, (2, 0)) or ()]
    assert names == ["g1", "op", "g0", "w.g0", "w.g1", "m"]
    m = graph.index["m"]
    assert restore_order(graph.predecessors, (m, skeleton.positions[0])) is None


@given(graphs(), st.data())
def test_restored_orders_are_legal_and_have_the_sequence(
    graph: OverlapGraph, data: st.DataObject
) -> None:
    program = range(len(graph.nodes))
    some = data.draw(st.lists(st.sampled_from(program), unique=True) if program else st.just([]))
    assert restore_order(graph.predecessors, sorted(some)) == tuple(program)
    order = restore_order(graph.predecessors, some)
    if order is not None:
        assert sorted(order) == list(program)
        assert first_violation(graph.predecessors, order) is None
        assert [position for position in order if position in set(some)] == some
