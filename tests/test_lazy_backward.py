"""Backward graphs are compiled when backward first runs, which ranks need not do together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.inductor.groups import default_store
from overlap_core.testing import shard_module

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = pytest.mark.ranks


def step(rank: int, world_size: int) -> list[dict[str, Any]]:
    """One training step; rank 1 comes late to backward, and compiles something in between."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    model = shard_module(torch.nn.Sequential(*layers), mesh, reshard_after_forward=True)
    options = oc.inductor_options(oc.OverlapConfig(costs="analytical", deadline_s=300))
    loss = torch.compile(model, fullgraph=True, options=options)(torch.ones(32, 64)).sum()
    store = default_store()
    if rank == 0:
        store.set("rank 0 comes to backward", "1")
    else:
        store.get("rank 0 comes to backward")  # waits for it
        torch.compile(lambda x: x.sin(), options=options)(torch.ones(4))
    loss.backward()
    return [
        {
            "mode": str(report.mode),
            "gathers": len(report.gathers),
            "sequence": [entry.op for entry in report.skeleton],
            "order": [
                [entry.node for entry in report.skeleton].index(name) for name in report.collectives
            ],
        }
        for report in oc.reports()
    ]


def test_a_late_backward_is_waited_for_and_meets_its_peer(pooled_ranks: RunRanks) -> None:
    forward, backward = zip(*pooled_ranks(step, 2, tries=3), strict=True)
    for graphs in (forward, backward):
        assert graphs[0] == graphs[1]
        assert graphs[0]["mode"] == "identical"
        assert graphs[0]["gathers"]
