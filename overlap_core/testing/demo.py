"""What each rank of `overlap-core demo` does.

It compiles the sharded transformer twice, in program order and with the pass, runs both on the
same input, and returns plain data for the parent to compare.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch.distributed.device_mesh import init_device_mesh

import overlap_core
from overlap_core.testing.models import Transformer, TransformerConfig, example_input
from overlap_core.testing.recorder import CollectiveRecorder, RecordedCollective
from overlap_core.testing.simple_fsdp import shard_module

__all__ = ["PHASES", "DemoResult", "DemoTask", "demo_rank", "slowest_phase"]

PHASES = (
    "starting the ranks",
    "compiling in program order",
    "compiling with overlap_core",
)
"""What a rank goes through, in order."""

_KEEP_TRACED_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Both of Inductor's own reorderings look at one rank alone. Where graphs differ they may move a
gather across the attention op on one rank only, and that hangs with and without overlap_core."""


@frozen(kw_only=True)
class DemoTask:
    """What to compile. `splits` are the ranks' local lengths; equal on all ranks."""

    model: TransformerConfig
    splits: tuple[int, ...]
    pass_splits: bool
    """Whether the model gets the split sizes as an input, as under uneven context parallelism."""
    dynamic: bool
    progress: str
    """Folder into which each rank writes the number of its phase."""


@frozen(kw_only=True)
class DemoResult:
    """What one rank saw."""

    rank: int
    mode: str | None
    """None: the pass left no report, so it was never called."""
    why: str
    gathers: tuple[overlap_core.GatherOutcome, ...]
    outputs_equal: bool
    """Bit for bit, between program order and the pass."""
    before: tuple[RecordedCollective, ...]
    """Collectives at run time in program order, and `after` with the pass."""
    after: tuple[RecordedCollective, ...]


def demo_rank(rank: int, world_size: int, task: DemoTask) -> DemoResult:
    """Compile, run and record on this rank; called through `run_ranks`."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = shard_module(Transformer(task.model, mesh.get_group()), mesh)
    inputs: list[Any] = [example_input(task.model, list(task.splits), rank)]
    if task.pass_splits:
        inputs.append(list(task.splits))

    def run(
        phase: int, options: dict[str, Any]
    ) -> tuple[torch.Tensor, tuple[RecordedCollective, ...]]:
        _write_phase(task, rank, phase)
        torch.compiler.reset()
        options = {**_KEEP_TRACED_ORDER, **options}
        compiled = torch.compile(model, fullgraph=True, dynamic=task.dynamic, options=options)
        with torch.no_grad():
            compiled(*inputs)  # compiles, and ranks negotiate; so only the next run is recorded
            with CollectiveRecorder() as recorder:
                output = compiled(*inputs)
        return output, tuple(recorder.collectives)

    # torch's caches on disk can give one rank an artifact with the group names of another.
    expected, before = run(1, {"fx_graph_cache": False})
    config = overlap_core.OverlapConfig()
    output, after = run(2, overlap_core.inductor_options(config))
    reports = overlap_core.reports()
    return DemoResult(
        rank=rank,
        mode=str(reports[-1].mode) if reports else None,
        why=reports[-1].why if reports else "the pass was not called",
        gathers=tuple(reports[-1].gathers) if reports else (),
        outputs_equal=torch.equal(expected, output),
        before=before,
        after=after,
    )


def _write_phase(task: DemoTask, rank: int, phase: int) -> None:
    Path(task.progress, f"rank{rank}").write_text(str(phase), encoding="utf-8")


def slowest_phase(progress: Path, world_size: int) -> int:
    """The phase of the rank that is furthest behind, as an index into `PHASES`."""
    phases = []
    for rank in range(world_size):
        # A rank may be about to write, or may not have started.
        with contextlib.suppress(OSError, ValueError):
            phases.append(int((progress / f"rank{rank}").read_text(encoding="utf-8")))
    return min(phases) if len(phases) == world_size else 0
