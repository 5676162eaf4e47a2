"""What needs one process only: hooks, routing, costs, and the ops in a world of one."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import overlap_ep_moe
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from overlap_ep_moe import (
    ExpertParallelMoE,
    assign_slots,
    expert_capacity,
    mixture_of_experts,
    route,
    sorted_positions,
)
from overlap_ep_moe._replay import COMMUNICATING, MATERIALIZE
from torch.library import opcheck

from overlap_core import Communication, Node, NodeKind, OverlapConfig, op_has_internal_collective
from overlap_core.costs.types import CostRequest
from overlap_core.errors import ConfigError
from overlap_core.host import PluginHost
from overlap_core.inductor.intercept import SilentCollectives

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPS = torch.ops.overlap_ep


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost.discover(OverlapConfig(), plugins=[overlap_ep_moe], environ={})


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    """Name of a gloo group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_it_is_installed() -> None:
    (point,) = metadata.entry_points(group="overlap_core", name="ep_moe")
    assert point.load() is overlap_ep_moe
    (info,) = (p for p in PluginHost.discover(OverlapConfig()).plugins() if p.name == point.name)
    assert info.distribution == "overlap-ep-moe"
    assert info.hooks == ("overlap_classify_node", "overlap_measure_cost", "overlap_register_ops")


def test_listing_it_does_not_load_torch() -> None:
    program = "import sys, overlap_ep_moe; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_every_public_name_loads() -> None:
    assert all(getattr(overlap_ep_moe, name) is not None for name in overlap_ep_moe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'dispatcher'"):
        _ = overlap_ep_moe.dispatcher  # type: ignore[attr-defined]


def test_overlap_register_ops(host: PluginHost) -> None:
    for name in COMMUNICATING:
        assert op_has_internal_collective(name)
    for name in MATERIALIZE.keys() - COMMUNICATING:
        assert not op_has_internal_collective(name)


def test_the_tables_name_ops_that_exist() -> None:
    for name in {*COMMUNICATING, *MATERIALIZE}:
        assert hasattr(OPS, name.removeprefix("overlap_ep::"))


@pytest.mark.parametrize("op", sorted({*COMMUNICATING, *MATERIALIZE}))
def test_overlap_classify_node(host: PluginHost, op: str) -> None:
    written = op.replace("::", ".") + ".default"
    node = Node(name="op1", kind=NodeKind.OPAQUE, op=written, group="7", group_ranks=(0, 1))
    answer = host.classify(node)
    if op in COMMUNICATING:
        assert answer == Communication(groups=("7",))
    else:
        assert answer == Communication(issues=False)


def test_other_ops_are_left_to_others() -> None:
    node = Node(name="op1", kind=NodeKind.OPAQUE, op="theirlib.dispatch.default")
    assert overlap_ep_moe.overlap_classify_node(node) is None
    request = CostRequest(kind="opaque", op="theirlib.dispatch.default", inputs=((8, 4),))
    assert overlap_ep_moe.overlap_measure_cost(request) is None


def request(op: str, *inputs: Any, dtype: str = "bfloat16", **more: Any) -> CostRequest:
    return CostRequest(
        kind="opaque",
        op=f"overlap_ep.{op}.default",
        inputs=inputs,
        input_dtypes=(dtype, "int64"),
        device="cuda:NVIDIA H200",
        **more,
    )


def test_overlap_measure_cost_of_an_exchange(host: PluginHost) -> None:
    """16 MiB, of which 7 of 8 ranks' parts travel at 250 GB/s."""
    cost = host.measure_cost(request("combine", (4096, 2048), (2, 8, 4), group_size=8))
    assert cost is not None
    assert cost.network_ns == math.ceil(20_000 + 4096 * 2048 * 2 * 7 / 8 / 250e9 * 1e9)
    assert cost.ns is not None
    assert cost.ns > cost.network_ns


def test_a_dispatch_sends_each_token_top_k_times_and_the_counts(host: PluginHost) -> None:
    def network_ns(op: str, *inputs: Any) -> int:
        cost = host.measure_cost(request(op, *inputs, group_size=8))
        assert cost is not None
        assert cost.network_ns is not None
        return cost.network_ns

    combined = network_ns("combine", (8192, 512), (2, 8, 4))
    dispatched = network_ns("dispatch", (("~", 4096), 512), (("~", 4096), 2))
    assert dispatched == combined + 20_000


def test_a_group_of_one_needs_no_network(host: PluginHost) -> None:
    cost = host.measure_cost(request("dispatch_padded", (8, 16, 32), group_size=1))
    assert cost is not None
    assert cost.network_ns == 0
    assert cost.ns


def test_overlap_measure_cost_of_the_experts(host: PluginHost) -> None:
    """2 * 8192 * 2048 * 4096 operations at 600 TFLOPS take 229 µs; float32 takes twice that."""
    shapes = (8192, 2048), (8, 2048, 4096), (8,)
    half, single = (
        host.measure_cost(request("grouped_mm", *shapes, dtype=dtype))
        for dtype in ("bfloat16", "float32")
    )
    assert half is not None
    assert single is not None
    arithmetic = 2 * 8192 * 2048 * 4096 / 600e12 * 1e9
    assert half.ns == math.ceil(3_000 + arithmetic)
    assert single.ns == math.ceil(3_000 + 2 * arithmetic)


@pytest.mark.parametrize("op", ["dispatch", "combine", "grouped_mm"])
def test_a_size_without_a_hint_has_no_cost_of_ours(op: str) -> None:
    shapes = (("~", None), 64), (8, 64, 64), (8,)
    assert overlap_ep_moe.overlap_measure_cost(request(op, *shapes)) is None
    assert overlap_ep_moe.overlap_measure_cost(request(op)) is None


ids = st.integers(0, 20).flatmap(
    lambda tokens: st.integers(1, 3).flatmap(
        lambda top_k: st.lists(
            st.integers(0, 5), min_size=tokens * top_k, max_size=tokens * top_k
        ).map(lambda flat: torch.tensor(flat, dtype=torch.int64).view(tokens, top_k))
    )
)


@given(ids)
def test_sorted_positions_is_where_a_stable_sort_puts_it(expert_ids: torch.Tensor) -> None:
    flat = expert_ids.flatten().tolist()
    expected = sorted(range(len(flat)), key=lambda place: flat[place])
    found = sorted_positions(expert_ids).flatten().tolist()
    assert [found[place] for place in expected] == list(range(len(flat)))


@given(ids, st.integers(1, 4))
def test_slots_are_given_in_order_and_never_twice(expert_ids: torch.Tensor, capacity: int) -> None:
    taken: dict[int, int] = {}
    expected = []
    for expert in expert_ids.flatten().tolist():
        slot = taken[expert] = taken.get(expert, -1) + 1
        expected.append(expert * capacity + slot if slot < capacity else 6 * capacity)
    assert assign_slots(expert_ids, 6, capacity).flatten().tolist() == expected


def test_routing_weights() -> None:
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]])
    weights, expert_ids = route(logits, 2)
    assert expert_ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[5 / 7, 2 / 7]]))
    weights, _ = route(logits, 1)
    torch.testing.assert_close(weights, torch.tensor([[5 / 8]]))


