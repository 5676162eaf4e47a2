"""A trace recorded here: two ranks, compiled, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, schedule

import overlap_core as oc
from overlap_core.report import load_report
from overlap_core.testing import shard_module
from overlap_core.traces import load_trace, measure_gathers

if TYPE_CHECKING:
    from pathlib import Path

    from overlap_core.testing import RunRanks

pytestmark = pytest.mark.ranks

_STEPS = 3
_LAYERS = 2


def record(rank: int, world: int, folder: str, coalesce: int | str = "auto") -> None:
    """Profile some steps of a sharded model and save its report."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(_LAYERS)]
    model = shard_module(torch.nn.Sequential(*layers), init_device_mesh("cpu", (world,)))
    options = oc.inductor_options(oc.OverlapConfig(costs="analytical", coalesce=coalesce))
    compiled = torch.compile(model, fullgraph=True, options=options)
    x = torch.randn(256, 64)
    with torch.no_grad():
        compiled(x)
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=_STEPS),
            acc_events=True,
            on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/trace{rank}.json"),
        ) as profiler:
            for _ in range(1 + _STEPS):
                compiled(x)
                profiler.step()
    oc.reports()[-1].save(f"{folder}/report{rank}.json")


def test_the_host_is_blocked_in_the_waits_of_a_real_trace(
    tmp_path: Path, pooled_ranks: RunRanks
) -> None:
    pooled_ranks(record, 2, str(tmp_path), tries=3)
    for rank in range(2):
        report = load_report(tmp_path / f"report{rank}.json")
        found = measure_gathers(load_trace(tmp_path / f"trace{rank}.json"), [report])
        assert (found.device, found.steps, found.incomplete_steps) == ("cpu", _STEPS, 0)
        assert [gather.name for gather in found.gathers] == list(report.collectives)
        assert len(found.gathers) == 2 * _LAYERS
        assert all(gather.exposed_ns > 0 for gather in found.gathers)


def test_waits_for_coalesced_calls_are_in_a_real_trace(
    tmp_path: Path, pooled_ranks: RunRanks
) -> None:
    pooled_ranks(record, 2, str(tmp_path), 1 << 20, tries=3)
    for rank in range(2):
        report = load_report(tmp_path / f"report{rank}.json")
        assert report.coalesced
        found = measure_gathers(load_trace(tmp_path / f"trace{rank}.json"), [report])
        assert (found.device, found.steps, found.incomplete_steps) == ("cpu", _STEPS, 0)
        assert sum(gather.gathers for gather in found.gathers) == 2 * _LAYERS
        assert len(found.gathers) < 2 * _LAYERS
        assert all(gather.exposed_ns > 0 for gather in found.gathers)
