"""Float8 and fp4 tensors, and replays of torch's scaled matmul with them."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import overlap_float8_replay
import pytest
import torch
from overlap_float8_replay import _tensors

from overlap_core import OverlapConfig
from overlap_core.host import PluginHost
from overlap_core.replay.types import TensorSpec

FLOAT8 = sorted(
    name
    for name in dir(torch)
    if name.startswith("float8_") and isinstance(getattr(torch, name), torch.dtype)
)
MATMUL = [name for name in FLOAT8 if name != "float8_e8m0fnu"]
FP4 = "float4_e2m1fn_x2"
needs_fp4 = pytest.mark.skipif(not hasattr(torch, FP4), reason=f"this torch has no {FP4}")
needs_e8m0 = pytest.mark.skipif(
    not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no float8_e8m0fnu"
)
LAYOUTS = {
    "row-major": ((48, 32), (32, 1)),
    "column-major": ((48, 32), (1, 48)),
    "padded rows": ((48, 32), (40, 1)),
    "expanded": ((48, 32), (0, 1)),
    "three dimensions": ((2, 3, 16), (1, 32, 2)),
    "one row": ((1, 16), (999, 1)),
    "scalar": ((), ()),
    "empty": ((0, 16), (16, 1)),
}


def spec(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(shape=shape, stride=stride, dtype=dtype, device="cpu")


def realize(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    made = host().realize_tensor(spec(dtype, shape, stride))
    assert made is not None
    return made


def host() -> PluginHost:
    return PluginHost.discover(OverlapConfig(), plugins=[overlap_float8_replay], environ={})


def scaled_mm(*args: object, **kwargs: object) -> torch.Tensor:
    """torch's scaled matmul, or a skip where this build has no kernel for the dtype."""
    try:
        result: torch.Tensor = torch.ops.aten._scaled_mm.default(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this build's _scaled_mm: {str(error).splitlines()[0]}")
    return result


def test_it_is_installed() -> None:
    (point,) = metadata.entry_points(group="overlap_core", name="float8_replay")
    assert point.load() is overlap_float8_replay
    (info,) = (p for p in PluginHost.discover(OverlapConfig()).plugins() if p.name == point.name)
    assert info.distribution == "overlap-float8-replay"
    assert info.hooks == ("overlap_materialize_inputs", "overlap_realize_tensor")


def test_listing_it_does_not_load_torch() -> None:
    program = "import sys, overlap_float8_replay; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_this_torch_has_the_usual_dtypes() -> None:
    assert {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"} <= {*FLOAT8}


@pytest.mark.parametrize("dtype", FLOAT8)
def test_generic_noise_cannot_make_it(dtype: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="not implemented"):
        torch.randn(4, dtype=getattr(torch, dtype))


@needs_fp4
def test_packed_fp4_cannot_be_cast_into() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="not implemented"):
        torch.randn(4).to(getattr(torch, FP4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_overlap_realize_tensor(dtype: str, layout: str) -> None:
    shape, stride = LAYOUTS[layout]
    made = realize(dtype, shape, stride)
    assert (made.dtype, made.device.type) == (getattr(torch, dtype), "cpu")
    assert (tuple(made.shape), made.stride()) == (shape, stride)
    assert made.float().isfinite().all()


@pytest.mark.parametrize("dtype", MATMUL)
def test_values_are_noise_of_both_signs(dtype: str) -> None:
    values = realize(dtype, (128, 64), (64, 1)).float()
    assert len(values.unique()) > 30
    assert abs(values.mean()) < 0.1
    assert 0.8 < values.std() < 1.2


@needs_e8m0
def test_e8m0_holds_powers_of_two_near_one() -> None:
    values = realize("float8_e8m0fnu", (128, 64), (64, 1)).float()
    assert values.unique().tolist() == [0.25, 0.5, 1.0, 2.0, 4.0]


@needs_fp4
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_fp4_has_random_bits(layout: str) -> None:
    shape, stride = LAYOUTS[layout]
    made = realize(FP4, shape, stride)
    assert made.dtype == getattr(torch, FP4)
    assert (tuple(made.shape), made.stride()) == (shape, stride)
    assert layout != "row-major" or len(made.view(torch.uint8).unique()) > 200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_made_up", "float4_no"])
def test_other_dtypes_are_left_to_others(dtype: str) -> None:
    made = overlap_float8_replay.overlap_realize_tensor(spec(dtype, (2,), (1,)))
    assert made is None


@pytest.mark.parametrize("dtype", FLOAT8)
def test_values_depend_on_the_spec_alone(dtype: str) -> None:
    state = torch.random.get_rng_state()
    first, second = (realize(dtype, (8, 4), (4, 1)).float() for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, realize(dtype, (8, 4), (1, 8)).float())


@pytest.mark.parametrize("dtype", [*FLOAT8, pytest.param(FP4, marks=needs_fp4)])
def test_deterministic_algorithms_may_be_on(dtype: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert realize(dtype, (8, 4), (1, 8)).stride() == (1, 8)
    finally:
        torch.use_deterministic_algorithms(False)


def test_large_tensors_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    fill = _tensors._fill_noise

    def record(part: torch.Tensor, generator: torch.Generator) -> None:
        drawn.append(part.numel())
        fill(part, generator)

    monkeypatch.setattr(_tensors, "_CHUNK", 1000)
    monkeypatch.setattr(_tensors, "_fill_noise", record)
    values = realize("float8_e4m3fn", (64, 40), (1, 64)).float()
    assert drawn == [1000, 1000, 560]
    assert 0.8 < values.std() < 1.2


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("second", MATMUL)
@pytest.mark.parametrize("first", MATMUL)
def test_overlap_materialize_inputs_for_scaled_mm(first: str, second: str, scaling: str) -> None:
    found = PluginHost.discover(OverlapConfig(), plugins=[overlap_float8_replay], environ={})
    shapes = {"tensor": ((), ()), "row": ((32, 1), (1, 16))}[scaling]
    left = realize(first, (32, 64), (64, 1))
    right = realize(second, (64, 16), (1, 64))
    scales = [-torch.ones(shape) for shape in shapes]
    args, kwargs = found.materialize(
        "aten::_scaled_mm", (left, right, *scales), {"out_dtype": torch.bfloat16}
    )
    assert args[0] is left
    assert args[1] is right
    assert right.stride() == (1, 64)
    for scale, generic in zip(args[2:], scales, strict=True):
        assert (scale.shape, scale.dtype) == (generic.shape, torch.float32)
        assert ((scale >= 0.5) & (scale <= 1.5)).all()
    result = scaled_mm(*args, **kwargs)
    assert (tuple(result.shape), result.dtype) == ((32, 16), torch.bfloat16)
    exact = (left.float() * args[2]) @ (right.float() * args[3])
    torch.testing.assert_close(result.float(), exact, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize(
    "op_name", ["aten::_scaled_mm", "aten._scaled_mm.default", "torch.ops.aten._scaled_mm.out"]
)
def test_every_way_to_write_the_op_is_understood(op_name: str) -> None:
    args, kwargs = host().materialize(
        op_name, (1, 2, -torch.ones(()), -torch.ones(()), None), {"scale_result": -torch.ones(())}
    )
    assert args[:2] == (1, 2)
    assert args[4] is None
    assert min(args[2], args[3], kwargs["scale_result"]) > 0


@pytest.mark.parametrize("op_name", sorted(overlap_float8_replay._SCALES))
def test_positions_are_those_of_torch(op_name: str) -> None:
    packet = getattr(torch.ops.aten, op_name.removeprefix("aten::"), None)
    if packet is None:
        pytest.skip(f"this torch has no {op_name}")
    names = [argument.name for argument in packet.default._schema.arguments]
    expected = {name: i for i, name in enumerate(names) if name.startswith("scale_")}
    assert overlap_float8_replay._SCALES[op_name] == expected


def test_lists_of_scales_and_block_scales_keep_their_form() -> None:
    blocks = -torch.ones(4, 8).t()
    small = blocks.to(torch.float8_e4m3fn)
    args, _ = host().materialize("aten::_scaled_mm_v2", (0, 0, [blocks, small], [0], [0], ()), {})
    assert isinstance(args[2], list)
    for made, generic in zip(args[2], (blocks, small), strict=True):
        assert (made.dtype, made.stride()) == (generic.dtype, generic.stride())
        assert (made.float() > 0).all()
    assert args[3:] == ([0], [0], ())


def test_ops_of_other_libraries_keep_what_they_got() -> None:
    given = (realize("float8_e4m3fn", (16, 16), (16, 1)), -torch.ones(()))
    args, kwargs = host().materialize("theirlib::float8_linear", given, {"scale_a": given[1]})
    assert all(made is generic for made, generic in zip(args, given, strict=True))
    assert kwargs["scale_a"] is given[1]


def test_a_registered_function_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(op_name: str) -> object:
        return lambda *args: None

    monkeypatch.setattr(overlap_float8_replay, "get_materialize_inputs_hook", hook)
    scales: tuple[Any, ...] = (0, 0, torch.ones(()), torch.ones(()))
    answer = overlap_float8_replay.overlap_materialize_inputs("aten::_scaled_mm", scales, {})
    assert answer is None


def test_an_op_of_another_library_replays_on_realized_tensors() -> None:
    name = "overlap_float8_replay_test::dequantize"

    @torch.library.custom_op(name, mutates_args=())
    def dequantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.float() * scale

    args, _ = host().materialize(
        name, (realize("float8_e5m2", (16, 8), (8, 1)), torch.ones(())), {}
    )
    assert dequantize(*args).isfinite().all()


def test_the_examples_of_the_readme_run() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    _, *blocks = readme.split("```python\n")
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block.partition("```")[0]], check=True, timeout=300)
