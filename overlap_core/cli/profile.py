"""`overlap-core profile`: the exposed time that a profile shows beside the predicted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_core._words import counted

from ._format import format_us, plain
from ._progress import QUICK_BYTES, progress, size_of

if TYPE_CHECKING:
    from rich.console import Console

    from overlap_core.traces import MeasuredGather, Measurement

__all__ = ["profile"]

_CAPTION = """\
All in µs. cost, took: the gather's own time, predicted and measured, waiting
for late peers included. before, after: exposed time predicted in program order
and in the final order. measured: exposed time in the profile. ratio: to after."""
_MOST_OFF = 2.0
"""Times that differ by more than this factor are shown in colour."""


@click.command()
@click.argument("trace", metavar="TRACE", type=click.Path())
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def profile(trace: str, reports: tuple[str, ...], as_json: bool) -> None:
    """Set measured exposed time beside the predicted one, for each gather.

    TRACE is what torch.profiler's export_chrome_trace wrote on one rank, plain or gzipped, while
    the graphs of REPORT ran. A step that runs several graphs, such as forward and backward, needs
    the reports of all, in the order in which they run. The median over the profiled steps counts.
    """
    from overlap_core.report import load_report
    from overlap_core.traces import load_trace, measure_gathers

    with progress(wanted=size_of([trace, *reports]) > QUICK_BYTES) as say:
        say(f"reading {trace}")
        read = load_trace(trace)
        say("reading the reports")
        loaded = [load_report(path) for path in reports]
        say("finding the gathers of the reports in the trace")
        found = measure_gathers(read, loaded)
    names = [Path(path).stem for path in reports]
    if as_json:
        click.echo(json.dumps(_to_json(found, names), indent=2))
        return
    from rich.console import Console

    _print(Console(markup=False, highlight=False, emoji=False), found, names)


def _sums(found: Measurement) -> dict[str, int]:
    return {
        "exposed_ns_before": sum(gather.exposed_ns_before for gather in found.gathers),
        "exposed_ns_after": sum(gather.exposed_ns_after for gather in found.gathers),
        "exposed_ns": sum(gather.exposed_ns for gather in found.gathers),
    }


def _to_json(found: Measurement, names: list[str]) -> dict[str, Any]:
    return {
        "device": found.device,
        "steps": found.steps,
        "incomplete_steps": found.incomplete_steps,
        **_sums(found),
        "gathers": [
            {
                "report": names[gather.report],
                "name": gather.name,
                "gathers": gather.gathers,
                "group": gather.group,
                "cost_ns": gather.cost_ns,
                "took_ns": gather.took_ns,
                "exposed_ns_before": gather.exposed_ns_before,
                "exposed_ns_after": gather.exposed_ns_after,
                "exposed_ns": gather.exposed_ns,
                "ratio": gather.ratio,
            }
            for gather in found.gathers
        ],
    }


def _print(console: Console, found: Measurement, names: list[str]) -> None:
    sums = _sums(found)
    before, after, measured = (format_us(ns) for ns in sums.values())
    console.print(
        f"exposed {measured} µs measured, {after} µs predicted ({before} µs in program order)"
    )
    worst = max(found.gathers, key=lambda gather: abs(gather.exposed_ns - gather.exposed_ns_after))
    console.print(
        f"furthest off: {plain(worst.name)}, {format_us(worst.exposed_ns)} µs measured, "
        f"{format_us(worst.exposed_ns_after)} µs predicted"
    )
    weights = sum(gather.gathers for gather in found.gathers)
    calls = f" in {counted(len(found.gathers), 'call')}" if weights > len(found.gathers) else ""
    steps = counted(found.steps, "step")
    console.print(f"{counted(weights, 'gather')}{calls}, median of {steps}")
    if found.device == "cpu":
        console.print("no kernels in the trace: exposed is what the host was blocked in waits")
    if found.incomplete_steps:
        left_out = counted(found.incomplete_steps, "step")
        console.print(f"{left_out} left out, without all gathers")
    _print_table(console, found, names)


def _print_table(console: Console, found: Measurement, names: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for name in ("gather", "group", "cost", "took", "before", "after", "measured", "ratio"):
        left = name in ("gather", "group")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    table.columns[0].overflow = "fold"
    for gather in found.gathers:
        name = gather.name if gather.gathers == 1 else f"{gather.name} (of {gather.gathers})"
        name = name if len(names) == 1 else f"{names[gather.report]}: {name}"
        ratio = "-" if gather.ratio is None else f"{gather.ratio:.2f}"
        table.add_row(
            plain(name),
            plain(gather.group or "?"),
            _us(gather.cost_ns),
            Text(_us(gather.took_ns), style=_style(gather.cost_ns, gather.took_ns)),
            format_us(gather.exposed_ns_before),
            format_us(gather.exposed_ns_after),
            Text(format_us(gather.exposed_ns), style=_style_exposed(gather)),
            ratio,
        )
    console.print()
    console.print(table)
    console.print(_CAPTION, style="italic")


def _us(ns: int | None) -> str:
    return "?" if ns is None else format_us(ns)


def _style(predicted: int | None, measured: int | None) -> str:
    if not predicted or not measured:
        return ""
    off = max(predicted / measured, measured / predicted)
    return "red" if off > _MOST_OFF else ""


def _style_exposed(gather: MeasuredGather) -> str:
    """Exposed times are near zero where all is well, so only a loss that counts stands out."""
    loss = gather.exposed_ns - _MOST_OFF * gather.exposed_ns_after
    return "red" if loss > (gather.cost_ns or 0) / _MOST_OFF else ""
