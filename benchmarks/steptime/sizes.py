"""One model at one size: compile all contenders, compare them, time them in turn, profile them."""

from __future__ import annotations

import os
import re
import time
import traceback
from typing import TYPE_CHECKING

import attrs
import torch

import overlap_core
from overlap_core.session import session

from .clocks import Clocks
from .contenders import Contender, Models, SkippedError
from .dumps import describe, dump
from .ranks import first_line, gated_compiles
from .tables import Result, print_tables
from .timing import peak_bytes, summarize, synchronize, time_round
from .traces import analyze, load, profile_steps, save_trace, without_first_step

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from .ranks import Control
    from .tables import Lines
    from .workloads import Workload

    Run = Callable[[], tuple[torch.Tensor, ...]]

__all__ = ["Place", "measure"]

# Shares of the deadline after which nothing more of a kind is begun.
_COMPILE_SHARE, _ROUND_SHARE, _PROFILE_SHARE = 0.8, 0.9, 0.93
_PROFILED_STEPS = 4


@attrs.frozen(kw_only=True)
class Place:
    """Where this rank measures, and where it writes."""

    control: Control
    scratch: Path
    device: torch.device
    mesh: DeviceMesh
    group: dist.ProcessGroup
    """For the communication inside custom ops."""
    lines: Lines


def measure(workload: Workload, place: Place, options: argparse.Namespace) -> bool:
    """Measure and print; whether something was measured and no output of ours differs."""
    return _OneSize(workload, place, options).run()


