"""What does a step's compute take when the device rests, and when something runs beside it?

    python benchmarks/power.py --tokens 4096,8192

Hiding gathers has a price that no order can avoid: a device that never rests may have to clock
lower to keep within its power, and kernels of NCCL take SMs and memory from compute. One GPU is
enough to see both. The unsharded video transformer runs back to back, then with rests after each
step, then beside 24 thread blocks that only count (SMs) or copy (SMs and memory) for as long as the
model's gathers would take. Prints medians of the time from a step's start until it and what runs
beside it have ended, without the rest, with the GPU's clock and power meanwhile. Cases take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from steptime.clocks import Clocks
from video_transformer import VideoConfig, VideoTransformer, example_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCKS = 24
"""SMs that NCCL takes for a gather on two H200."""


@attrs.define
class Case:
    """One way to run a step."""

    name: str
    rest: float = 0.0
    """Of a step's time, after each step."""
    beside: Callable[[], object] | None = None
    """Enqueues what runs beside a step, on the current stream."""
    step_ms: list[float] = attrs.field(factory=list)
    mhz: list[float] = attrs.field(factory=list)
    watts: list[float] = attrs.field(factory=list)
    capped: list[float] = attrs.field(factory=list)


def main() -> None:
    """Run all cases at all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="4096,8192", help="one run each")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gathers", type=int, default=24, help="loads beside a step")
    parser.add_argument("--gather-us", type=float, default=215.0, help="length of one of them")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for tokens in map(int, options.tokens.split(",")):
        with torch.no_grad():
            measure(tokens, options, device)
        torch.compiler.reset()


def measure(tokens: int, options: argparse.Namespace, device: torch.device) -> None:
    """Compile the model at one size, run the cases in turn, print them."""
    config = VideoConfig(tokens=tokens, n_blocks=options.blocks)
    group = dist.group.WORLD
    assert group is not None
    model = VideoTransformer(config, device, group)
    inputs = example_inputs(config, device, 0)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)

    def step() -> None:
        compiled(*inputs)

    step_ms = statistics.median(time_steps(Case("warm"), step, 10, 0.0, device))
    loads = Loads(options.gather_us, options.gathers, device)
    cases = [
        Case("back to back"),
        *(Case(f"a rest of {rest:.0%}", rest=rest) for rest in (0.05, 0.1, 0.25, 1.0)),
        Case(f"beside {loads.total_ms(loads.count):.1f} ms that count", beside=loads.count),
        Case(f"beside {loads.total_ms(loads.copy):.1f} ms that copy", beside=loads.copy),
    ]
    with Clocks(device) as clocks:
        for turn in range(options.repeats):
            for case in (*cases[turn % len(cases) :], *cases[: turn % len(cases)]):
                start = time.perf_counter()
                case.step_ms += time_steps(case, step, options.steps, step_ms, device)
                if reading := clocks.between(start + 0.3, time.perf_counter()):
                    case.mhz.append(reading.sm_mhz)
                    case.watts.append(reading.watts)
                    case.capped.append(reading.capped)
    show(f"unsharded video transformer, {tokens:,} tokens, {options.blocks} blocks", cases)


def time_steps(
    case: Case, step: Callable[[], None], n: int, step_ms: float, device: torch.device
) -> list[float]:
    """Milliseconds of each of `n` steps, by the device's clock."""
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    spans = []
    for number in range(n + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if case.beside is not None:
            side.wait_event(start)
            with torch.cuda.stream(side):
                case.beside()
        step()
        main.wait_stream(side)
        end.record()
        if case.rest:
            torch.cuda._sleep(cycles(case.rest * step_ms))
        if number >= 3:
            spans.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in spans]


def cycles(ms: float) -> int:
    """Of a clock of 1.8 GHz: near enough for a rest."""
    return int(ms * 1.8e6)


class Loads:
    """What stands for a step's gathers: kernels of few thread blocks, one after another."""

    def __init__(self, us: float, n: int, device: torch.device) -> None:
        from load_kernels import copy_kernel, count_kernel

        self._n = n
        elements = 32 << 20
        self._source = torch.randn(elements, device=device)
        self._target = torch.empty_like(self._source)
        self._kernels: dict[str, Callable[[int], Any]] = {
            "count": lambda size: count_kernel[(_BLOCKS,)](self._target, size, num_warps=16),
            "copy": lambda size: copy_kernel[(_BLOCKS,)](
                self._source, self._target, size, block=8192, num_warps=16
            ),
        }
        self._sizes = {}
        for name, start in (("count", 100_000), ("copy", 8 << 20)):
            alone_us = self._time(name, start)
            self._sizes[name] = min(int(start * us / alone_us), elements)
        self._alone_us = {name: self._time(name, size) for name, size in self._sizes.items()}

    def count(self) -> None:
        """Blocks that only compute in registers."""
        self._enqueue("count")

    def copy(self) -> None:
        """Blocks that copy memory."""
        self._enqueue("copy")

    def total_ms(self, load: Callable[[], None]) -> float:
        """All loads of a step, alone."""
        return self._alone_us[load.__name__] * self._n / 1e3

    def _enqueue(self, name: str) -> None:
        for _ in range(self._n):
            self._kernels[name](self._sizes[name])

    def _time(self, name: str, size: int) -> float:
        found = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._kernels[name](size)
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
        return statistics.median(found[2:])


def show(title: str, cases: list[Case]) -> None:
    """Print medians and what they are of the first case's."""
    table = Table(title=title)
    table.add_column("case")
    for name in ("step ms", "ratio", "SM MHz", "W", "held by power"):
        table.add_column(name, justify="right")
    floor = statistics.median(cases[0].step_ms)
    for case in cases:
        ms = statistics.median(case.step_ms)
        clocked = ["-"] * 3
        if case.mhz:
            mhz, watts, capped = map(statistics.median, (case.mhz, case.watts, case.capped))
            clocked = [f"{mhz:.0f}", f"{watts:.0f}", f"{capped:.0%}"]
        table.add_row(case.name, f"{ms:.2f}", f"{ms / floor:.3f}", *clocked)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
