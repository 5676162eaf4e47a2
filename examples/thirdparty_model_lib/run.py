"""Compiles the model on 2 ranks with and without `overlap_core`; prints one JSON object a rank.

The ranks' graphs differ: the last rank's part of the video is shorter, so it alone pads. Run it
with `python run.py` in an environment that has `thirdparty-model-lib[overlap]`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import video_blocks
from torch.distributed.device_mesh import init_device_mesh
from video_blocks.model import VideoConfig, VideoModel

import overlap_core as oc
from overlap_core.testing import run_ranks, shard_module

KEEP_TRACED_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Both look at one rank alone, and might move a gather across an op of ours on one rank only."""


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Run the model both ways on this rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    config = VideoConfig()
    torch.manual_seed(0)
    model = VideoModel(config, mesh.get_group())
    for part in model.shared_parts():
        shard_module(part, mesh)
    lengths = torch.tensor([config.tokens - 64 * (r == world_size - 1) for r in range(world_size)])
    video = torch.randn(1, int(lengths[rank]), config.channels)

    def run(options: dict[str, Any]) -> torch.Tensor:
        torch.compiler.reset()
        options = {**KEEP_TRACED_ORDER, **options}
        compiled = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        with torch.no_grad():
            out: torch.Tensor = compiled(video, lengths)
        return out

    expected = run({"fx_graph_cache": False})
    output = run(oc.inductor_options(oc.OverlapConfig()))
    return {"rank": rank, "equal": torch.equal(expected, output), **summary()}


def summary() -> dict[str, Any]:
    """What the report says of the graph that was compiled last."""
    report = oc.reports()[-1]
    sources: dict[str, set[str]] = {}
    for node, cost in zip(report.graph.nodes, report.costs, strict=True):
        if node.op.startswith("video_blocks"):
            sources.setdefault(node.op, set()).add(str(cost.source))
    return {
        "mode": str(report.mode),
        "why": report.why,
        "committed": report.committed,
        "gathers": len(report.gathers),
        "hoisted": report.hoisted,
        "costs": {op: sorted(found) for op, found in sources.items()},
        "skeleton": [entry.op for entry in report.skeleton],
        "plugins": report.votes[0].plugin_names,
        "notes": report.notes,
        "core": oc.__file__,
        "library": video_blocks.__file__,
    }


if __name__ == "__main__":
    for result in run_ranks(compare, 2, deadline_s=300, tries=3):
        print(json.dumps(result))
