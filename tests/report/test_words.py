"""Keys, sizes, ranks and votes in words."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from overlap_core.costs import FREE, Cost, CostRequest, CostSource
from overlap_core.graph import Node, NodeKind, OverlapGraph
from overlap_core.outcome import GatherOutcome, RankOutcome
from overlap_core.ranks import Mode, Vote
from overlap_core.report import (
    Report,
    bytes_in_words,
    cost_entries,
    ranks_in_words,
    request_in_words,
    votes_in_words,
)

GATHER = "_c10d_functional.all_gather_into_tensor.default"
SQUARE = (3072, 3072)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "words"),
    [
        ("extern_kernels.mm", [(4096, 3072), SQUARE], [(4096, 3072)], "mm 4096x3072 by 3072x3072"),
        ("aten.addmm.default", [(8,), (4, 2), (2, 8)], [(4, 8)], "addmm 4x2 by 2x8"),
        ("aten.addmm.default", [(4, 2), (2, 8)], [(4, 8)], "addmm 4x2 by 2x8"),
        ("extern_kernels.bmm", [(9, 4, 2), (9, 2, 8)], [(9, 4, 8)], "bmm 9x4x2 by 9x2x8"),
        ("aten._scaled_mm.out", [(4, 2), (2, 8), (), ()], [(4, 8)], "_scaled_mm 4x2 by 2x8"),
        ("aten.mm.out", [(4, 2)], [(4, 8)], "mm 4x2 to 4x8"),
        ("aten.mm.out", [], [(4, 8)], "mm to 4x8"),
        ("aten.mm.out", [(("~", 4096), 2), (2, ("~", None))], [], "mm ~4096x2 by 2x~"),
        ("aten.add.Tensor", [(4, 8)], [(4, 8)], "add 4x8"),
        ("aten.sum.default", [(4, 8)], [()], "sum 4x8 to scalar"),
        ("mylib::op", [(1,), (2,), (3,), (4,)], [(5,)], "mylib::op 1, 2 and 2 more to 5"),
        ("mylib.op.default", [], [], "mylib::op"),
        ("fused", [(4,)], [(4,)], "fused 4"),
    ],
)
def test_compute_in_words(op: str, inputs: Any, outputs: Any, words: str) -> None:
    request = CostRequest(
        kind="compute",
        op=op,
        inputs=tuple(inputs),
        input_dtypes=("bfloat16",) * len(inputs),
        outputs=tuple(outputs),
        output_dtypes=("bfloat16",) * len(outputs),
    )
    dtype = " bfloat16" if inputs or outputs else ""
    assert request_in_words(request) == words + dtype


def test_other_dtypes_are_named() -> None:
    request = CostRequest(
        kind="compute", op="aten._to_copy.default", inputs=((4,),), outputs=((4,),),
        input_dtypes=("float32", "float32", "int64"), output_dtypes=("bfloat16",),
    )  # fmt: skip
    assert request_in_words(request) == "_to_copy 4 float32/int64 to bfloat16"


def test_a_fused_kernel_is_named_after_what_is_in_it() -> None:
    request = CostRequest(kind="compute", op="fused", outputs=((4,),))
    origins = [f"aten.op{i}.default" for i in range(6)]
    assert request_in_words(request, origins[:1]) == "op0 to 4"
    assert request_in_words(request, [*origins[:2], "aten.op0.out"]) == "fused op0, op1 to 4"
    assert request_in_words(request, origins) == "fused op0, op1, op2, op3 and 2 more to 4"


@pytest.mark.parametrize(
    ("op", "ranks", "nbytes", "words"),
    [
        (GATHER, 2, 18 * 1024**2, "all-gather of 18 MiB over 2 ranks"),
        (GATHER, None, 1536, "all-gather of 1.5 KiB over an unknown group"),
        (GATHER, 1, None, "all-gather to 8x8 float32 over 1 rank"),
        (
            "_c10d_functional.all_gather_into_tensor_coalesced.default", 2, 10,
            "coalesced all-gather of 10 B over 2 ranks",
        ),
        (
            "_c10d_functional.reduce_scatter_tensor.default", 4, 0,
            "reduce-scatter of 0 B over 4 ranks",
        ),
        ("_c10d_functional.all_reduce_.default", 4, 1023, "all-reduce of 1023 B over 4 ranks"),
        ("_c10d_functional.all_to_all_single.default", 4, 1024, "all-to-all of 1 KiB over 4 ranks"),
        ("mylib::send", 2, 1024, "mylib::send of 1 KiB over 2 ranks"),
    ],
)  # fmt: skip
def test_collectives_in_words(op: str, ranks: int | None, nbytes: int | None, words: str) -> None:
    request = CostRequest(
        kind="collective", op=op, outputs=((8, 8),), output_dtypes=("float32",),
        group_size=ranks, nbytes=nbytes,
    )  # fmt: skip
    assert request_in_words(request) == words


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1024**2 - 1, "1024 KiB")),
        *((3 * 2**29, "1.5 GiB"), (2**60, "1048576 TiB")),
    ],
)
def test_bytes_in_words(nbytes: int, words: str) -> None:
    assert bytes_in_words(nbytes) == words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        *(([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 0, 2, 1], "ranks 0-2, 5")),
        ([1, 3], "ranks 1, 3"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


VOTE = Vote(
    rank=0, can=True, config="c0ffee11", plugins="d1ce", plugin_names=("a 0.1", "b 0.2"),
    fingerprint="0123456789", skeleton="abcdef0123", entries=12, weight_gathers=4,
)  # fmt: skip
CAN = "can; graph 01234567, skeleton abcdef01 with 12 entries, 4 weight gathers"


def test_equal_votes_are_one_line() -> None:
    assert votes_in_words([evolve(VOTE, rank=rank) for rank in (2, 0, 1)]) == (f"ranks 0-2: {CAN}",)
    assert votes_in_words([]) == ()


def test_a_rank_that_cannot_says_why() -> None:
    votes = [
        VOTE,
        evolve(VOTE, rank=1, can=False, why="plugin 'x' failed"),
        evolve(VOTE, rank=2, can=False),
        evolve(VOTE, rank=3, fingerprint=""),
    ]
    assert votes_in_words(votes) == (
        f"rank 0: {CAN}",
        "rank 1: cannot: plugin 'x' failed",
        "rank 2: cannot: gave no reason",
        f"rank 3: {CAN.replace('01234567', 'unknown')}",
    )


def test_plugins_and_configuration_are_named_where_they_differ() -> None:
    votes = [VOTE, evolve(VOTE, rank=1, plugins="beef", plugin_names=())]
    assert votes_in_words(votes) == (
        f"rank 0: {CAN}; plugins a 0.1, b 0.2 (digest d1ce)",
        f"rank 1: {CAN}; plugins none (digest beef)",
    )
    votes = [VOTE, evolve(VOTE, rank=1, config="123456789")]
    assert votes_in_words(votes) == (
        f"rank 0: {CAN}; configuration c0ffee11",
        f"rank 1: {CAN}; configuration 12345678",
    )


def outcome(**values: Any) -> RankOutcome:
    defaults: dict[str, Any] = {
        "rank": 0, "scope": (0,), "mode": Mode.IDENTICAL, "why": "", "order": (),
        "collectives": (), "gathers": (), "legal": True, "committed": True,
    }  # fmt: skip
    return RankOutcome(**{**defaults, **values})


def test_nodes_share_an_entry_if_key_and_cost_are_equal() -> None:
    key = CostRequest(kind="compute", op="aten.mm.out", node="a")
    slow, fast = (Cost(ns=ns, source=CostSource.MEASURED) for ns in (20, 10))
    found = cost_entries(
        outcome(
            costs=(slow, fast, FREE, slow, Cost()),
            requests=(key, key, None, evolve(key, node="b"), evolve(key, op="mylib::x")),
        )
    )
    assert [(entry.key, entry.nodes, entry.ns, entry.total_ns) for entry in found] == [
        ("mm", (0, 3), 20, 40),
        ("mm", (1,), 10, 10),
        ("waits, views and unpacks", (2,), 0, 0),
        ("mylib::x", (4,), None, None),
    ]


def test_keys_that_nobody_gave_are_made_from_the_graph() -> None:
    graph = OverlapGraph(
        nodes=(
            Node(name="a", kind=NodeKind.COMPUTE, op="aten.mm.out", sizes=((4, "s0"),)),
            Node(name="b", kind=NodeKind.COMPUTE, op="aten.view.default"),
        ),
        symbols={"s0": 7},
    )
    cost = Cost(ns=5, source=CostSource.MEASURED)
    found = cost_entries(outcome(graph=graph, order=("a", "b"), costs=(cost, FREE)))
    assert [entry.key for entry in found] == ["mm to 4x~7", "waits, views and unpacks"]
    assert [entry.key for entry in cost_entries(outcome(costs=(cost,)))] == ["unknown op"]


def test_entries_without_costs_are_unknown() -> None:
    (entry,) = cost_entries(outcome(requests=(CostRequest(kind="compute", op="x::y"),)))
    assert (entry.cost, entry.ns, entry.total_ns) == (None, None, None)
    assert (entry.source, entry.why) == (CostSource.UNKNOWN, "")


def test_what_limits_the_rest_is_counted_in_one_order() -> None:
    verdicts = ("unmoved", "hidden", "novel", "pinned", "hidden", "unmoved", "memory-limited")
    gathers = tuple(
        GatherOutcome(
            name=str(i), source=i, target=i, slot=0, verdict=verdict, why="",
            exposed_ns_before=0, exposed_ns_after=0,
        )
        for i, verdict in enumerate(verdicts)
    )  # fmt: skip
    report = Report.of(outcome(gathers=gathers))
    assert report.hidden == 2
    assert list(report.limits.items()) == [
        *(("memory-limited", 1), ("pinned", 1), ("unmoved", 2), ("novel", 1)),
    ]
    assert Report.of(report) is report
