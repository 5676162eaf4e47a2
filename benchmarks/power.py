"""What does a step's compute take when the device rests, and when something runs beside it?

    python benchmarks/power.py --tokens 4096,8192

Hiding gathers has a price that no order can avoid: a device that never rests may have to clock
lower to keep within its power, and kernels of NCCL take SMs and memory from compute. One GPU is
enough to see both. The unsharded video transformer runs back to back, then with rests after each
step, then beside 24 thread blocks that only count (SMs) or copy (SMs and memory) for as long as the
model's gathers would take. Prints medians of the time from a step's start until it and what runs
beside it have ended, without the rest; of how long what runs beside it took (load ms); and of the
GPU's clock and power meanwhile. Cases take turns.
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
from steptime.options import lengths
from video_transformer import VideoConfig, VideoTransformer, example_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

_THREAD_BLOCKS = 24
"""Of a load, one on each SM: so many NCCL takes for a gather on two H200."""
_UNTIMED_STEPS = 3
_HEATING_STEPS = 30
"""Before a load is sized: half a second, after which the clock is what steps leave of it."""
_LAUNCHES = 20
"""Of a load that is sized, in a row."""


@attrs.define
class Case:
    """One way to run a step."""

    name: str
    rest: float = 0.0
    """Of a step's time, after each step."""
    beside: Callable[[], object] | None = None
    """Enqueues what runs beside a step, on the current stream."""
    step_ms: list[float] = attrs.field(factory=list)
    load_ms: list[float] = attrs.field(factory=list)
    """What ran beside a step, from the first of it to the last."""
    mhz: list[float] = attrs.field(factory=list)
    watts: list[float] = attrs.field(factory=list)
    capped: list[float] = attrs.field(factory=list)


def main() -> None:
    """Run all cases at all sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=lengths, default="4096,8192", help="one run each")
    add("--blocks", type=int, default=6, help="of the transformer")
    add("--steps", type=int, default=40, help="of a case in each turn")
    add("--repeats", type=int, default=5, help="turns")
    add("--gathers", type=int, default=24, help="loads beside a step")
    add("--gather-us", type=float, default=215.0, help="length of one of them, alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU with CUDA, and torch finds none")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for tokens in options.tokens:
        with torch.no_grad():
            measure(tokens, options, device)
        torch.compiler.reset()
    dist.destroy_process_group()


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

    warm = Case("warm")
    time_steps(warm, step, 10, 0.0, device)
    step_ms = statistics.median(warm.step_ms)
    loads = Loads(
        each_us=options.gather_us, number=options.gathers, heating_step=step, device=device
    )
    cases = [
        Case("back to back"),
        *(Case(f"a rest of {rest:.0%}", rest=rest) for rest in (0.05, 0.1, 0.25, 1.0)),
        Case(f"beside {_THREAD_BLOCKS} thread blocks that count", beside=loads.count),
        Case(f"beside {_THREAD_BLOCKS} thread blocks that copy", beside=loads.copy),
    ]
    with Clocks(device) as clocks:
        for turn in range(options.repeats):
            for case in (*cases[turn % len(cases) :], *cases[: turn % len(cases)]):
                start = time.perf_counter()
                time_steps(case, step, options.steps, case.rest * step_ms, device)
                if reading := clocks.between(start + 0.3, time.perf_counter()):
                    case.mhz.append(reading.sm_mhz)
                    case.watts.append(reading.watts)
                    case.capped.append(reading.capped)
    show(f"unsharded video transformer, {tokens:,} tokens, {options.blocks} blocks", cases)


def time_steps(
    case: Case, step: Callable[[], None], number: int, rest_ms: float, device: torch.device
) -> None:
    """Run so many steps, and add to the case what they and their loads took.

    The time is the device's, from events on the streams of each.
    """
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    steps, loads = [], []
    for _ in range(_UNTIMED_STEPS + number):
        start, end = new_events()
        start.record(main)
        if case.beside is not None:
            side.wait_event(start)
            first, last = new_events()
            with torch.cuda.stream(side):
                first.record(side)
                case.beside()
                last.record(side)
            loads.append((first, last))
        step()
        main.wait_stream(side)
        end.record(main)
        steps.append((start, end))
        if rest_ms:
            torch.cuda._sleep(cycles(rest_ms))
    torch.cuda.synchronize(device)
    case.step_ms += [start.elapsed_time(end) for start, end in steps[_UNTIMED_STEPS:]]
    case.load_ms += [first.elapsed_time(last) for first, last in loads[_UNTIMED_STEPS:]]


def new_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """For the start and the end of something."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def cycles(ms: float) -> int:
    """Of a clock of 1.8 GHz: near enough for a rest."""
    return int(ms * 1.8e6)


