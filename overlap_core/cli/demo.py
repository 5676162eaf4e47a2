"""`overlap-core demo`: a sharded transformer on real ranks of this machine, before and after."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._format import format_us
from ._progress import progress
from ._seconds import Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from overlap_core.testing.demo import DemoResult, DemoTask

__all__ = ["demo"]

_MODES = {"none": "identical", "compute": "slot", "skeleton": "pinned", "count": "abort"}
"""`--diverge` -> the mode in which the ranks must end."""

_TOKENS = 1024
"""Of the first rank: enough compute to hide gathers behind, and still quick to run."""


@click.command()
@click.option("--ranks", type=click.IntRange(2, 16), default=2, show_default=True)
@click.option(
    "--diverge",
    type=click.Choice(list(_MODES)),
    default="none",
    show_default=True,
    help="How the last rank's graph differs from the others'.",
)
@click.option("--blocks", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--uneven/--even",
    default=True,
    show_default=True,
    help="Ranks hold sequences of different lengths, or of the same length.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=Seconds(1),
    default=600.0,
    show_default=True,
    help="Seconds after which the ranks are ended.",
)
def demo(ranks: int, diverge: Any, blocks: int, uneven: bool, timeout_s: float) -> None:
    """Compile and run a small sharded transformer on this machine's CPUs, before and after.

    Each rank is a process of its own, and they talk through gloo. Exit status 1: a check failed.
    """
    from rich.console import Console

    from overlap_core.testing import RankFailure, TransformerConfig, run_ranks
    from overlap_core.testing.demo import DemoTask, demo_rank

    console = Console(markup=False, highlight=False)
    heads = -(-4 // ranks) * ranks  # attention spreads its heads over the ranks
    with tempfile.TemporaryDirectory(prefix="overlap-demo-") as folder:
        task = DemoTask(
            model=TransformerConfig(
                n_blocks=blocks, dim=32 * heads, n_heads=heads, ffn_dim=64 * heads, diverge=diverge
            ),
            splits=tuple(_TOKENS + _TOKENS // 8 * rank * uneven for rank in range(ranks)),
            pass_splits=uneven,
            dynamic=uneven or diverge == "compute",
            progress=folder,
        )
        _print_task(console, task)
        try:
            with _watched(Path(folder), ranks):
                results = run_ranks(demo_rank, ranks, task, deadline_s=timeout_s, tries=2)
        except RankFailure as failure:
            click.echo(f"Error: {failure}", err=True)
            sys.exit(1)
    checks = _checks(results, _MODES[diverge])
    _print_results(console, results)
    for name, good in checks:
        console.print(
            f"{'ok' if good else 'FAILED':6} {name}", style="green" if good else "bold red"
        )
    if not all(good for _, good in checks):
        sys.exit(1)


def _print_task(console: Console, task: DemoTask) -> None:
    sizes = "dynamic" if task.dynamic else "static"
    console.print(
        f"{len(task.splits)} ranks, {task.model.n_blocks} blocks, {task.model.n_parameters} weight "
        f"gathers; {sizes} shapes"
    )
    console.print(f"tokens of each rank: {', '.join(map(str, task.splits))}")


@contextlib.contextmanager
def _watched(folder: Path, ranks: int) -> Iterator[None]:
    """Say which phase the slowest rank is in."""
    with progress() as say:
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(folder, ranks, say, done), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _watch(folder: Path, ranks: int, say: Callable[[str], None], done: threading.Event) -> None:
    from overlap_core.testing.demo import PHASES, slowest_phase

    shown = -1
    while True:
        phase = slowest_phase(folder, ranks)
        if phase > shown:
            say(PHASES[phase])
            shown = phase
        if done.wait(0.2):
            return


def _checks(results: Sequence[DemoResult], mode: str) -> list[tuple[str, bool]]:
    modes = {result.mode for result in results}
    shared = [_shared_sequence(result) for result in results]
    alike = all(sequence == shared[0] for sequence in shared)
    return [
        (f"every rank ends in mode {mode}", modes == {mode}),
        (
            "outputs equal those of program order, bit for bit",
            all(result.outputs_equal for result in results),
        ),
        (f"the {len(shared[0])} collectives that ranks share run in one order on all ranks", alike),
    ]


def _shared_sequence(result: DemoResult) -> list[tuple[object, ...]]:
    """The run-time sequence in terms that are equal on all ranks.

    Where a rank has more communication than others (`--diverge skeleton` and `count`), that is on
    a group of its own and nobody waits for it. Lengths differ between ranks, sizes of weights not.
    """
    return [
        (call.op, call.group_size, call.dtypes, call.numel if "gather" in call.op else None)
        for call in result.after
        if call.group_size > 1
    ]


def _print_results(console: Console, results: Sequence[DemoResult]) -> None:
    from rich.table import Table
    from rich.text import Text

    for mode, why in dict.fromkeys((result.mode, result.why) for result in results):
        console.print(Text.assemble("mode: ", (mode or "none", "bold"), f" - {why}"))
    table = Table(caption="exposed: gather time that nothing hides, as predicted, in µs")
    for name in ("rank", "gathers", "hoisted", "exposed before", "exposed after"):
        table.add_column(name, justify="right")
    table.add_column("bit for bit")
    for result in results:
        table.add_row(
            str(result.rank),
            str(len(result.gathers)),
            str(sum(gather.hoisted for gather in result.gathers)),
            format_us(sum(gather.exposed_ns_before for gather in result.gathers)),
            format_us(sum(gather.exposed_ns_after for gather in result.gathers)),
            "equal" if result.outputs_equal else "DIFFERENT",
        )
    console.print(table)