def _plain(label: str) -> str:
    """A label as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", label.replace("=", "-"))


class _OneSize:
    def __init__(self, workload: Workload, place: Place, options: argparse.Namespace) -> None:
        self.workload = workload
        self.place = place
        self.options = options
        self.control = place.control
        self.device = place.device
        self.models = Models(
            workload=workload, device=place.device, mesh=place.mesh, group=place.group
        )
        self.inputs = workload.inputs(place.device, place.control.rank)
        self.results: dict[str, Result] = {}
        self.runs: dict[str, Run] = {}

    def run(self) -> bool:
        control, options, title = self.control, self.options, self.workload.title
        n_contenders = len(options.contenders)
        n_passes = 1 + options.repeats + bool(options.profile)
        control.report.begin(title, n_contenders * n_passes)
        # Else graphs of the second size would follow what was agreed for the first.
        os.environ["OVERLAP_CORE_PLAN_DIR"] = str(self.place.scratch / "plans" / _plain(title))
        session.reset()
        for contender in options.contenders:
            control.report.working_on(f"{title}: compiling {contender.label}")
            result = self.results[contender.label] = Result(label=contender.label)
            run = self._compile(contender, result)
            if run is not None:
                self.runs[contender.label] = run
            # What failed has no rounds either.
            control.report.done(n_passes if run is None else 1)
        self._compare()
        self._rounds()
        for label, run in self.runs.items():
            result = self.results[label]
            result.peak_bytes = peak_bytes(run, result.own_bytes, self.device, control)
        if options.profile:
            self._print()  # a profile may fail, and the times are there
            self._profiles()
        for result in self.results.values():
            values = attrs.asdict(result, recurse=False, filter=lambda a, _: a.name != "rounds")
            self._write("result", **values)
        control.report.end()
        self._print()
        ours = [self.results[c.label] for c in options.contenders if c.kind == "ours"]
        return bool(self.runs) and not any(result.equal is False for result in ours)

    def _print(self) -> None:
        print_tables(self.control.report, self.workload.title, list(self.results.values()))

    def _write(self, kind: str, **values: object) -> None:
        self.place.lines.write(
            kind, model=self.workload.model, tokens=self.workload.tokens, **values
        )

    # --- compiling ---------------------------------------------------------------------------

    def _compile(self, contender: Contender, result: Result) -> Run | None:
        """Build, compile and warm up; None if it failed on any rank, which all then know."""
        control = self.control
        if not control.enough_time(_COMPILE_SHARE):
            result.failed = "skipped: no time left before the deadline"
            return None
        phase = f"{self.workload.name}/{contender.label}"
        n_reports = len(overlap_core.reports())
        error, run = "", None
        control.limit(self.options.phase_limit)
        try:
            run = self._first_steps(contender, result, phase)
        except SkippedError as skipped:
            error = f"skipped: {skipped}"
        except Exception as failure:
            error = first_line(failure)
            if control.rank == 0 and os.environ.get("STEP_TIME_TRACEBACKS"):
                traceback.print_exc()
        why = control.agree(phase, error)
        control.limit(None)
        self._note_reports(contender, result, n_reports)
        if why or run is None:
            result.failed = why
            control.say(f"{phase}: {result.failed}")
            self._write("failed", contender=contender.label, why=why)
            return None
        result.compile_s = control.largest([result.compile_s or 0.0])[0]
        # A first look, so that a run that ends early has said something of what it got through.
        look = time_round(run, min(5, self.options.steps), self.device, control)
        control.say(
            f"{phase}: compiled in {result.compile_s:.1f} s, {look.back_to_back_ms:.2f} ms back to "
            f"back, {look.synchronized_ms:.2f} ms synchronized. {result.pass_note}"
        )
        self._write(
            "compiled",
            contender=contender.label,
            seconds=result.compile_s,
            first_look=look,
            note=result.pass_note,
        )
        return run

    def _first_steps(self, contender: Contender, result: Result, phase: str) -> Run:
        if self.options.cold:
            folder = f"inductor-{_plain(phase)}"
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.place.scratch / folder)
        built = self.models.build(contender)
        self.control.pass_gate(phase, "built")
        result.own_bytes = built.own_bytes
        synchronize(self.device)
        start = time.perf_counter()
        with gated_compiles(self.control, phase):
            built.step(*self.inputs)
        synchronize(self.device)
        result.compile_s = time.perf_counter() - start

        def run() -> tuple[torch.Tensor, ...]:
            return built.step(*self.inputs)

        for _ in range(2):
            run()
        synchronize(self.device)
        return run

    def _note_reports(self, contender: Contender, result: Result, n_reports: int) -> None:
        """What overlap_core said of the graphs that were compiled since it had so many reports."""
        reports = overlap_core.reports()[n_reports:]
        # Training has two graphs: forward, then backward.
        result.pass_note = "; then ".join(map(describe, reports))
        if self.options.dump:
            for number, report in enumerate(reports):
                name = f"{self._file_name(contender.label)}.rank{self.control.rank}.{number}"
                dump(report, self.options.dump, name)

    def _file_name(self, label: str) -> str:
        return f"{self.workload.model}.{_plain(label)}.{self.workload.tokens}"

    # --- comparing and timing ----------------------------------------------------------------

    def _compare(self) -> None:
        """Compare all results with program order's, or with the first contender's without it."""
        if not self.runs:
            return
        reference = "program" if "program" in self.runs else next(iter(self.runs))
        expected = tuple(value.clone() for value in self.runs[reference]())
        for label, run in self.runs.items():
            pairs = list(zip(expected, run(), strict=False))  # not all have a gradient to compare
            same = float(all(torch.equal(one, other) for one, other in pairs))
            difference = max(map(_largest_difference, *zip(*pairs, strict=True)))
            result = self.results[label]
            result.equal = bool(self.control.smallest([same])[0])
            result.largest_difference = self.control.largest([difference])[0]
            if not result.equal:
                self.control.say(
                    f"{self.workload.name}/{label}: differs from {reference} by up to "
                    f"{result.largest_difference:.3g}"
                )
        self._write(
            "compared",
            reference=reference,
            equal={label: self.results[label].equal for label in self.runs},
            finite=all(bool(torch.isfinite(value).all()) for value in expected),
            scale=float(expected[0].float().abs().mean()),
        )

    def _rounds(self) -> None:
        """Time all contenders in each round; the order rotates."""
        with Clocks(self.device, wanted=self.options.clocks) as clocks:
            self._take_turns(clocks)

    def _take_turns(self, clocks: Clocks) -> None:
        control, options, title = self.control, self.options, self.workload.title
        for number in range(options.repeats if self.runs else 0):
            if number and not control.enough_time(_ROUND_SHARE):
                control.say(f"{title}: no time for round {number + 1}")
                break
            words = f"{title}: round {number + 1} of {options.repeats}"
            order = list(self.runs)
            turn = number % max(1, len(order))
            for label in (*order[turn:], *order[:turn]):
                control.report.working_on(f"{words}, {label}")
                result = self.results[label]
                one = time_round(self.runs[label], options.steps, self.device, control, clocks)
                result.rounds.append(one)
                result.summary = summarize(result.rounds)
                self._write("round", contender=label, round=one)
                control.report.done()
            times = ", ".join(
                f"{label} {r.rounds[-1].back_to_back_ms:.2f}"
                for label, r in self.results.items()
                if r.rounds
            )
            control.say(f"round {number + 1} of {options.repeats}, ms back to back: {times}")

    # --- profiling ---------------------------------------------------------------------------

    def _profiles(self) -> None:
        """Apart from the timed steps: a profiler slows the host down."""
        for label, run in self.runs.items():
            if not self.control.enough_time(_PROFILE_SHARE):
                self.control.say(f"{self.workload.title}: no time for more profiles")
                break
            self.control.report.working_on(f"{self.workload.title}: profiling {label}")
            self._profile(run, self.results[label])
            self.control.report.done()

    def _profile(self, run: Run, result: Result) -> None:
        control, options = self.control, self.options
        error, note = "", ""
        path = self.place.scratch / f"trace.rank{control.rank}.json"
        try:
            profile_steps(
                run,
                path,
                self.device,
                steps=_PROFILED_STEPS,
                host=options.profile_host,
                wait_each=options.profile_synchronized,
            )
            result.profile = analyze(*without_first_step(load(path), _PROFILED_STEPS))
            if control.rank == 0 and options.out:
                target = options.out / f"trace.{self._file_name(result.label)}.json.gz"
                note = save_trace(path, target)
        except Exception as failure:
            error = first_line(failure)
        finally:
            path.unlink(missing_ok=True)
        why = control.agree(f"{self.workload.name}/{result.label}/profile", error)
        result.transfer_ms = self._transfer_ms(result, failed=bool(why))
        words = f"{self.workload.name}/{result.label}: profiled"
        if why:
            words += f", failed: {why}"
        elif result.profile is None:
            words += ", no kernels in the trace: nothing to compute off GPUs"
        control.say(f"{words}. {note}")
        if result.profile is not None:
            self._write(
                "profile",
                contender=result.label,
                profile=result.profile,
                groups=result.profile.gather_groups,
                transfer_ms=result.transfer_ms,
            )

    def _transfer_ms(self, result: Result, *, failed: bool) -> float | None:
        """Gather time of a step without waiting for late peers: each gather's least over ranks.

        All ranks call it, whatever they have.
        """
        found = result.profile
        kernels = () if found is None else found.gather_kernels
        largest = self.control.largest([float(len(kernels)), -float(len(kernels))])
        if failed or not kernels or largest[0] != -largest[1]:
            return None
        least = self.control.smallest([kernel.duration_us for kernel in kernels])
        return sum(least) / 1e3 / found.steps


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max()) if one.numel() else 0.0
