"""Structural keys are equal if and only if what they describe is."""

from __future__ import annotations

from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.costs import (
    Cost,
    CostRequest,
    CostSource,
    apply_measurements,
    key_from_json,
    key_to_json,
    request_digest,
)

dims = st.integers(0, 64) | st.tuples(st.just("~"), st.none() | st.integers(0, 64))
shapes = st.lists(st.lists(dims, max_size=3).map(tuple), max_size=2).map(tuple)
names = st.sampled_from(["bfloat16", "float32", "int64"])
requests = st.builds(
    CostRequest,
    kind=st.sampled_from(["compute", "collective", "opaque"]),
    op=st.sampled_from(["aten.mm.out", "mylib::attn", "fused:aten.relu.default"]),
    inputs=shapes,
    input_dtypes=st.lists(names, max_size=2).map(tuple),
    outputs=shapes,
    output_dtypes=st.lists(names, max_size=2).map(tuple),
    device=st.sampled_from(["cpu", "cuda:NVIDIA H200"]),
    group_size=st.none() | st.integers(1, 8),
    nbytes=st.none() | st.integers(0, 100),
    node=st.text(max_size=3),
)


@given(requests, requests)
def test_digests_are_equal_if_and_only_if_keys_are(a: CostRequest, b: CostRequest) -> None:
    same = {k: v for k, v in asdict(a).items() if k != "node"} == {
        k: v for k, v in asdict(b).items() if k != "node"
    }
    assert (request_digest(a) == request_digest(b)) == same
    assert (a == b) == same


@given(requests)
def test_the_asking_node_is_no_part_of_a_key(request: CostRequest) -> None:
    assert request_digest(request) == request_digest(evolve(request, node="another"))


@given(requests)
def test_keys_survive_json(request: CostRequest) -> None:
    assert key_from_json(key_to_json(request)) == request


def test_a_symbolic_dimension_is_not_the_number_of_its_hint() -> None:
    static = CostRequest(kind="compute", op="aten.mm.out", outputs=((16, 4),))
    dynamic = evolve(static, outputs=((("~", 16), 4),))
    assert request_digest(static) != request_digest(dynamic)


def test_measured_costs_replace_estimates_and_reasons_stay() -> None:
    known = CostRequest(kind="compute", op="aten.mm.out")
    failed = evolve(known, op="mylib::attn")
    free = Cost(ns=0, source=CostSource.ANALYTICAL)
    guess = Cost(ns=5, source=CostSource.ANALYTICAL)
    measured = Cost(ns=7, source=CostSource.MEASURED)
    table = {request_digest(known): measured, request_digest(failed): Cost(why="it raised")}
    result = apply_measurements(
        (guess, guess, free, guess), (known, failed, None, evolve(known, op="other")), table
    )
    assert result == (measured, evolve(guess, why="it raised"), free, guess)
