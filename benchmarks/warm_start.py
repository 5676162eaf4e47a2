"""How long the first call of a compiled model takes, at the first and at later starts of one job.

    torchrun --nproc-per-node 2 benchmarks/warm_start.py --device cuda
    torchrun --nproc-per-node 2 benchmarks/warm_start.py --device cuda

Run it twice in the same environment: the first start compiles and negotiates, the second one finds
the plan file and Inductor's caches. `--off` leaves overlap_core out, for comparison, with caches of
its own. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.testing import Transformer, TransformerConfig, example_input, shard_module


def main() -> None:
    """Compile, run, and print what rank 0 saw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--length", type=int, default=512, help="tokens of a rank")
    parser.add_argument("--off", action="store_true", help="without overlap_core")
    options = parser.parse_args()

    device = torch.device(
        options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else 0
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    config = TransformerConfig(n_blocks=options.blocks, dim=options.dim, ffn_dim=4 * options.dim)
    lengths = [options.length] * world_size
    with device if device.type == "cuda" else torch.device("cpu"):
        model = shard_module(Transformer(config, mesh.get_group()).to(device), mesh)
    inputs = example_input(config, lengths, rank).to(device)
    compile_options = None if options.off else oc.inductor_options(oc.OverlapConfig())
    compiled = torch.compile(model, fullgraph=True, options=compile_options)
    dist.barrier()
    start = time.perf_counter()
    with torch.no_grad():
        output = compiled(inputs, lengths)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    reports = oc.reports()
    if rank == 0:
        order = json.dumps([report.order for report in reports]).encode()
        print(
            json.dumps(
                {
                    "first_call_s": round(seconds, 2),
                    "hits": counters["aot_autograd"]["autograd_cache_hit"],
                    "inductor_hits": counters["inductor"]["fxgraph_cache_hit"],
                    "modes": [str(report.mode) for report in reports],
                    "hoisted": [report.hoisted for report in reports],
                    "order": hashlib.sha256(order).hexdigest()[:12],
                    "sum": float(output.float().sum()),
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
