"""Coalesced gathers in real compiled models, two and four gloo ranks: no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlap_core as oc
from overlap_core.testing import CollectiveRecorder, shard_module

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

CALL = "allgather_into_tensor_coalesced_"
OUT = {"even": 32, "uneven": 30}
"""Rows of each weight. 30 over 4 ranks leaves the last one fewer, behind equal padding."""


class Layers(nn.Module):
    """Linear layers, of which every second one may be sharded over another mesh."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(out, out) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


@frozen(kw_only=True)
class Seen:
    """What one rank saw of one case."""

    modes: tuple[str, ...]
    calls: tuple[tuple[int, ...], ...]
    """For each graph how many gathers each coalesced call holds."""
    outputs_equal: bool
    gradients_equal: bool
    gradients: int
    before: tuple[Any, ...]
    after: tuple[Any, ...]


def run_case(
    rank: int, world_size: int, out: int, mesh: str, coalesce: int, sharding: dict[str, Any]
) -> Seen:
    meshes = MESHES[mesh]()
    model = Layers(out)
    for number, layer in enumerate(model.layers):
        shard_module(layer, meshes[number % len(meshes)], **sharding)
    x = torch.randn(8, out, dtype=sharding.get("param_dtype", torch.float32))

    def run(**options: Any) -> tuple[torch.Tensor, list[torch.Tensor], tuple[Any, ...]]:
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, **options)
        result = x
        for _ in range(2):
            model.zero_grad()
            with CollectiveRecorder() as recorder:
                result = compiled(x)
                result.float().square().mean().backward()
        gradients = [p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[union-attr]
        return result.detach(), gradients, tuple(recorder.shared())

    expected, expected_gradients, before = run(options={"fx_graph_cache": False})
    config = oc.OverlapConfig(costs="analytical", coalesce=coalesce)
    result, gradients, after = run(options=oc.inductor_options(config))
    reports = oc.reports()
    return Seen(
        modes=tuple(str(report.mode) for report in reports),
        calls=tuple(tuple(len(c.launches) for c in report.coalesced) for report in reports),
        outputs_equal=torch.equal(expected, result),
        gradients_equal=all(map(torch.equal, expected_gradients, gradients)),
        gradients=len(gradients),
        before=before,
        after=after,
    )


def world_mesh() -> tuple[DeviceMesh, ...]:
    return (init_device_mesh("cpu", (dist.get_world_size(),)),)


def both_axes() -> tuple[DeviceMesh, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return mesh["a"], mesh["b"]


MESHES = {"world": world_mesh, "both axes": both_axes}


def check(
    run_on: RunRanks,
    world_size: int,
    *,
    out: int = OUT["even"],
    mesh: str = "world",
    coalesce: int = 1 << 20,
    **sharding: Any,
) -> Seen:
    """No bit differs, the ranks issue the same, and the gathers of each call are one."""
    results: list[Seen] = run_on(
        run_case, world_size, out, mesh, coalesce, sharding, deadline_s=500, tries=3
    )
    for seen in results:
        assert seen.gradients == 8
        assert seen.outputs_equal
        assert seen.gradients_equal
        assert seen.after == results[0].after
        assert seen.calls == results[0].calls
    first = results[0]
    calls = [length for graph in first.calls for length in graph]
    coalesced = [row for row in first.after if row[0] == CALL and len(row[3]) > 2]
    assert sorted(len(row[3]) // 2 for row in coalesced) == sorted(calls)
    assert len(first.before) - len(first.after) == sum(calls) - len(calls)
    return first


@pytest.mark.usefixtures("covered_processes")
def test_all_gathers_of_a_graph_in_one_call(gloo_ranks: RunRanks) -> None:
    seen = check(gloo_ranks, 2)
    assert seen.modes == ("identical", "identical")
    assert seen.calls == ((8,), ())  # nothing is gathered in backward


def test_shards_that_are_cast_before_they_are_gathered(pooled_ranks: RunRanks) -> None:
    seen = check(pooled_ranks, 2, param_dtype=torch.bfloat16)
    assert seen.calls == ((8,), ())


def test_gathers_that_are_repeated_in_backward(pooled_ranks: RunRanks) -> None:
    """Regions of 9,000 bytes hold two weights of 4,096 and what lies between them."""
    forward, backward = check(pooled_ranks, 2, coalesce=9000, reshard_after_forward=True).calls
    assert len(forward) >= 2
    assert backward


def test_calls_hold_gathers_of_one_group(pooled_ranks: RunRanks) -> None:
    """The layers are sharded over the two axes of a mesh in turn."""
    seen = check(pooled_ranks, 4, mesh="both axes")
    assert seen.calls == ((4, 4), ())


def test_uneven_shards_are_padded_alike(pooled_ranks: RunRanks) -> None:
    """30 rows over 4 ranks: the last rank holds fewer, so the ranks' graphs differ."""
    seen = check(pooled_ranks, 4, out=OUT["uneven"])
    assert seen.modes[0] == "slot"
    assert seen.calls[0] == (8,)