def test_the_capacity_factor() -> None:
    assert expert_capacity(tokens=100, num_experts=8, top_k=2, factor=1.0) == 25
    assert expert_capacity(tokens=100, num_experts=8, top_k=2, factor=1.25) == 32


def test_the_reference_is_a_weighted_sum_over_experts() -> None:
    x, router = torch.randn(7, 4), torch.randn(3, 4)
    up, down = torch.randn(3, 4, 5), torch.randn(3, 5, 4)
    weights, expert_ids = route(x @ router.t(), 2)
    expected = torch.zeros(7, 4)
    for token in range(7):
        for choice in range(2):
            expert = int(expert_ids[token, choice])
            y = torch.nn.functional.silu(x[token] @ up[expert]) @ down[expert]
            expected[token] += weights[token, choice] * y
    torch.testing.assert_close(mixture_of_experts(x, router, up, down, 2), expected)


def test_the_reference_drops_beyond_the_capacity() -> None:
    x, router = torch.ones(5, 2), torch.eye(2) * torch.tensor([[1.0], [-1.0]])
    up, down = torch.randn(2, 2, 3), torch.randn(2, 3, 2)
    out = mixture_of_experts(x, router, up, down, 1, capacity=2)
    assert (out[:2] != 0).all()
    assert (out[2:] == 0).all()


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


