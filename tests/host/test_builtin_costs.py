"""Analytical costs: right in order of magnitude, monotonic, and None where nothing is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.builtin.costs import overlap_measure_cost
from overlap_core.costs.types import Cost, CostRequest

H200 = "cuda:NVIDIA H200"
DEVICES = ("cpu", H200, "cuda:NVIDIA H100 80GB HBM3", "cuda:NVIDIA A100-SXM4-40GB", "cuda:new", "")
GATHER = "_c10d_functional.all_gather_into_tensor.default"


def mm(m: Any, k: Any, n: Any, dtype: str = "bfloat16", **more: Any) -> CostRequest:
    values: dict[str, Any] = {
        "kind": "compute",
        "op": "aten.mm.out",
        "inputs": ((m, k), (k, n)),
        "input_dtypes": (dtype, dtype),
        "outputs": ((m, n),),
        "output_dtypes": (dtype,),
        "device": H200,
        **more,
    }
    return CostRequest(**values)


def ns(request: CostRequest) -> int:
    answer = overlap_measure_cost(request)
    assert answer is not None
    found = answer.ns if isinstance(answer, Cost) else answer
    assert found is not None
    return found


def gather(nbytes: int, ranks: int | None = 2, device: str = H200, op: str = GATHER) -> int:
    return ns(CostRequest(kind="collective", op=op, nbytes=nbytes, group_size=ranks, device=device))


@pytest.mark.parametrize(
    ("request_", "low_us", "high_us"),
    [
        # Known from measurements on such devices, with a wide margin on both sides.
        (mm(8192, 3072, 14336), 700, 1600),
        (mm(8192, 3072, 14336, "float8_e4m3fn"), 350, 900),
        (mm(1024, 1024, 1024, "float32", device="cpu"), 2_150, 215_000),
        (mm(64, 64, 64, "float32", device="cpu"), 1.4, 140),
    ],
)
def test_matrix_products_have_the_right_magnitude(
    request_: CostRequest, low_us: float, high_us: float
) -> None:
    assert low_us <= ns(request_) / 1e3 <= high_us


def test_memory_bound_nodes_follow_the_bytes() -> None:
    def add(nbytes: int, device: str) -> float:
        request = CostRequest(
            kind="compute",
            op="triton_poi_fused_add_0",
            read_bytes=2 * nbytes,
            write_bytes=nbytes,
            device=device,
        )
        return ns(request) / 1e3

    assert 25 <= add(50_331_648, H200) <= 100
    assert 8 <= add(4 << 20, "cpu") <= 8_000
    assert add(0, H200) < 5


def test_gathers_have_the_right_magnitude() -> None:
    assert 100e3 <= gather(88_080_384) <= 400e3
    assert 5e3 <= gather(1) <= 40e3
    assert 900e3 <= gather(16 << 20, 2, "cpu") <= 90e6
    assert 24e3 <= gather(4096, 2, "cpu") <= 2.4e6


def test_other_collectives_carry_their_own_traffic() -> None:
    size, ranks = 1 << 28, 8

    def of(op: str) -> int:
        return gather(size, ranks, op=f"_c10d_functional.{op}.default")

    assert of("all_reduce_") == pytest.approx(2 * gather(size, ranks), rel=0.1)
    assert of("reduce_scatter_tensor") == pytest.approx(ranks * gather(size, ranks), rel=0.1)
    assert of("broadcast_") > gather(size, ranks)


@pytest.mark.parametrize(
    "request_",
    [
        CostRequest(kind="wait", op="_c10d_functional.wait_tensor.default", write_bytes=1 << 30),
        CostRequest(kind="compute", op="aten.view.default", write_bytes=1 << 30),
        CostRequest(kind="compute", op="multi_output", write_bytes=1 << 30),
        CostRequest(kind="collective", op=GATHER, nbytes=1 << 30, group_size=1),
    ],
)
def test_waits_views_and_groups_of_one_cost_nothing(request_: CostRequest) -> None:
    assert overlap_measure_cost(request_) == 0


@pytest.mark.parametrize(
    "request_",
    [
        CostRequest(kind="compute", op="triton_poi_fused_add_0"),
        CostRequest(kind="opaque", op="mylib::attn", outputs=((("~", None), 4),)),
        CostRequest(kind="collective", op=GATHER, group_size=2),
    ],
)
def test_none_where_nothing_is_known(request_: CostRequest) -> None:
    assert overlap_measure_cost(request_) is None


def test_symbolic_dimensions_count_by_their_hint() -> None:
    assert ns(mm(("~", 8192), 3072, 14336)) == ns(mm(8192, 3072, 14336))
    assert overlap_measure_cost(mm(("~", None), 3072, 14336)) is None


@pytest.mark.parametrize(
    ("inputs", "op"),
    [
        (((8192, 3072),), "aten.mm.out"),
        (((3072, 14336),), "aten.mm.out"),
        (((14336,), (8192, 3072), (3072, 14336)), "aten.addmm.out"),
        (((8192, 14336), (8192, 3072), (3072, 14336)), "aten.addmm.out"),
        (((8192, 3072), (14336, 3072)), "aten.linear.default"),
        (((8192, 3072), (3072, 14336), (1, 1), (1, 1)), "aten._scaled_mm.default"),
    ],
)
def test_one_factor_of_a_product_is_enough(inputs: Any, op: str) -> None:
    request = mm(8192, 3072, 14336, op=op, inputs=inputs, input_dtypes=("bfloat16",) * len(inputs))
    assert ns(request) == ns(mm(8192, 3072, 14336))


def test_batches_convolutions_and_attention_are_counted() -> None:
    batch = mm(4, 5, 6, op="aten.bmm.out", inputs=((8, 1024, 512), (8, 512, 1024)))
    batch = mm(4, 5, 6, op="aten.bmm.out", inputs=batch.inputs, outputs=((8, 1024, 1024),))
    assert ns(batch) == ns(mm(8 * 1024, 512, 1024))
    convolution = mm(
        4,
        5,
        6,
        op="aten.convolution.default",
        inputs=((2, 64, 130, 130), (256, 64, 3, 3)),
        outputs=((2, 256, 128, 128),),
    )
    assert ns(convolution) == ns(mm(2 * 128 * 128, 64 * 9, 256))
    shape = (1, 24, 8192, 128)
    attention = mm(
        4,
        5,
        6,
        op="aten._scaled_dot_product_flash_attention.default",
        inputs=(shape,) * 3,
        input_dtypes=("bfloat16",) * 3,
        outputs=(shape,),
    )
    assert 800e3 <= ns(attention) <= 4e6


def test_an_opaque_op_with_a_group_adds_its_communication() -> None:
    def op(group_size: int | None) -> int:
        return ns(
            CostRequest(
                kind="opaque",
                op="mylib::attn_cp",
                flops=10**12,
                write_bytes=1 << 26,
                group_size=group_size,
                device=H200,
            )
        )

    assert op(None) == op(1) < op(2) < op(8)


@given(
    st.sampled_from(DEVICES),
    st.integers(0, 1 << 34),
    st.integers(0, 1 << 34),
    st.integers(2, 4096),
)
def test_more_bytes_and_more_ranks_never_cost_less(
    device: str, small: int, more: int, ranks: int
) -> None:
    assert gather(small, ranks, device) <= gather(small + more, ranks, device)
    assert gather(small, ranks, device) <= gather(small, ranks + 1, device)
    low, high = (
        ns(CostRequest(kind="compute", op="f", write_bytes=size, device=device))
        for size in (small, small + more)
    )
    assert 0 < low <= high


@given(st.sampled_from(DEVICES), st.sampled_from(["float32", "bfloat16", "float8_e5m2", "int64"]))
def test_every_device_and_dtype_has_an_answer(device: str, dtype: str) -> None:
    assert ns(mm(128, 128, 128, dtype, device=device)) > 0
