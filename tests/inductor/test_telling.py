"""Where an outcome is told: log lines on one rank, warnings once, torch's trace log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from overlap_core.inductor.telling import tell
from overlap_core.ranks import Mode
from overlap_core.simulation import simulate_views

from ..pipeline_views import same, skewed

if TYPE_CHECKING:
    from pathlib import Path

LOGGER = "overlap_core.inductor.telling"


def test_one_rank_speaks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for outcome in simulate_views(same(3)):
        tell(outcome)
    [record] = caplog.records
    assert record.message.startswith("graph of rank 0: identical, 2 of 2 gathers hoisted")


def test_a_reason_that_keeps_overlap_off_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes = simulate_views(skewed({}, {"gathers": 1}))
    assert outcomes[0].mode is Mode.ABORT
    for outcome in (*outcomes, *outcomes):
        tell(outcome)
    [warning] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "rank 0: overlap is off for a graph with 2 weight gathers, on ranks 0, 1" in (
        warning.message
    )
    assert "different numbers of weight gathers" in warning.message


_SCRIPT = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import overlap_core as oc

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
ops = torch.ops._c10d_functional

class Stop(BaseException):
    pass

def stop(snodes):
    raise Stop

def model(x, shard):
    return torch.sin(x) @ ops.wait_tensor(ops.all_gather_into_tensor(shard, 2, "0"))

options = oc.inductor_options(oc.OverlapConfig(costs="analytical"))
options["reorder_for_compute_comm_overlap_passes"].append(stop)
try:
    torch.compile(model, fullgraph=True, options=options)(torch.ones(8, 8), torch.ones(4, 8))
except Stop:
    pass
"""


@pytest.mark.slow
def test_the_trace_log_of_torch_has_the_report(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, env=environment, timeout=300)
    [log] = tmp_path.glob("dedicated_log_torch_trace_*.log")
    text = log.read_text()
    head, _, rest = text.partition('"name": "overlap_core_report", "encoding": "json"')
    assert head, "the artifact is not in the trace log"
    lines = rest.splitlines()[1:]
    payload = [line.removeprefix("\t") for line in lines if line.startswith("\t")]
    report = json.loads("\n".join(payload[: payload.index("}") + 1]))
    assert report["mode"] == "identical"
    assert len(report["gathers"]) == 1
