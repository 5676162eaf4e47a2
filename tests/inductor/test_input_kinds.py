"""What is known of a graph's inputs, and that no activation is taken for a weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.testing import shard_module

pytestmark = [
    pytest.mark.slow,
    # Dynamo does so itself, on torch 2.11.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

DIM = 32
AUTOGRAD_GATHER = functional.all_gather_tensor_autograd
REDUCE_SCATTER = functional.reduce_scatter_tensor_autograd


class Parallel(nn.Module):
    """Two layers between a gather of the sequence and its reduce-scatter."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.second = nn.Linear(DIM, DIM, bias=False)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(DIM))
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = AUTOGRAD_GATHER(x.to(self.dtype), 0, dist.group.WORLD)
        x = self.second(torch.relu(self.first(x * self.scale.to(self.dtype))))
        return REDUCE_SCATTER(x, "sum", 0, dist.group.WORLD)


def reports(model: Any, *args: torch.Tensor) -> list[oc.Report]:
    """Of forward and, if it communicates, backward."""
    compiled = torch.compile(model, fullgraph=True, options=oc.inductor_options())
    compiled(*args).sum().backward()
    return oc.reports()


def kinds(report: oc.Report) -> Counter[str]:
    """How many inputs of each kind the graph has."""
    assert report.graph is not None
    found = report.graph.input_kinds
    return Counter(str(found.get(name, "unknown")) for name in report.graph.inputs)


@pytest.mark.parametrize(
    ("options", "dtype", "weights"),
    [({}, None, 2), ({"tied": True}, None, 1), ({"dtype": torch.bfloat16}, torch.bfloat16, 2)],
    ids=["plain", "tied", "cast"],
)
def test_a_module(
    fake_world: None, options: dict[str, Any], dtype: torch.dtype | None, weights: int
) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard_module(Parallel(**options), mesh, param_dtype=dtype, reshard_after_forward=True)
    forward, backward = reports(model, torch.randn(8, DIM, requires_grad=True))
    found = kinds(forward)
    assert found.keys() == {"user", "parameter", "buffer"}
    assert found["user"] == found["buffer"] == 1
    found = kinds(backward)
    assert found["tangent"] == 1
    assert found["user"] >= 1  # activations that were saved
    assert found["unknown"] == 0
    for report in (forward, backward):
        gathers = [e for e in report.skeleton if "all_gather" in e.op]
        assert len(report.gathers) == sum(e.weight_gather for e in gathers) < len(gathers)
    assert len(forward.gathers) >= weights


def test_arguments_are_unknown_where_no_parameter_is_known(gather: Any) -> None:
    x, shard = torch.randn(16, DIM, requires_grad=True), torch.randn(8, DIM)
    [forward] = reports(lambda x, w: x @ gather(w), x, shard)
    assert kinds(forward) == {"unknown": 2}
    assert len(forward.gathers) == 1


def test_a_gathered_argument_of_a_module_is_no_weight(gather: Any) -> None:
    layer = nn.Linear(DIM, DIM)
    [forward] = reports(lambda x: layer(gather(x)), torch.randn(16, DIM))
    assert kinds(forward) == {"parameter": 2, "user": 1}
    assert len(forward.gathers) == 0
