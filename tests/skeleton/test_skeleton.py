"""The skeleton: which nodes communicate, and what ranks can compare of them."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import overlap_core
from overlap_core import Communication, Node, NodeKind
from overlap_core.skeleton import (
    SkeletonEntry,
    build_skeleton,
    describe_entry,
    entry_from_json,
    entry_to_json,
    merge_skeletons,
    skeleton_digest,
)
from overlap_core.testing.strategies import RankSet, rank_sets

from ..small_graphs import classify, gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait


def test_waits_are_left_out_and_opaque_ops_that_communicate_are_not() -> None:
    silent = Node(name="sdpa", kind=NodeKind.OPAQUE, op="mylib::sdpa", reads=("x",), writes=("s",))
    graph = graph_of(
        gather("g"),
        wait("g"),
        mm("a", "w.g"),
        silent,
        opaque("attention", "a"),
        reduce_scatter("r", "attention"),
        wait("r"),
        mm("b", "w.r"),
    )
    skeleton = skeleton_of(graph)
    assert [entry.node for entry in skeleton.entries] == ["g", "attention", "r"]
    assert [entry.ordinal for entry in skeleton.entries] == [0, 1, 2]
    assert [entry.weight_gather for entry in skeleton.entries] == [True, False, False]
    assert [entry.groups for entry in skeleton.entries] == [(0,), (1,), (0,)]
    assert skeleton.positions == (0, 4, 5)
    assert overlap_core.skeleton(graph) == skeleton.entries


def test_names_symbols_and_ranks_do_not_count() -> None:
    one = graph_of(gather("g", sizes=(("s0 + 1", 8),), group="7"), wait("g"), mm("a", "w.g"))
    launch = gather("other", sizes=(("u3", 8),), group="tp")
    other = graph_of(evolve(launch, group_ranks=(1, 0)), wait("other"), mm("z", "w.other"))
    assert skeleton_of(one).entries == skeleton_of(other).entries
    assert skeleton_of(one).entries[0].sizes == (("~", 8),)


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": ((65, 8),)},
        {"sizes": ((64, 8), (64, 8))},
        {"dtypes": ("float32",)},
        {"op": "_c10d_functional.all_gather_into_tensor_coalesced.default"},
        {"group_ranks": (0,)},
        {"reads": ("constant0",)},
    ],
)
def test_what_ranks_compare_counts(changes: dict[str, object]) -> None:
    def digest(launch: Node) -> str:
        return skeleton_digest(skeleton_of(graph_of(launch, wait("g"), mm("a", "w.g"))).entries)

    launch = gather("g")
    assert digest(evolve(launch, **changes)) != digest(launch)


def test_a_size_that_only_looks_symbolic_is_static() -> None:
    launch = gather("g", sizes=(("s0 - s0 + 64", 8),))
    graph = graph_of(launch, wait("g"), mm("a", "w.g"))
    assert skeleton_of(graph).entries[0].sizes == ((64, 8),)


def test_a_plugin_may_name_groups_and_further_words() -> None:
    def knows_better(node: Node) -> Communication | None:
        if node.kind is NodeKind.OPAQUE:
            return Communication(groups=("a", "b"), comparable="ring")
        return classify(node)

    graph = graph_of(opaque("attention", "x", group=None), opaque("again", "attention", group="b"))
    first, again = build_skeleton(graph, knows_better).entries
    assert (first.groups, first.group_sizes, first.comparable) == ((0, 1), (None, None), ("ring",))
    assert again.groups == (0, 1)


def entry(*sizes: int | str, **changes: object) -> SkeletonEntry:
    values = {"op": "gather", "dtypes": ("bfloat16",), "groups": (0,), "group_sizes": (2,)}
    return SkeletonEntry(
        ordinal=0, sizes=(tuple(sizes),), weight_gather=True, **{**values, **changes}
    )


@pytest.mark.parametrize(
    ("skeletons", "merged"),
    [
        ([[entry(4, 8)], [entry(4, 8)]], [entry(4, 8)]),
        ([[entry(1, 8)], [entry("~", 8)]], [entry("~", 8)]),
        ([[entry("~", 8)], [entry(1, 8)], [entry(1, "~")]], [entry("~", "~")]),
        ([[], []], []),
    ],
)
def test_a_dimension_may_be_static_on_some_ranks_only(
    skeletons: list[list[SkeletonEntry]], merged: list[SkeletonEntry]
) -> None:
    for order in (skeletons, skeletons[::-1]):
        assert merge_skeletons(order) == (tuple(merged), "")


@pytest.mark.parametrize(
    ("skeletons", "message"),
    [
        ([[entry(4)], [entry(5)]], "entry 0: gather [4] bfloat16 on group 0 of 2 ranks beside"),
        ([[entry(4)], [entry("~")], [entry(5)]], "entry 0: gather with [4, 5] in dimension 0"),
        ([[entry(4)], [entry(4, 4)]], "entry 0: gather [4] bfloat16 on group 0 of 2 ranks beside"),
        ([[entry("~")], [entry("~", op="x")]], "entry 0: gather [~] bfloat16 on group 0 of 2"),
        ([[entry(4)], [entry(4), entry(7)]], "entry 1: gather [7] bfloat16 on group 0 of 2 ranks"),
        ([[entry(4), entry(7)], [entry(4)]], "on one side only"),
        ([[entry(4)], [entry(4, group_sizes=(4,))]], "on group 0 of 4 ranks"),
    ],
)
def test_the_first_difference_is_named(skeletons: list[list[SkeletonEntry]], message: str) -> None:
    for order in (skeletons, skeletons[::-1]):
        assert merge_skeletons(order)[0] is None
    assert message in merge_skeletons(skeletons)[1]


def test_an_entry_in_words() -> None:
    assert describe_entry(entry(4, "~")) == "gather [4x~] bfloat16 on group 0 of 2 ranks"
    assert describe_entry(entry(groups=(0,), group_sizes=(None,))).endswith("group 0 of ? ranks")


@given(rank_sets("compute", max_ranks=3))
def test_other_compute_leaves_compatible_skeletons(ranks: RankSet) -> None:
    stage = [skeleton_of(ranks.graphs[rank]).entries for rank in ranks.stages[0]]
    merged, difference = merge_skeletons(stage)
    assert merged is not None, difference


@given(rank_sets(), st.randoms(use_true_random=False))
def test_entries_travel_as_json_and_merge_in_any_order(ranks: RankSet, random: object) -> None:
    skeletons = [skeleton_of(graph).entries for graph in ranks.graphs]
    for entries in skeletons:
        travelled = json.loads(json.dumps([entry_to_json(e) for e in entries]))
        assert tuple(entry_from_json(i, data) for i, data in enumerate(travelled)) == entries
    shuffled = list(skeletons)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert merge_skeletons(shuffled)[0] == merge_skeletons(skeletons)[0]
