"""Static sizes of each rank's own: when they are left out, and when they tell of another order."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.skeleton import (
    SkeletonEntry,
    find_reordered,
    fingerprint,
    is_exchange,
    merge,
    merge_skeletons,
    structure,
)

from ..small_graphs import graph_of, mm

EXCHANGE = "_c10d_functional.all_to_all_single.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
ATTENTION = "mylib::attn_cp"

Sizes = tuple[int | str, ...]


def skeleton(*sizes: Sizes, op: str = ATTENTION, **changes: object) -> tuple[SkeletonEntry, ...]:
    """One entry for each tuple of sizes."""
    values = {"dtypes": ("bfloat16",), "groups": (0,), "group_sizes": (2,), "weight_gather": False}
    return tuple(
        SkeletonEntry(ordinal=i, op=op, sizes=(dims,), **{**values, **changes})
        for i, dims in enumerate(sizes)
    )


@pytest.mark.parametrize(
    ("op", "sizes", "fits"),
    [
        (EXCHANGE, [(512, 256), (640, 256)], True),
        (EXCHANGE, [(512,), (640,)], True),
        (EXCHANGE, [(512, 256), (512, 128)], False),
        (EXCHANGE, [(512, 256), (640, 128)], False),
        ("_c10d_functional_autograd::all_to_all_single", [(512, 256), (640, 256)], True),
        (SCATTER, [(512, 256), (640, 256)], False),
        ("_c10d_functional.all_reduce_.default", [(512, 256), (640, 256)], False),
        ("symm_mem::fused_all_gather_matmul", [(512, 256), (640, 256)], False),
        ("fused", [(512, 256), (640, 256)], False),
        (ATTENTION, [(1, 512, 8, 64), (1, 640, 8, 64)], True),
        (ATTENTION, [(1, 512, 8, 64), (1, 640, 8, 64), (1, 96, 8, 64)], True),
        (ATTENTION, [("~", 512, 64), ("~", 640, 64)], True),
        (ATTENTION, [(1, "~", 64), (1, 1, 64), (1, 640, 64)], True),
        (ATTENTION, [(512,), (640,)], True),
        (ATTENTION, [(1, 512, 8, 64), (1, 640, 4, 64)], False),
        (ATTENTION, [(1, 512, 8, 64), (1, 640, 8, 64), (1, 512, 4, 64)], False),
        (ATTENTION, [(1, 512, 64), (1, 512, 32)], False),
        (ATTENTION, [(1, 512, 64), ("~", 640, 64)], False),
        (ATTENTION, [(1, 512, 64), (512, 64)], False),
    ],
)
def test_which_sizes_may_be_a_ranks_own(op: str, sizes: list[Sizes], fits: bool) -> None:
    skeletons = [skeleton(dims, op=op) for dims in sizes]
    for order in (skeletons, skeletons[::-1]):
        merged, difference = merge_skeletons(order)
        assert (merged is not None) is fits, difference
        assert bool(difference) is not fits


def test_weights_are_of_one_size_on_all_ranks() -> None:
    skeletons = [skeleton((rows, 8), weight_gather=True) for rows in (64, 65)]
    assert merge_skeletons(skeletons)[0] is None


def test_what_is_left_out_is_symbolic_in_what_ranks_share() -> None:
    even = (1152, 4, 64)
    skeletons = [skeleton(even, (rows, 4, 64), even) for rows in (512, 640, 512)]
    found = merge(skeletons)
    assert found.entries == skeleton(even, ("~", 4, 64), even)
    assert found.uneven == (1,)
    assert merge(skeletons[:1]).uneven == ()


def test_the_last_dimension_counts_features_unless_another_output_has_it_as_rows() -> None:
    def attention(rows: int, lse: int) -> tuple[SkeletonEntry, ...]:
        [entry] = skeleton((1, rows, 8, 64))
        return (evolve(entry, sizes=((1, rows, 8, 64), (1, 8, lse))),)

    assert merge([attention(512, 512), attention(640, 640)]).uneven == (0,)
    assert merge([attention(512, 512), attention(640, 512)]).uneven == (0,)
    found = merge([attention(512, 512), attention(640, 96)])
    assert "beside" in found.difference
    assert merge([attention(512, 512), attention(512, 640)]).entries is None


@pytest.mark.parametrize(
    "sizes",
    [
        [((512, 8), (640, 8)), ((640, 8), (512, 8))],
        [((512, 8), (256, 8)), ((256, 8), (640, 8))],
        [((512, 8), (96, 8), (64, 8)), ((640, 8), (64, 8), (96, 8))],
        [((512, 8), (100, 8)), ((640, 8), (120, 8)), ((120, 8), (640, 8))],
        [((512, 64), (512, 32)), ((512, 32), (512, 64))],
        [(("~", 8), (640, 8)), ((640, 8), (512, 8))],
    ],
)
@pytest.mark.parametrize("op", [ATTENTION, EXCHANGE])
def test_operations_that_swapped_on_one_rank_are_no_shares(
    sizes: list[tuple[Sizes, ...]], op: str
) -> None:
    skeletons = [skeleton(*dims, op=op) for dims in sizes]
    for order in (skeletons, skeletons[::-1]):
        assert merge_skeletons(order)[0] is None


def test_groups_do_not_tell_swapped_operations_apart() -> None:
    """They are numbered by first appearance, so a swap renumbers them."""
    one, other = (skeleton(*dims) for dims in (((512, 8), (64, 8)), ((64, 8), (512, 8))))
    skeletons = [(first, evolve(second, groups=(1,))) for first, second in (one, other)]
    assert merge_skeletons(skeletons)[0] is None


def test_of_swapped_operations_both_are_named() -> None:
    skeletons = [skeleton((512, 8), (64, 8)), skeleton((64, 8), (640, 8))]
    assert merge_skeletons(skeletons, (3, 5))[1] == (
        "entry 1: mylib::attn_cp [64x8] bfloat16 on group 0 of 2 ranks (rank 3) beside "
        "mylib::attn_cp [640x8] bfloat16 on group 0 of 2 ranks (rank 5); the former is entry 0 of "
        "the latter rank"
    )


def test_what_else_tells_operations_apart_counts() -> None:
    larger_elsewhere = [skeleton((512, 8), (100, 8)), skeleton((120, 8), (640, 8))]
    assert find_reordered(larger_elsewhere, (0, 1)) == (
        "entry 0: mylib::attn_cp [512x8] bfloat16 on group 0 of 2 ranks beside "
        "mylib::attn_cp [120x8] bfloat16 on group 0 of 2 ranks; the former is larger than entry 1 "
        "of its rank, and the latter smaller"
    )
    assert not find_reordered(larger_elsewhere, (0, 1), captured=True)
    unknown = [skeleton((512, 8), (8, "~")), skeleton((640, 8), (8, 900))]
    assert not find_reordered(unknown, (0,))
    swapped = [skeleton((512, 8), (640, 8)), skeleton((640, 8), (512, 8))]
    assert find_reordered(swapped, (0, 1), captured=True)
    assert not find_reordered(swapped, (0, 1), matched=(0, 1))


rows = st.sampled_from((64, 96, 512, 640))


@given(st.lists(st.tuples(rows, rows, rows), min_size=1, max_size=4), st.randoms())
def test_the_order_of_ranks_means_nothing(sizes: list[tuple[int, ...]], random: object) -> None:
    skeletons = [skeleton(*((count, 8) for count in counts)) for counts in sizes]
    shuffled = list(skeletons)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert merge_skeletons(shuffled)[0] == merge_skeletons(skeletons)[0]


@given(st.permutations((64, 96, 512, 640)), st.lists(rows, min_size=4, max_size=4))
def test_no_permutation_of_sizes_is_taken_for_shares(order: list[int], counts: list[int]) -> None:
    places = {size: place for place, size in enumerate((64, 96, 512, 640))}
    one, other = counts, [counts[places[size]] for size in order]
    skeletons = [skeleton(*((count, 8) for count in side)) for side in (one, other)]
    assert (merge_skeletons(skeletons)[0] is None) == (one != other)


@pytest.mark.parametrize(
    ("op", "found"),
    [
        (EXCHANGE, True),
        ("torchrec::all_to_all_single", True),
        (SCATTER, False),
        ("_dtensor.shard_dim_alltoall.default", False),
        ("mylib::all_to_all_single", False),
        ("fused", False),
    ],
)
def test_which_ops_take_split_sizes(op: str, found: bool) -> None:
    assert is_exchange(op) is found


def test_of_a_structure_only_static_sizes_are_left_out() -> None:
    def graph(*sizes: int | str) -> str:
        return structure(graph_of(mm("a", sizes=(sizes,)), mm("b", "a", sizes=(("s0", 8),))))

    assert graph(512, 8) == graph(640, 4) == graph("s0 - s0 + 3", 4)
    assert graph(512, 8) not in (graph(512), graph("s0", 8), graph(512, "s0"))
    assert graph("s0", 8) != graph("s1", 8)
    assert structure(graph_of(mm("a"))) != fingerprint(graph_of(mm("a")))