# On torch 2.14 `opcheck` itself reads gradients of tensors that are no leaves.
opcheck_reads_gradients = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@opcheck_reads_gradients
@pytest.mark.parametrize(
    "op",
    ["dispatch", "combine", "combine_backward", "dispatch_padded", "combine_padded"],
)
def test_opcheck_of_the_exchanges(group: str, op: str) -> None:
    expert_ids = torch.tensor([[0, 2], [3, 0], [2, 1]])
    counts = torch.tensor([2, 1, 2, 1]).expand(2, 1, 4).contiguous()
    args = {
        "dispatch": (grad(3, 8), expert_ids, 4, 4, group),
        "combine": (grad(6, 8), counts, group),
        "combine_backward": (torch.randn(6, 8), counts, 6, group),
        "dispatch_padded": (grad(4, 3, 8), 4, group),
        "combine_padded": (grad(4, 3, 8), 4, group),
    }[op]
    opcheck(getattr(OPS, op).default, args)


@opcheck_reads_gradients
def test_opcheck_of_the_grouped_matmuls() -> None:
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    opcheck(OPS.grouped_mm.default, (grad(6, 8), grad(3, 8, 5), ends))
    opcheck(OPS.grouped_mm_weight.default, (torch.randn(6, 8), torch.randn(6, 5), ends))


def test_an_expert_that_does_not_exist_is_refused(group: str) -> None:
    with pytest.raises(ValueError, match=r"expert_ids go up to 4; there are 4 experts"):
        OPS.dispatch(torch.randn(1, 8), torch.tensor([[4]]), 4, 4, group)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 5}, "top_k=5: expected 1 to num_experts=4"),
        ({"top_k": 0}, "top_k=0: expected 1 to num_experts=4"),
        ({"capacity": 0}, "capacity=0: expected at least 1, or None"),
    ],
)
def test_a_module_that_cannot_be(group: str, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertParallelMoE(8, 8, 4, **{"top_k": 1, **arguments})  # type: ignore[arg-type]


def test_a_module_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match="call init_process_group"):
        ExpertParallelMoE(8, 8, 4, 1)


def generic_arguments(op: str, ranks: int, group: str) -> tuple[Any, ...]:
    """Right shapes, zeros for integers: what a replay has before the hooks are asked."""
    experts, local = 3 * ranks, 3
    counts = torch.zeros(2, ranks, local, dtype=torch.int64)
    ends = torch.zeros(local, dtype=torch.int32)
    arguments: dict[str, tuple[Any, ...]] = {
        "dispatch": (torch.randn(11, 8), torch.zeros(11, 2).long(), experts, local, group),
        "combine": (torch.randn(50, 8), counts, group),
        "combine_backward": (torch.randn(22, 8), counts, 50, group),
        "dispatch_padded": (torch.randn(experts, 5, 8), local, group),
        "combine_padded": (torch.randn(local, 5 * ranks, 8), experts, group),
        "grouped_mm": (torch.randn(50, 8), torch.randn(local, 8, 4), ends),
        "grouped_mm_weight": (torch.randn(50, 8), torch.randn(50, 4), ends),
    }
    return arguments[op]


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
@pytest.mark.parametrize("op", sorted(MATERIALIZE))
def test_materialized_arguments_keep_all_shapes_and_types(
    host: PluginHost, op: str, ranks: int
) -> None:
    given = generic_arguments(op.removeprefix("overlap_ep::"), ranks, "0")
    made, _ = host.materialize(op, given, {})
    for old, new in zip(given, made, strict=True):
        if isinstance(old, torch.Tensor):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
        else:
            assert old == new


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("op", sorted({*COMMUNICATING, *MATERIALIZE}))
def test_ops_survive_a_rehearsal_without_communication(
    host: PluginHost, group: str, op: str, ranks: int
) -> None:
    """Nothing arrives, counts neither, and shapes come out as if all ranks sent alike."""
    name = op.removeprefix("overlap_ep::")
    made, _ = host.materialize(op, generic_arguments(name, ranks, group), {})
    with SilentCollectives() as silent:
        out = getattr(OPS, name)(*made)
    assert len(silent.issued) == {"dispatch": 2}.get(name, op in COMMUNICATING)
    rows = out[0] if name == "dispatch" else out
    expected = {
        "dispatch": (24, 8),  # 22 rows don't divide by the experts: the first get one more
        "combine": (50 // ranks * ranks, 8),  # as many as divide by the ranks
        "combine_backward": (50, 8),
        "dispatch_padded": (3, 5 * ranks, 8),
        "combine_padded": (3 * ranks, 5, 8),
        "grouped_mm": (50, 4),
        "grouped_mm_weight": (3, 8, 4),
    }[name]
    assert tuple(rows.shape) == expected
