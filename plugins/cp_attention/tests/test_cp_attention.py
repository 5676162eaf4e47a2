"""The plugin without ranks: installation, hooks, estimates, and the attention of one block."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import overlap_cp_attention
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from overlap_cp_attention import _block, split_sizes
from overlap_cp_attention._names import OPS, TORCH_OPS

import overlap_core as oc
from overlap_core.costs import CostRequest
from overlap_core.errors import ConfigError
from overlap_core.host import PluginHost
from overlap_core.testing import run_torchrun

HOOKS = (
    "overlap_adjust_plan",
    "overlap_classify_node",
    "overlap_measure_cost",
    "overlap_register_ops",
)


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.discover(oc.OverlapConfig())


def test_it_is_installed(host: PluginHost) -> None:
    (point,) = metadata.entry_points(group="overlap_core", name="cp_attention")
    assert point.load() is overlap_cp_attention
    (info,) = (plugin for plugin in host.plugins() if plugin.name == "cp_attention")
    assert info.distribution == "overlap-cp-attention"
    assert info.hooks == HOOKS


def test_listing_it_does_not_load_torch() -> None:
    program = "import sys, overlap_cp_attention; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'zigzag'"):
        _ = overlap_cp_attention.zigzag


@given(st.integers(0, 1000), st.integers(1, 64))
def test_split_sizes(total: int, ranks: int) -> None:
    sizes = split_sizes(total, ranks)
    assert (len(sizes), sum(sizes)) == (ranks, total)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("total", "ranks"), [(-1, 2), (3, 0)])
def test_split_sizes_that_make_no_sense(total: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"total={total}, ranks={ranks}\): expected at least"):
        split_sizes(total, ranks)


@pytest.mark.parametrize("op", [*OPS, *TORCH_OPS])
def test_overlap_register_ops(host: PluginHost, op: str) -> None:
    assert oc.op_has_internal_collective(op)
    assert (oc.get_materialize_inputs_hook(op) is not None) == (op in OPS)


def test_torch_has_no_other_opaque_op_of_context_parallelism() -> None:
    from torch.distributed.tensor.experimental import _attention as _  # noqa: F401

    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("cplib::")}
    assert names == set(TORCH_OPS)


@pytest.mark.parametrize("op", OPS)
def test_replayed_split_sizes_fit_the_tensors(host: PluginHost, op: str) -> None:
    tensors = [torch.zeros(1, 5, 4, 8) for _ in range(5 if "backward" in op else 3)]
    if "backward" in op:
        tensors.append(torch.zeros(1, 4, 5))
    junk = [8192, 0]
    args, kwargs = host.materialize(op, (*tensors, junk, "0", True, None), {})
    assert all(map(torch.equal, args, tensors))
    assert args[len(tensors) :] == ([5, 5], "0", True, None)
    assert kwargs == {}


@pytest.mark.parametrize("op", [*OPS, *TORCH_OPS])
@pytest.mark.parametrize("group", ["7", None])
def test_overlap_classify_node(host: PluginHost, op: str, group: str | None) -> None:
    node = oc.Node(name="op0", kind=oc.NodeKind.OPAQUE, op=f"{op}.default", group=group)
    expected = oc.Communication(groups=() if group is None else (group,))
    assert host.classify(node) == expected
    assert overlap_cp_attention.overlap_classify_node(node) == expected
    assert not expected.gather


def test_other_nodes_are_left_to_others() -> None:
    node = oc.Node(name="op0", kind=oc.NodeKind.OPAQUE, op="overlap_cp.something_else.default")
    assert overlap_cp_attention.overlap_classify_node(node) is None
    assert overlap_cp_attention.overlap_measure_cost(request("aten::mm")) is None


def request(op: str, **changes: Any) -> CostRequest:
    """Attention of 1024 local rows with 8 heads of 64 numbers, on two ranks of CPUs."""
    q, k = (1, 1024, 8, 64), (1, 1024, 8, 64)
    backward = op.endswith("backward")
    inputs = (q, q, k, k, q, (1, 8, 1024)) if backward else (q, k, k)
    values = {
        "kind": "opaque",
        "op": op.replace("::", ".") + ".default",
        "inputs": inputs,
        "input_dtypes": ("float32",) * len(inputs),
        "device": "cpu",
        "group_size": 2,
        **changes,
    }
    return CostRequest(**values)


def test_overlap_measure_cost(host: PluginHost) -> None:
    """By hand, from what `analytical_costs` knows of a CPU: 100 Gflop/s, half of it reached."""
    tensor = 1024 * 8 * 64 * 4  # bytes of q, k, v or output
    hop, per_byte = 150_000, 1.0  # a transfer's ns
    whole = 4 * 4 * 2048 * 2048 * 64 / 50  # ns of 4 heads over all rows
    exchanges = 2 * hop + (3 + 1) * tensor / 2 * per_byte
    ulysses = host.measure_cost(request("overlap_cp::ulysses_attention"))
    assert ulysses is not None
    assert ulysses.network_ns == pytest.approx(exchanges, rel=1e-3)
    assert ulysses.ns == pytest.approx(whole + exchanges, rel=1e-3)

    ring = host.measure_cost(request("overlap_cp::ring_attention"))
    assert ring is not None
    assert ring.network_ns == pytest.approx(hop + 2 * tensor * per_byte, rel=1e-3)
    assert ring.ns == pytest.approx(whole, rel=1e-3)  # the transfer takes less than a block

    for forward, op in ((ulysses, OPS[1]), (ring, OPS[3])):
        backward = host.measure_cost(request(op))
        assert backward is not None
        assert backward.ns is not None
        assert backward.network_ns is not None
        assert backward.ns > 2 * forward.ns
        assert backward.network_ns > forward.network_ns


@pytest.mark.parametrize("op", OPS)
def test_estimates_follow_the_request(op: str) -> None:
    def cost(**changes: Any) -> oc.Cost:
        found = overlap_cp_attention.overlap_measure_cost(request(op, **changes))
        assert found is not None
        assert found.source == "analytical"
        return found

    base = request(op)
    symbolic = tuple((s[0], ("~", s[1]), *s[2:]) for s in base.inputs)
    fewer_heads = tuple(
        (1, 1024, 2, 64) if i - op.endswith("backward") in (1, 2) else s
        for i, s in enumerate(base.inputs)
    )
    assert cost(inputs=symbolic) == cost()
    assert cost(inputs=fewer_heads).network_ns < cost().network_ns
    assert cost(group_size=4).network_ns > cost().network_ns
    assert cost(group_size=1).network_ns == 0
    assert cost(device="cuda:NVIDIA H200").ns < cost().ns
    assert cost(input_dtypes=("bfloat16",) * len(base.inputs)).network_ns < cost().network_ns


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": None},
        {"inputs": ()},
        {"inputs": ((1, ("~", None), 8, 64),) * 6},
        {"inputs": ((4, 64),) * 6},
        {"input_dtypes": ("no_such_type",)},
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_no_estimate_where_the_request_says_too_little(op: str, changes: dict[str, Any]) -> None:
    assert overlap_cp_attention.overlap_measure_cost(evolve(request(op), **changes)) is None


def block(dtype: torch.dtype, rows: int, columns: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, rows, 16), (2, 2, columns, 16), (2, 2, columns, 16), (2, 4, rows, 16))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("rows", "columns", "causal"), [(5, 7, False), (6, 6, True), (1, 1, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_written_out_formula_is_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    causal: bool,
    scale: float | None,
) -> None:
    q, k, v, grad = block(dtype, rows, columns)
    fused = _block.attend(q, k, v, causal, scale)
    fused_grads = _block.attend_backward(grad, q, k, v, *fused, causal, scale)
    monkeypatch.setattr(_block, "_is_on_cpu", lambda q, k: False)
    plain = _block.attend(q, k, v, causal, scale)
    plain_grads = _block.attend_backward(grad, q, k, v, *fused, causal, scale)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for got, expected in zip((*plain, *plain_grads), (*fused, *fused_grads), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_empty_blocks_do_not_end_the_process() -> None:
    q, k, v, grad = block(torch.float32, 0, 0)
    out, lse = _block.attend(q, k, v, True, None)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 0))
    grads = _block.attend_backward(grad, q, k, v, out, lse, True, None)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert math.prod(grads[0].shape) == 0


@pytest.mark.full
@pytest.mark.ranks
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    status, output, errors = run_torchrun(script)
    if status and re.search(r"exitcode +: -(6|7|11)", errors):
        # gloo's memory fault, as `run_ranks` describes it.
        status, output, errors = run_torchrun(script)
    assert status == 0, errors
    # Forward and backward on two ranks, whose lines may run into each other.
    assert output.count("identical") == 4, output
