"""Step time of a sharded video transformer: every way to overlap, side by side.

    python benchmarks/step_time.py --ranks 2 --tokens 4096,8192 --profile --out results
    torchrun --nproc-per-node 2 benchmarks/step_time.py --tokens 4096,8192

All contenders live in one process group and run in alternation on the same inputs. See README.md
beside this file for what is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from steptime.contenders import (
    CONTENDERS,
    Contender,
    Models,
    SkippedError,
    configure_torch,
    parse_contenders,
)
from steptime.dumps import describe, dump
from steptime.ranks import Control, first_line, gated_compiles, join, launch
from steptime.tables import Lines, Result, print_tables
from steptime.timing import peak_bytes, summarize, synchronize, time_round
from steptime.traces import analyze, load, profile_steps, save_trace
from torch.distributed.device_mesh import init_device_mesh
from video_transformer import VideoConfig, example_inputs

import overlap_core

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[], torch.Tensor]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
# Shares of the deadline after which nothing more of a kind is begun.
_COMPILE_SHARE, _ROUND_SHARE, _PROFILE_SHARE = 0.8, 0.9, 0.93


def main() -> int:
    """Start the ranks, or be one of them."""
    options = _options()
    if "RANK" not in os.environ:
        return launch(__file__, sys.argv[1:], options.ranks, options.deadline)
    control = join(options.device, options.timeout, options.deadline)
    status = 1
    scratch = Path(tempfile.mkdtemp(prefix="step-time-"))
    try:
        with torch.no_grad():
            status = Bench(options, control, scratch).run()
    except Exception as error:
        print(f"rank {control.rank}: {first_line(error)}", file=sys.stderr, flush=True)
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        shutil.rmtree(scratch, ignore_errors=True)
        if status == 0:
            control.barrier()
        # Neither communicators with a hung peer nor pools of compilers may keep the process.
        if sys.exc_info()[0] is None:
            os._exit(status)
    return status


def _options() -> argparse.Namespace:
    names = "\n".join(f"  {name:19} {words}" for name, words in CONTENDERS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"contenders:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--contenders", type=_contenders, default="unsharded,program,fsdp2,ours")
    add("--tokens", default="4096,8192", help="local lengths of a rank, one run each")
    add("--ranks", type=int, default=2, help="how many to start; not read under torchrun")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=sorted(_DTYPES), help="default: bfloat16 on GPUs, else float32")
    add("--blocks", type=int, default=6)
    add("--dim", type=int, default=3072)
    add("--heads", type=int, default=24)
    add("--ffn", type=int, default=14336)
    add("--text-tokens", type=int, default=512)
    add("--wan-table", action="store_true", help="modulation table (1, 6, dim): uneven shards")
    add("--groups", type=int, choices=(1, 2), help="2: attention has a communicator of its own")
    add("--repeats", type=int, default=5, help="rounds, in alternation between contenders")
    add("--steps", type=int, default=20, help="steps of one round, each way")
    add("--cold", action="store_true", help="kernel caches of its own for each contender")
    add("--profile", action="store_true", help="then profile 3 steps of each contender")
    add("--profile-host", action="store_true", help="also record the host's operators")
    add("--profile-synchronized", action="store_true", help="wait after each profiled step")
    add("--out", type=Path, help="folder for results.jsonl and traces")
    add("--dump", type=Path, help="folder for graphs and costs that overlap_core saw")
    add("--timeout", type=float, default=120, help="of process groups, in seconds")
    add("--deadline", type=float, default=460, help="seconds after which ranks show stacks and end")
    add("--phase-limit", type=float, default=180, help="the same for one contender's compile")
    return parser.parse_args()


def _contenders(text: str) -> list[Contender]:
    try:
        return parse_contenders(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plain(label: str) -> str:
    """A label as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", label.replace("=", "-"))


