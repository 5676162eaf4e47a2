"""`overlap-core explain`: why each gather is where it is, and what each node's time rests on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlap_core._words import counted

from ._format import format_us, gather_to_json, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

    from overlap_core.outcome import GatherOutcome
    from overlap_core.report import CostEntry, Report

__all__ = ["explain"]

_GATHER_KEYS: dict[str, Callable[[GatherOutcome], Any]] = {
    "from": lambda gather: gather.source,
    "to": lambda gather: gather.target,
    "slot": lambda gather: gather.slot,
    "gather": lambda gather: gather.name,
    "verdict": lambda gather: gather.verdict,
    "before": lambda gather: -gather.exposed_ns_before,
    "after": lambda gather: -gather.exposed_ns_after,
}
_COST_KEYS: dict[str, Callable[[CostEntry], Any]] = {
    "total": lambda entry: 1 if entry.total_ns is None else -entry.total_ns,
    "time": lambda entry: 1 if entry.ns is None else -entry.ns,
    "nodes": lambda entry: -len(entry.nodes),
    "source": lambda entry: entry.source,
    "key": lambda entry: entry.key,
}
"""Both: what `--sort` takes -> by what it sorts, times and numbers of nodes largest first."""

_MOST_VOTES = 8
_VERDICT_STYLES = {"hidden": "green", "unmoved": "red"}


@click.command()
@click.argument("report", metavar="REPORT", type=click.Path(path_type=Path))
@click.option("--costs", "with_costs", is_flag=True, help="Show the cost table too.")
@click.option(
    "--sort",
    metavar="KEY",
    type=click.Choice([*_GATHER_KEYS, *_COST_KEYS]),
    help=f"Sort the gathers by {', '.join(_GATHER_KEYS)}, or the costs by {', '.join(_COST_KEYS)}.",
)
@click.option(
    "--filter", "pattern", metavar="TEXT", default="", help="Show only rows that contain TEXT."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, costs included.")
def explain(report: Path, with_costs: bool, sort: str | None, pattern: str, as_json: bool) -> None:
    """Say why each gather of a REPORT is where it is.

    The first line sums up: the mode, predicted exposed time in program order and in the final
    order, how many gathers are hidden, and what limits the others. REPORT is a file that
    report.save(path) wrote. Exit status 1: the order is not legal.
    """
    from overlap_core.report import cost_entries, load_report

    if sort in _COST_KEYS and not (with_costs or as_json):
        raise click.UsageError(f"--sort {sort} sorts the cost table: add --costs")
    found = load_report(report)
    gathers = [g for g in found.gathers if _matches(pattern, g.name, g.verdict, g.why)]
    gathers.sort(key=_GATHER_KEYS.get(sort or "", _GATHER_KEYS["from"]))
    entries = cost_entries(found) if found.costs else ()
    shown = [e for e in entries if _matches(pattern, e.key, e.source, e.why)]
    shown.sort(key=_COST_KEYS.get(sort or "", _COST_KEYS["total"]))
    if as_json:
        click.echo(json.dumps(_to_json(found, gathers, shown), indent=2))
    else:
        from rich.console import Console

        console = Console(markup=False, highlight=False, emoji=False)
        _print_summary(console, found)
        _print_gathers(console, found, gathers)
        if with_costs:
            _print_costs(console, shown, len(entries))
    if not found.legal:
        sys.exit(1)


def _matches(pattern: str, *cells: str) -> bool:
    return any(pattern.casefold() in cell.casefold() for cell in cells)


def _to_json(
    report: Report, gathers: Sequence[GatherOutcome], entries: Sequence[CostEntry]
) -> dict[str, Any]:
    from overlap_core.report import votes_in_words

    has_graph = report.graph is not None
    return {
        "rank": report.rank,
        "scope": list(report.scope),
        "mode": str(report.mode),
        "why": report.why,
        "committed": report.committed,
        "legal": report.legal,
        "exposed_ns_before": report.exposed_ns_before,
        "exposed_ns_after": report.exposed_ns_after,
        "hidden": report.hidden,
        "total": len(report.gathers),
        "calls": [
            [gather.name for gather in report.gathers if gather.call == number]
            for number in range(len(report.coalesced))
        ],
        "limits": report.limits,
        "in_flight_bytes_before": report.most_bytes_before if has_graph else None,
        "in_flight_bytes_after": report.most_bytes_after if has_graph else None,
        "in_flight_before": [list(step) for step in report.in_flight_before],
        "in_flight_after": [list(step) for step in report.in_flight_after],
        "votes": list(votes_in_words(report.votes)),
        "notes": list(report.notes),
        "gathers": [gather_to_json(gather) for gather in gathers],
        "costs": [
            {
                "key": entry.key,
                "source": str(entry.source),
                "why": entry.why,
                "ns": entry.ns,
                "nodes": len(entry.nodes),
            }
            for entry in entries
        ],
        "sections": {section.plugin: section.content for section in report.sections},
    }


def _print_summary(console: Console, report: Report) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from overlap_core.report import bytes_in_words, ranks_in_words, votes_in_words

    before, after = format_us(report.exposed_ns_before), format_us(report.exposed_ns_after)
    parts = [f"exposed {before} -> {after} µs"]
    parts.append(f"{report.hidden} of {counted(len(report.gathers), 'gather')} hidden")
    if report.coalesced:
        alone = sum(gather.call is None for gather in report.gathers)
        parts.append(f"in {counted(len(report.coalesced) + alone, 'call')}")
    parts += [f"{count} {verdict}" for verdict, count in report.limits.items()]
    line = ", ".join(parts) if report.gathers else "no weight gathers"
    console.print(Text.assemble("mode ", (str(report.mode), "bold"), f": {plain(line)}"))
    others = [rank for rank in report.scope if rank != report.rank]
    together = f", decided together with {ranks_in_words(others)}" if others else ""
    kept = "" if report.committed else "; program order was kept"
    console.print(f"rank {report.rank}{together}{kept}")
    console.print(f"why: {plain(report.why)}")
    if report.gathers and report.graph is not None:
        peaks = map(bytes_in_words, (report.most_bytes_before, report.most_bytes_after))
        console.print(f"most in flight: {' -> '.join(peaks)}")
    votes = votes_in_words(report.votes)
    if len(votes) > _MOST_VOTES:
        votes = (*votes[:_MOST_VOTES], f"and {len(votes) - _MOST_VOTES} more: see --json")
    for title, lines in (("votes", votes), ("notes", report.notes)):
        if lines:
            console.print(f"{title}:")
            for text in lines:
                console.print(Padding.indent(Text(plain(text)), 2))
    for section in report.sections:
        content = json.dumps(section.content)
        console.print(f"{plain(section.plugin)}: {plain(content)}")
    if not report.legal:
        console.print("the order is not legal", style="bold red")


def _make_table(title: str, columns: Sequence[str], caption: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        caption=caption,
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    for name in columns:
        numeric = name in ("from", "to", "slot", "before", "after", "µs", "nodes", "total µs")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    table.columns[0].overflow = "fold"
    return table


def _title(what: str, shown: int, total: int) -> str:
    return what if shown == total else f"{what}: {shown} of {total}"


def _print_gathers(console: Console, report: Report, gathers: Sequence[GatherOutcome]) -> None:
    from rich.text import Text

    if not report.gathers:
        return
    table = _make_table(
        _title("Weight gathers", len(gathers), len(report.gathers)),
        ("gather", "from", "to", "slot", "before", "after", "verdict and why"),
        "before, after: predicted exposed time in program order and as it is now, in µs",
    )
    for gather in gathers:
        # What the report as a whole says already would fill this column without saying more.
        why = gather.why.replace(f" ({report.why})", "").replace(f": {report.why}", "")
        style = _VERDICT_STYLES.get(gather.verdict, "yellow")
        table.add_row(
            plain(gather.name),
            str(gather.source),
            str(gather.target),
            str(gather.slot),
            format_us(gather.exposed_ns_before),
            format_us(gather.exposed_ns_after),
            Text.assemble((plain(gather.verdict), style), f": {plain(why)}"),
        )
    console.print()
    console.print(table)


def _print_costs(console: Console, entries: Sequence[CostEntry], total: int) -> None:
    table = _make_table(
        _title("Costs", len(entries), total),
        ("key", "source", "µs", "nodes", "total µs"),
        "µs: of each node; nodes: how many share the entry",
    )
    reasons: dict[str, int] = {}
    for entry in entries:
        source = str(entry.source)
        if entry.why:
            source += f" ({reasons.setdefault(entry.why, len(reasons) + 1)})"
        table.add_row(
            plain(entry.key),
            source,
            "?" if entry.ns is None else format_us(entry.ns),
            str(len(entry.nodes)),
            "?" if entry.total_ns is None else format_us(entry.total_ns),
        )
    console.print()
    console.print(table)
    for why, number in reasons.items():
        console.print(f"({number}) {plain(why)}")
