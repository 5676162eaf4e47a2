"""Where two graphs begin to differ, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given

from overlap_core.ranks import encode_nodes, find_difference
from overlap_core.ranks.differences import describe_more
from overlap_core.skeleton import SkeletonEntry, fingerprint
from overlap_core.testing.strategies import RankSet, rank_sets

from ..small_graphs import gather, graph_of, mm, wait

if TYPE_CHECKING:
    from overlap_core import Node, OverlapGraph


def difference(left: OverlapGraph, right: OverlapGraph) -> str:
    return find_difference((0, 3), (encode_nodes(left), encode_nodes(right)))


def layer(*more: Node) -> OverlapGraph:
    return graph_of(mm("a"), gather("g"), wait("g"), mm("b", "a", "w.g"), *more)


def fused(*origins: str) -> Node:
    return evolve(mm("f", "b"), op="triton_poi_0", origins=origins, sizes=((4, "s0"),))


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (
            layer(evolve(mm("c", "b"), op="aten.mul.Tensor")),
            layer(evolve(mm("c", "b"), op="aten.add.Tensor")),
            "first difference at node 4: rank 0 has aten::mul, rank 3 has aten::add",
        ),
        (
            layer(fused("aten.mul.Tensor", "aten.rsqrt.default")),
            layer(fused("aten.mul.Tensor")),
            (
                "first difference at node 4: rank 0 has fused aten::mul, aten::rsqrt [4x~], "
                "rank 3 has fused aten::mul [4x~]"
            ),
        ),
        (
            layer(fused(*(f"aten.op{i}.default" for i in range(6)))),
            layer(fused()),
            (
                "first difference at node 4: rank 0 has fused aten::op0, aten::op1, aten::op2, "
                "aten::op3 and 2 more [4x~], rank 3 has triton_poi_0 [4x~]"
            ),
        ),
        (
            layer(mm("c", "b")),
            layer(mm("c", "a")),
            "first difference at node 4: aten::mm reads other buffers on rank 0 than on rank 3",
        ),
        (
            layer(mm("c", "b")),
            layer(),
            "first difference at node 4: rank 0 has aten::mm, the other graph ends",
        ),
        (
            layer(),
            layer(mm("c", "b")),
            "first difference at node 4: rank 3 has aten::mm, the other graph ends",
        ),
        (
            layer(evolve(mm("c", "b"), sizes=(("s0", "s1"),))),
            layer(evolve(mm("c", "b"), sizes=(("s0", "s0"),))),
            (
                "rank 0 and rank 3 have the same nodes, which differ in what is not shown here, "
                "such as how symbolic sizes or other nodes determine them"
            ),
        ),
        (
            layer(evolve(mm("c", "b"), op="aten.mul.Tensor")),
            layer(evolve(mm("c", "b"), op="aten.mul.Scalar")),
            (
                "first difference at node 4: aten::mul is not the same on rank 0 and on rank 3, by "
                "what is not shown here, such as an overload or the ops that were fused"
            ),
        ),
    ],
)
def test_the_first_difference(left: OverlapGraph, right: OverlapGraph, words: str) -> None:
    assert difference(left, right) == words


def test_names_of_nodes_and_buffers_are_no_difference() -> None:
    other = graph_of(mm("p"), gather("q"), wait("q"), mm("r", "p", "w.q"))
    assert "have the same nodes" in difference(layer(), other)


def test_a_long_description_is_cut() -> None:
    wide = layer(evolve(mm("c", "b"), sizes=((1024,) * 100,)))
    assert len(difference(wide, layer())) < 250


@given(rank_sets())
def test_graphs_of_one_fingerprint_have_the_same_nodes(ranks: RankSet) -> None:
    first = ranks.graphs[0]
    for graph in ranks.graphs[1:]:
        words = difference(first, graph)
        assert words
        if fingerprint(graph) == fingerprint(first):
            assert "have the same nodes" in words


def skeleton(*ops: str) -> tuple[SkeletonEntry, ...]:
    return tuple(
        SkeletonEntry(
            ordinal=i, op=op, sizes=(), dtypes=(), groups=(), group_sizes=(), weight_gather=False
        )
        for i, op in enumerate(ops)
    )


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([["a::x", "a::y"]], ""),
        ([["a::y", "a::x"]], ""),
        (
            [["a::y", "a::x"], ["a::x", "mylib::dispatch", "a::y"]],
            "rank 5's skeleton has one more `mylib::dispatch` than rank 0's",
        ),
        ([["a::x.default"]], "rank 0's skeleton has one more `a::y` than rank 3's"),
        (
            [["a::x", "a::z", "a::z", "b::z"]],
            (
                "rank 3's skeleton has 2 more `a::z`, one more `b::z` than rank 0's; "
                "rank 0's skeleton has one more `a::y` than rank 3's"
            ),
        ),
        (
            [["a::x", "a::y", *"bcde"]],
            (
                "rank 3's skeleton has one more `b`, one more `c`, one more `d`, more of other ops "
                "than rank 0's"
            ),
        ),
    ],
)
def test_what_a_skeleton_has_more_of(others: list[list[str]], words: str) -> None:
    skeletons = [skeleton("a::x", "a::y"), *(skeleton(*ops) for ops in others)]
    assert describe_more([0, 3, 5][: len(skeletons)], skeletons) == words
