"""Costs at sizes that nobody measured, from sizes that somebody did."""

from __future__ import annotations

import pytest
from attrs import evolve

from overlap_core.costs import Cost, CostRequest, CostSource, request_digest, scale_missing

SMALL = CostRequest(
    kind="opaque",
    op="mylib.attention.default",
    inputs=((1024, 64),),
    input_dtypes=("bfloat16",),
    outputs=((1024, 64),),
    output_dtypes=("bfloat16",),
    device="cuda:NVIDIA H200",
    read_bytes=1024 * 128,
    write_bytes=1024 * 128,
)
MEASURED = Cost(ns=1000, network_ns=400, source=CostSource.MEASURED)


def of_rows(rows: int) -> CostRequest:
    return evolve(
        SMALL,
        inputs=((rows, 64),),
        outputs=((rows, 64),),
        read_bytes=rows * 128,
        write_bytes=rows * 128,
    )


def scaled(request: CostRequest, measured: dict[CostRequest, Cost]) -> Cost | None:
    return scale_missing([request, None], {}, measured).get(request_digest(request))


def test_time_grows_with_bytes() -> None:
    cost = scaled(of_rows(3072), {SMALL: MEASURED})
    assert cost == Cost(
        ns=3000,
        network_ns=1200,
        source=CostSource.ANALYTICAL,
        why="scaled by 3.00 from a measurement at another size",
    )


def test_the_nearest_size_counts() -> None:
    measured = {SMALL: MEASURED, of_rows(4096): evolve(MEASURED, ns=16_000, network_ns=None)}
    near_small, near_large = scaled(of_rows(1100), measured), scaled(of_rows(8192), measured)
    assert near_small is not None
    assert near_large is not None
    assert near_small.ns == round(1000 * 1100 / 1024)
    assert (near_large.ns, near_large.network_ns) == (32_000, None)


@pytest.mark.parametrize(
    "other",
    [
        evolve(SMALL, op="mylib.other.default"),
        evolve(SMALL, kind="compute"),
        evolve(SMALL, device="cpu"),
        evolve(SMALL, group_size=4),
        evolve(SMALL, output_dtypes=("float32",)),
        evolve(SMALL, inputs=((1024, 64), (4,)), input_dtypes=("bfloat16", "int64")),
        evolve(SMALL, read_bytes=None, write_bytes=None),
    ],
)
def test_other_ops_say_nothing(other: CostRequest) -> None:
    assert scaled(of_rows(2048), {other: MEASURED}) is None


def test_what_is_known_is_left_alone() -> None:
    request = of_rows(2048)
    table = {request_digest(request): Cost(why="the replay failed")}
    assert scale_missing([request], table, {SMALL: MEASURED}) == {}
    assert scaled(evolve(request, read_bytes=0, write_bytes=0), {SMALL: MEASURED}) is None
    assert scaled(request, {SMALL: Cost(why="not measured")}) is None
