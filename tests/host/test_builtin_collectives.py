"""Which of torch's ops communicate, as the host says with nothing but the built-ins in the way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed._symmetric_memory
import torch.distributed.tensor

from overlap_core import Communication, Node, NodeKind, register_materialize_inputs
from overlap_core.builtin.collectives import overlap_classify_node
from overlap_core.skeleton.entries import NO_COMMUNICATION

GATHERS = ("", "_out", "_coalesced")


def classify(op: str, kind: NodeKind = NodeKind.OPAQUE, **more: object) -> Communication | None:
    return overlap_classify_node(Node(name="op0", kind=kind, op=op, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", GATHERS)
@pytest.mark.parametrize(
    "form", ["_c10d_functional.{}.default", "_c10d_functional::{}", "c10d_functional.{}"]
)
def test_weight_gathers_can_only_be_launches_of_the_all_gather_family(
    suffix: str, form: str
) -> None:
    op = form.format(f"all_gather_into_tensor{suffix}")
    launched = classify(op, NodeKind.COLLECTIVE, group="5")
    assert launched == Communication(groups=("5",), gather=True)
    assert classify(op, group="5") == Communication(groups=("5",))


@pytest.mark.parametrize(
    "op",
    [
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.all_reduce_.default",
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.broadcast_.default",
        "_dtensor.shard_dim_alltoall.default",
        "torchrec.all_gather_into_tensor.default",
        "symm_mem._low_contention_all_gather.default",
        "mylib.unheard_of.default",
        "not the name of an op",
    ],
)
def test_every_launch_issues_and_only_gathers_gather(op: str) -> None:
    assert classify(op, NodeKind.COLLECTIVE) == Communication()


@pytest.mark.parametrize(
    "op",
    [
        "c10d::send",
        "c10d.recv_.default",
        "c10d::barrier",
        "_c10d_functional.isend.default",
        "_c10d_functional.irecv.default",
        "_c10d_functional.batch_p2p_ops.default",
        "_c10d_functional.all_reduce_.default",
        "_c10d_functional.added_by_a_later_torch.default",
        "_dtensor::shard_dim_alltoall",
        "torchrec.all_to_all_single.default",
        "symm_mem.fused_all_gather_matmul.default",
    ],
)
@pytest.mark.parametrize("kind", [NodeKind.OPAQUE, NodeKind.COMPUTE])
def test_fallback_kernels_that_communicate_issue(op: str, kind: NodeKind) -> None:
    assert classify(op, kind) == Communication()


@pytest.mark.parametrize(
    "op",
    [
        "aten.mm.out",
        "mylib::attn",
        "triton_poi_fused_add_0",
        "",
        "_dtensor::mesh_get_process_group",
    ],
)
@pytest.mark.parametrize("kind", [NodeKind.OPAQUE, NodeKind.COMPUTE])
def test_anything_else_is_left_to_others(op: str, kind: NodeKind) -> None:
    assert classify(op, kind) is None


def test_waits_and_silent_ops_issue_nothing() -> None:
    wait = "_c10d_functional.wait_tensor.default"
    assert classify(wait, NodeKind.WAIT) is NO_COMMUNICATION
    assert classify("_c10d_functional.all_reduce_.default", NodeKind.WAIT) is NO_COMMUNICATION
    assert classify(wait) is NO_COMMUNICATION
    assert classify("c10d::check_for_nan") is NO_COMMUNICATION


def test_opaque_ops_issue_where_the_graph_or_a_registration_says_so() -> None:
    assert classify("mylib::attn", issues_collective=True, group="2") == Communication(groups="2")
    assert classify("colltest::cp") is None
    register_materialize_inputs("colltest::cp", has_internal_collective=True)
    for op in ("colltest::cp", "colltest.cp.default"):
        assert classify(op) == Communication()


def test_every_functional_collective_of_this_torch_is_known() -> None:
    names = torch._C._dispatch_get_all_op_names()
    found = {name for name in names if name.partition("::")[0] == "_c10d_functional"}
    assert len(found) > 10
    silent = {name for name in found if classify(name) in (None, NO_COMMUNICATION)}
    assert silent == {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
    gathers = {name for name in found if (c := classify(name, NodeKind.COLLECTIVE)) and c.gather}
    assert gathers == {f"_c10d_functional::all_gather_into_tensor{suffix}" for suffix in GATHERS}
