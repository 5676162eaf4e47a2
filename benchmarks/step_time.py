"""Step time of sharded models: every way to overlap, side by side.

    python benchmarks/step_time.py --ranks 2 --contenders all --tokens 4096 --profile --out results
    torchrun --nproc-per-node 2 benchmarks/step_time.py --model video,moe,train --tokens 8192

All contenders live in one process group and run in alternation on the same inputs. See README.md
beside this file for what is printed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from steptime.contenders import configure_torch
from steptime.options import DTYPES, read_options
from steptime.ranks import Control, first_line, join, launch
from steptime.sizes import Place, measure
from steptime.tables import Lines
from steptime.timing import synchronize
from steptime.workloads import make_workload
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlap_core

if TYPE_CHECKING:
    import argparse


def main() -> int:
    """Start the ranks, or be one of them."""
    options = read_options(__doc__ or "")
    if "RANK" not in os.environ:
        return launch(__file__, sys.argv[1:], options.ranks, options.deadline)
    control = join(options.device, options.timeout, options.deadline)
    status = 1
    scratch = Path(tempfile.mkdtemp(prefix="step-time-"))
    try:
        status = run(options, control, scratch)
    except Exception as error:
        print(f"rank {control.rank}: {first_line(error)}", file=sys.stderr, flush=True)
        raise
    finally:
        control.report.end()
        sys.stdout.flush()
        sys.stderr.flush()
        shutil.rmtree(scratch, ignore_errors=True)
        if status == 0:
            control.barrier()
        # Neither communicators with a hung peer nor pools of compilers may keep the process.
        if sys.exc_info()[0] is None:
            os._exit(status)
    return status


def run(options: argparse.Namespace, control: Control, scratch: Path) -> int:
    """Measure all models at all sizes on this rank.

    Returns:
        0, or 1 if an output of ours differs or nothing could be measured.
    """
    place = _place(options, control, scratch)
    configure_torch()
    place.lines.write("run", **_surroundings(place), arguments=sys.argv[1:])
    _warm_up(place)
    on_gpu = place.device.type == "cuda"
    dtype = DTYPES[options.dtype or ("bfloat16" if on_gpu else "float32")]
    good = True
    for model in options.model:
        for tokens in options.tokens:
            workload = make_workload(model, tokens, dtype, options)
            with torch.set_grad_enabled(workload.trains):
                good &= measure(workload, place, options)
            torch.compiler.reset()
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    return 0 if good else 1


def _place(options: argparse.Namespace, control: Control, scratch: Path) -> Place:
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if options.gather_ctas is None:
        mesh = init_device_mesh(device.type, (control.world_size,))
    else:
        mesh = _mesh_of_few_ctas(device.type, control.world_size, options.gather_ctas)
    group = mesh.get_group()
    # gloo corrupts memory (torch 2.13) while collectives of two groups are in flight.
    if (options.groups or (1 if device.type == "cpu" else 2)) == 2:
        timeout = timedelta(seconds=options.timeout)
        group = dist.new_group(list(range(control.world_size)), timeout=timeout)
    return Place(
        control=control,
        scratch=scratch,
        device=device,
        mesh=mesh,
        group=group,
        lines=Lines(options.out if control.rank == 0 else None),
    )


def _mesh_of_few_ctas(device_type: str, world_size: int, ctas: int) -> DeviceMesh:
    """A mesh whose gathers leave more of the SMs to compute than NCCL would by itself."""
    pg_options = dist.ProcessGroupNCCL.Options()
    pg_options.config.min_ctas, pg_options.config.max_ctas = 1, ctas
    group = dist.new_group(list(range(world_size)), pg_options=pg_options)
    return DeviceMesh.from_group(group, device_type, list(range(world_size)))


def _surroundings(place: Place) -> dict[str, Any]:
    on_gpu = place.device.type == "cuda"
    found = {
        "torch": torch.__version__,
        "overlap_core": overlap_core.__version__,
        "ranks": place.control.world_size,
        "device": torch.cuda.get_device_name(place.device) if on_gpu else "cpu",
    }
    place.control.say(", ".join(f"{key} {value}" for key, value in found.items()))
    return found


def _warm_up(place: Place) -> None:
    """Open connections and start the pool of compilers, so that no contender pays for it."""
    control, device = place.control, place.device
    for group in (place.mesh.get_group(), place.group):
        own = torch.ones(control.world_size, device=device)
        dist.all_reduce(own, group=group)
        dist.all_gather(list(torch.empty_like(own).split(1)), own[:1].clone(), group=group)
        dist.all_to_all_single(torch.empty_like(own), own, group=group)
    synchronize(device)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place.scratch / "inductor")
    # The contenders will say what is wrong.
    with contextlib.suppress(Exception), torch.no_grad():
        torch.compile(lambda x: (x.sin() + 1).sum())(torch.ones(64, 64, device=device))
    torch.compiler.reset()
    synchronize(device)
    control.barrier()
    control.say("ranks are connected")


if __name__ == "__main__":
    sys.exit(main())
