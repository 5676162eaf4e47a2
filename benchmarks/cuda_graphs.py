"""CUDA graphs: is the order captured and replayed, and what does a replayed step take?

    torchrun --nproc-per-node 2 benchmarks/cuda_graphs.py --tokens 4096

Compiles the video transformer with `triton.cudagraphs`, which is what `mode="reduce-overhead"`
sets, in program order and with overlap_core, and compares with the same compiles without CUDA
graphs. Prints, for each, whether Inductor captured a graph or why not, the largest difference from
the step without CUDA graphs, and medians of step times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from video_transformer import VideoConfig, VideoTransformer, detach_shards, example_inputs

import overlap_core as oc
from overlap_core.testing import shard_module

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs GPUs with CUDA, and torch finds none")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun, as its description shows")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    config = VideoConfig(tokens=options.tokens, n_blocks=options.blocks)
    group = dist.new_group(list(range(mesh.size())))
    model = shard_module(VideoTransformer(config, device, group), mesh)
    detach_shards(model)
    inputs = example_inputs(config, device, mesh.get_local_rank())
    baseline: torch.Tensor | None = None
    with torch.no_grad():
        for name, more in (
            ("program", {}),
            ("ours", oc.inductor_options(oc.OverlapConfig(deadline_s=60.0))),
        ):
            for graphs in (False, True):
                label = f"{name}, {'CUDA graphs' if graphs else 'no CUDA graphs'}"
                compiled = {"fx_graph_cache": False, "triton.cudagraphs": graphs, **more}
                out = run(label, model, inputs, compiled, options.steps)
                if out is not None and baseline is not None:
                    say(f"{label}: largest difference {(out - baseline).abs().max().item():.3g}")
                baseline = out if baseline is None else baseline
    os._exit(0)  # communicators that a graph holds on to can't be taken down in order


def run(
    label: str, model: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any], n: int
) -> torch.Tensor | None:
    torch.compiler.reset()
    counters.clear()
    seen = len(oc.reports())

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result: torch.Tensor = compiled(*inputs)
        return result

    try:
        compiled = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        for _ in range(4):
            out = step().clone()
        torch.cuda.synchronize()
        back_to_back, alone = [], []
        for _ in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                step()
            torch.cuda.synchronize()
            back_to_back.append((time.perf_counter() - start) / n * 1e3)
            for _ in range(n):
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                alone.append((time.perf_counter() - start) * 1e3)
    except Exception as error:
        say(f"{label}: failed: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
        return None
    skips = counters["inductor"].get("cudagraph_skips", 0)
    recorded = counters["inductor"].get("cudagraph_recorded_non_static_inputs", None)
    hoisted = "; ".join(
        f"{r.mode}, {r.hoisted} of {len(r.gathers)} hoisted, {len(r.coalesced)} calls"
        for r in oc.reports()[seen:]
    )
    say(
        f"{label}: {statistics.median(back_to_back):.2f} ms back to back, "
        f"{statistics.median(alone):.2f} ms synchronized, skips {skips}, recorded {recorded} "
        f"{hoisted}"
    )
    return out


def say(text: str) -> None:
    if int(os.environ["RANK"]) == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
