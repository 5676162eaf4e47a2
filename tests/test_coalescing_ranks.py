"""Coalesced gathers in real compiled models, two and four gloo ranks: no bit changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlap_core as oc
from overlap_core.session import session
from overlap_core.testing import CollectiveRecorder, run_ranks, shard_module

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

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
    out: int, meshes: tuple[DeviceMesh, ...], plan_dir: str, coalesce: str | int, **sharding: Any
) -> Seen:
    torch.manual_seed(0)
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
    config = oc.OverlapConfig(costs="analytical", coalesce=coalesce, plan_dir=plan_dir)
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


def run_cases(rank: int, world_size: int) -> dict[str, Seen]:
    if world_size == 2:
        meshes: tuple[DeviceMesh, ...] = (init_device_mesh("cpu", (2,)),)
        cases: dict[str, dict[str, Any]] = {
            "even": {"out": OUT["even"], "coalesce": 1 << 20},
            "cast": {"out": OUT["even"], "coalesce": 1 << 20, "param_dtype": torch.bfloat16},
            "again": {"out": OUT["even"], "coalesce": 9000, "reshard_after_forward": True},
        }
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        world = init_device_mesh("cpu", (4,))
        meshes = (mesh["a"], mesh["b"])
        cases = {
            "two meshes": {"out": OUT["even"], "coalesce": 1 << 20},
            "uneven": {"out": OUT["uneven"], "coalesce": 1 << 20, "meshes": (world,)},
        }
    seen = {}
    for name, case in cases.items():
        session.reset()
        plan_dir = str(Path(os.environ["OVERLAP_CORE_PLAN_DIR"], name))
        seen[name] = run_case(**{"meshes": meshes, "plan_dir": plan_dir, **case})
    return seen


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Seen]]:
    return run_ranks(run_cases, 2, deadline_s=500, tries=3)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Seen]]:
    return run_ranks(run_cases, 4, deadline_s=500, tries=3)


def check(ranks: list[dict[str, Seen]], name: str) -> Seen:
    """No bit differs, the ranks issue the same, and the gathers of each call are one."""
    results = [rank[name] for rank in ranks]
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


def test_all_gathers_of_a_graph_in_one_call(two_ranks: list[dict[str, Seen]]) -> None:
    seen = check(two_ranks, "even")
    assert seen.modes == ("identical", "identical")
    assert seen.calls == ((8,), ())  # nothing is gathered in backward


def test_shards_that_are_cast_before_they_are_gathered(two_ranks: list[dict[str, Seen]]) -> None:
    seen = check(two_ranks, "cast")
    assert seen.calls == ((8,), ())


def test_gathers_that_are_repeated_in_backward(two_ranks: list[dict[str, Seen]]) -> None:
    """Regions of 9,000 bytes hold two weights of 4,096 and what lies between them."""
    forward, backward = check(two_ranks, "again").calls
    assert len(forward) >= 2
    assert backward


def test_calls_hold_gathers_of_one_group(four_ranks: list[dict[str, Seen]]) -> None:
    """The layers are sharded over the two axes of a mesh in turn."""
    seen = check(four_ranks, "two meshes")
    assert seen.calls == ((4, 4), ())


def test_uneven_shards_are_padded_alike(four_ranks: list[dict[str, Seen]]) -> None:
    """30 rows over 4 ranks: the last rank holds fewer, so the ranks' graphs differ."""
    seen = check(four_ranks, "uneven")
    assert seen.modes[0] == "slot"
    assert seen.calls[0] == (8,)