class Bench:
    """One rank's run over all sizes."""

    def __init__(self, options: argparse.Namespace, control: Control, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.control = control
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.lines = Lines(options.out if control.rank == 0 else None)
        self.mesh = init_device_mesh(self.device.type, (control.world_size,))
        self.group = self.mesh.get_group()
        # gloo corrupts memory (torch 2.13) while collectives of two groups are in flight.
        if (options.groups or (1 if self.device.type == "cpu" else 2)) == 2:
            self.group = dist.new_group(
                list(range(control.world_size)), timeout=timedelta(seconds=options.timeout)
            )
        configure_torch()

    def run(self) -> int:
        """Measure; 0, or 1 if an output of ours differs or nothing could be measured."""
        options = self.options
        self.lines.write("run", **self._surroundings(), arguments=sys.argv[1:])
        self._warm_up()
        good = True
        for tokens in map(int, options.tokens.split(",")):
            dtype = options.dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
            config = VideoConfig(
                tokens=tokens,
                n_blocks=options.blocks,
                dim=options.dim,
                n_heads=options.heads,
                ffn_dim=options.ffn,
                text_tokens=options.text_tokens,
                dtype=_DTYPES[dtype],
                wan_table=options.wan_table,
            )
            good &= self._run_size(config)
            torch.compiler.reset()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return 0 if good else 1

    def _surroundings(self) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        found = {
            "torch": torch.__version__,
            "overlap_core": overlap_core.__version__,
            "ranks": self.control.world_size,
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
        }
        self.control.say(", ".join(f"{key} {value}" for key, value in found.items()))
        return found

    def _warm_up(self) -> None:
        """Open connections and start the pool of compilers, so that no contender pays for it."""
        for group in (self.mesh.get_group(), self.group):
            own = torch.ones(self.control.world_size, device=self.device)
            dist.all_reduce(own, group=group)
            dist.all_gather(list(torch.empty_like(own).split(1)), own[:1].clone(), group=group)
            dist.all_to_all_single(torch.empty_like(own), own, group=group)
        synchronize(self.device)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.scratch / "inductor")
        with contextlib.suppress(Exception):  # the contenders will say what is wrong
            torch.compile(lambda x: (x.sin() + 1).sum())(torch.ones(64, 64, device=self.device))
        torch.compiler.reset()
        synchronize(self.device)
        self.control.barrier()
        self.control.say("ranks are connected")

    def _run_size(self, config: VideoConfig) -> bool:
        control, options = self.control, self.options
        title = f"{config.tokens:,} tokens a rank, {config.n_blocks} blocks"
        models = Models(config=config, device=self.device, mesh=self.mesh, group=self.group)
        inputs = example_inputs(config, self.device, control.rank)
        results: dict[str, Result] = {}
        runs: dict[str, Run] = {}
        for contender in options.contenders:
            result = results[contender.label] = Result(label=contender.label)
            run = self._compile(contender, models, inputs, result)
            if run is not None:
                runs[contender.label] = run
        self._compare(runs, results, config)
        for number in range(options.repeats):
            if number and not control.enough_time(_ROUND_SHARE):
                control.say(f"{title}: no time for round {number + 1}")
                break
            order = list(runs)
            turn = number % max(1, len(order))
            for label in (*order[turn:], *order[:turn]):
                one = time_round(runs[label], options.steps, self.device, control)
                results[label].rounds.append(one)
                results[label].summary = summarize(results[label].rounds)
                self.lines.write("round", tokens=config.tokens, contender=label, round=one)
            times = ", ".join(
                f"{label} {r.rounds[-1].back_to_back_ms:.2f}"
                for label, r in results.items()
                if r.rounds
            )
            control.say(f"round {number + 1} of {options.repeats}, ms back to back: {times}")
        for label, run in runs.items():
            result = results[label]
            result.peak_bytes = peak_bytes(run, result.own_bytes, self.device, control)
        if control.rank == 0 and options.profile:
            print_tables(title, list(results.values()))
        if options.profile:
            for label, run in runs.items():
                if not control.enough_time(_PROFILE_SHARE):
                    control.say(f"{title}: no time for more profiles")
                    break
                self._profile(run, results[label], config)
        for result in results.values():
            values = attrs.asdict(result, recurse=False, filter=lambda a, _: a.name != "rounds")
            self.lines.write("result", tokens=config.tokens, **values)
        if control.rank == 0:
            print_tables(title, list(results.values()))
        ours = [results[c.label] for c in options.contenders if c.kind == "ours"]
        return bool(runs) and not any(result.equal is False for result in ours)

    def _compile(
        self,
        contender: Contender,
        models: Models,
        inputs: tuple[torch.Tensor, ...],
        result: Result,
    ) -> Run | None:
        """Build, compile and warm up; None if it failed on any rank, which all then know."""
        control, config = self.control, models.config
        if not control.enough_time(_COMPILE_SHARE):
            result.failed = "skipped: no time left before the deadline"
            return None
        phase = f"{config.tokens}/{contender.label}"
        n_reports = len(overlap_core.reports())
        error, run = "", None
        start = time.perf_counter()
        control.limit(self.options.phase_limit)
        try:
            if self.options.cold:
                folder = self.scratch / f"inductor{config.tokens}-{abs(hash(contender.label))}"
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
            built = models.build(contender)
            control.pass_gate(phase, "built")
            result.own_bytes = built.own_bytes
            synchronize(self.device)
            start = time.perf_counter()
            with gated_compiles(control, phase):
                built.step(*inputs)
            synchronize(self.device)
            result.compile_s = time.perf_counter() - start

            def run() -> torch.Tensor:
                return built.step(*inputs)

            for _ in range(2):
                run()
            synchronize(self.device)
        except SkippedError as skipped:
            error = f"skipped: {skipped}"
        except Exception as failure:
            error = first_line(failure)
            if control.rank == 0 and os.environ.get("STEP_TIME_TRACEBACKS"):
                import traceback

                traceback.print_exc()
        why = control.agree(phase, error)
        control.limit(None)
        reports = overlap_core.reports()[n_reports:]
        for number, report in enumerate(reports):
            result.pass_note = describe(report)
            if self.options.dump:
                name = f"{_plain(contender.label)}.{config.tokens}.rank{control.rank}.{number}"
                dump(report, self.options.dump, name)
        if why:
            result.failed = why
            control.say(f"{phase}: {result.failed}")
            self.lines.write("failed", tokens=config.tokens, contender=contender.label, why=why)
            return None
        result.compile_s = control.largest([result.compile_s or 0.0])[0]
        # A first look, so that a run that ends early has said something of what it got through.
        look = time_round(run, min(5, self.options.steps), self.device, control)
        control.say(
            f"{phase}: compiled in {result.compile_s:.1f} s, {look.back_to_back_ms:.2f} ms back to "
            f"back, {look.synchronized_ms:.2f} ms synchronized. {result.pass_note}"
        )
        self.lines.write(
            "compiled",
            tokens=config.tokens,
            contender=contender.label,
            seconds=result.compile_s,
            first_look=look,
            note=result.pass_note,
        )
        return run

    def _compare(
        self, runs: dict[str, Run], results: dict[str, Result], config: VideoConfig
    ) -> None:
        """Compare all outputs with program order's, or with the first contender's without it."""
        if not runs:
            return
        reference = "program" if "program" in runs else next(iter(runs))
        expected = runs[reference]().clone()
        for label, run in runs.items():
            out = run()
            same = float(torch.equal(expected, out))
            difference = float((expected.float() - out.float()).abs().max())
            result = results[label]
            result.equal = bool(self.control.smallest([same])[0])
            result.largest_difference = self.control.largest([difference])[0]
            if not result.equal:
                self.control.say(
                    f"{config.tokens}/{label}: output differs from {reference}'s by up to "
                    f"{result.largest_difference:.3g}"
                )
        self.lines.write(
            "compared",
            tokens=config.tokens,
            reference=reference,
            equal={label: results[label].equal for label in runs},
            finite=bool(torch.isfinite(expected).all()),
            scale=float(expected.float().abs().mean()),
        )

    def _profile(self, run: Run, result: Result, config: VideoConfig) -> None:
        control, options, steps = self.control, self.options, 3
        error, note = "", ""
        path = self.scratch / f"trace.rank{control.rank}.json"
        try:
            profile_steps(
                run,
                path,
                self.device,
                steps=steps,
                host=options.profile_host,
                wait_each=options.profile_synchronized,
            )
            result.profile = analyze(load(path), steps)
            if control.rank == 0 and options.out:
                target = options.out / f"trace.{_plain(result.label)}.{config.tokens}.json.gz"
                note = save_trace(path, target)
        except Exception as failure:
            error = first_line(failure)
        finally:
            path.unlink(missing_ok=True)
        why = control.agree(f"{config.tokens}/{result.label}/profile", error)
        found = result.profile
        kernels = () if found is None else found.gather_kernels
        counts = [float(len(kernels)), -float(len(kernels))]
        largest = control.largest(counts)
        if not why and kernels and largest[0] == -largest[1]:
            least = control.smallest([kernel.duration_us for kernel in kernels])
            result.transfer_ms = sum(least) / 1e3 / steps
        words = f"{config.tokens}/{result.label}: profiled"
        if why:
            words += f", failed: {why}"
        elif found is None:
            words += ", no kernels in the trace: nothing to compute off GPUs"
        control.say(f"{words}. {note}")
        if found is not None:
            self.lines.write(
                "profile",
                tokens=config.tokens,
                contender=result.label,
                profile=found,
                transfer_ms=result.transfer_ms,
            )


if __name__ == "__main__":
    sys.exit(main())