class Loads:
    """What stands for a step's gathers: kernels of few thread blocks, one after another.

    Args:
        each_us: how long one takes alone, on a device that steps have kept busy.
        number: how many run beside a step.
        heating_step: enqueues a step, to keep the device busy.
        device: to run on.
    """

    def __init__(
        self,
        *,
        each_us: float,
        number: int,
        heating_step: Callable[[], None],
        device: torch.device,
    ) -> None:
        from load_kernels import copy_kernel, count_kernel

        self._number = number
        self._heating_step = heating_step
        self._source = torch.randn(32 << 20, device=device)
        self._target = torch.empty_like(self._source)
        self._kernels: dict[str, Callable[[int], Any]] = {
            "count": lambda size: count_kernel[(_THREAD_BLOCKS,)](self._target, size, num_warps=16),
            "copy": lambda size: copy_kernel[(_THREAD_BLOCKS,)](
                self._source, self._target, size, block=8192, num_warps=16
            ),
        }
        self._sizes = {
            "count": self._find_size("count", 100_000, each_us),
            "copy": self._find_size("copy", 8 << 20, each_us),
        }

    def count(self) -> None:
        """Blocks that only compute in registers."""
        self._enqueue("count")

    def copy(self) -> None:
        """Blocks that copy memory."""
        self._enqueue("copy")

    def _enqueue(self, name: str) -> None:
        for _ in range(self._number):
            self._kernels[name](self._sizes[name])

    def _find_size(self, name: str, size: int, wanted_us: float) -> int:
        """How much one kernel has to do to take so long; `size` is where to begin."""
        for _ in range(2):
            wanted = int(size * wanted_us / self._time_us(name, size))
            # Triton compiles anew for a size that is no multiple of 16.
            size = max(16, min(wanted, self._source.numel()) // 16 * 16)
        return size

    def _time_us(self, name: str, size: int) -> float:
        """Of one launch among several in a row, right after steps: at the clock that they leave."""
        launch, (start, end) = self._kernels[name], new_events()
        launch(size)  # so that nothing is compiled between the steps and what is timed
        torch.cuda.synchronize()
        for _ in range(_HEATING_STEPS):
            self._heating_step()
        start.record()
        for _ in range(_LAUNCHES):
            launch(size)
        end.record()
        torch.cuda.synchronize()
        all_ms: float = start.elapsed_time(end)
        return all_ms * 1e3 / _LAUNCHES


def show(title: str, cases: list[Case]) -> None:
    """Print medians and what they are of the first case's."""
    table = Table(title=title)
    table.add_column("case")
    for name in ("step ms", "ratio", "load ms", "SM MHz", "W", "held by power"):
        table.add_column(name, justify="right")
    baseline = statistics.median(cases[0].step_ms)
    for case in cases:
        ms = statistics.median(case.step_ms)
        load = f"{statistics.median(case.load_ms):.2f}" if case.load_ms else "-"
        clocked = ["-"] * 3
        if case.mhz:
            mhz, watts, capped = map(statistics.median, (case.mhz, case.watts, case.capped))
            clocked = [f"{mhz:.0f}", f"{watts:.0f}", f"{capped:.0%}"]
        table.add_row(case.name, f"{ms:.2f}", f"{ms / baseline:.3f}", load, *clocked)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
