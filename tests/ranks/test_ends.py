"""Whether what ranks send is what their peers expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.ranks.ends import (
    Exchanged,
    compare_ends,
    decode_exchanged,
    encode_exchanged,
    list_exchanged,
)
from overlap_core.testing import GraphBuilder

from ..small_graphs import skeleton_of

if TYPE_CHECKING:
    from overlap_core import OverlapGraph

Rows = tuple[int | str, ...]


def graph_of(rank: int, sent: Rows, received: Rows, ranks: tuple[int, ...]) -> OverlapGraph:
    """A gather, and the same all-to-all twice."""
    g = GraphBuilder(rank=rank, ranks=4, groups={"cp": ranks})
    y = g.mm("x", g.gather("w"))
    for name in ("e0", "e1"):
        y = g.all_to_all(y, name=name, group="cp", sent=sent, received=received)
    g.mm(y)
    return g.build()


def listed(
    rank: int, sent: Rows, received: Rows, ranks: tuple[int, ...] = (0, 1)
) -> dict[int, Exchanged]:
    graph = graph_of(rank, sent, received, ranks)
    return list_exchanged(graph, skeleton_of(graph), (0, 1, 2), (1, 2))


def compare(exchanged: dict[int, dict[int, Exchanged]]) -> tuple[str, frozenset[int]]:
    entries = skeleton_of(graph_of(0, (1, 1), (1, 1), (0, 1))).entries[1:]
    travelled = {r: decode_exchanged(encode_exchanged(e)) for r, e in exchanged.items()}
    assert travelled == exchanged
    return compare_ends(travelled, entries)


def test_rows_are_those_of_the_entry_in_the_order_that_is_meant() -> None:
    g = GraphBuilder()
    g.all_to_all("x", name="a", sent=(1, 2), received=(3, 4))
    g.all_to_all("x", name="b", sent=(5, "s0 + 1"), received=(7, 8))
    g.all_to_all("x", name="unknown")
    graph = g.build()
    found = list_exchanged(graph, skeleton_of(graph), (1, 2, 0), (0, 1, 2))
    assert {ordinal: one.node for ordinal, one in found.items()} == {0: "b", 2: "a"}
    assert found[0].sent == (5, "~")
    assert found[2].received == (3, 4)


def test_rows_that_come_again_travel_once() -> None:
    twice = encode_exchanged(listed(0, (256, 320), (256, 256)))
    assert twice == b'{"rows":[[[0,1],[256,320],[256,256]]],"entries":[[1,"e0",0],[2,"e1",0]]}'


def test_ends_that_agree() -> None:
    first, second = listed(0, (256, 320), (256, 250)), listed(1, (250, 320), (320, 320))
    assert compare({0: first, 1: second}) == ("", {1, 2})


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            listed(1, (250, 320), (321, 320)),
            "of which rank 0 (e0) sends 320 rows to rank 1 (e0), and that one expects 321",
        ),
        (
            listed(1, (251, 320), (320, 320)),
            "of which rank 1 (e0) sends 251 rows to rank 0 (e0), and that one expects 250",
        ),
        (
            listed(1, (250, 320), (320, 319)),
            "of which rank 1 (e0) sends 320 rows to rank 1 (e0), and that one expects 319",
        ),
        (
            listed(1, (250, 320), (320, 320), (1, 2)),
            "of which rank 0 (e0) sends 320 rows to rank 1 (e0), and that one expects 0",
        ),
    ],
)
def test_ends_that_do_not(second: dict[int, Exchanged], words: str) -> None:
    found, matched = compare({0: listed(0, (256, 320), (256, 250)), 1: second})
    assert found == (
        "entry 1: _c10d_functional.all_to_all_single.default [1024x256] bfloat16 on group 1 of 2 "
        f"ranks, {words}"
    )
    assert not matched


@pytest.mark.parametrize(
    "second", [{}, listed(1, ("s0", 320), (320, 320)), listed(1, (250, 320), ("s0", 320))]
)
def test_what_is_not_known_does_not_contradict(second: dict[int, Exchanged]) -> None:
    first = listed(0, (256, 320), (256, 250))
    assert compare({0: first, 1: second}) == ("", frozenset())
    assert compare({0: first}) == ("", frozenset())


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=3, max_size=3))
def test_what_every_rank_derives_from_one_table_fits(table: list[list[int]]) -> None:
    """`table[i][j]` goes from rank i to rank j, and nothing else does."""
    ranks = (0, 1, 2)

    def exchanged(rows: list[list[int]]) -> dict[int, dict[int, Exchanged]]:
        return {
            rank: listed(rank, tuple(rows[rank]), tuple(row[rank] for row in table), ranks)
            for rank in ranks
        }

    assert compare(exchanged(table)) == ("", {1, 2})
    more = [row if i else [row[0], row[1] + 1, row[2]] for i, row in enumerate(table)]
    assert compare(exchanged(more))[0]
