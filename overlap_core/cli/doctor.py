"""`overlap-core doctor`: what would keep overlap off here, and what to do about it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._format import plain
from ._progress import progress
from ._seconds import Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.doctor.findings import Finding
    from overlap_core.doctor.job import Table

__all__ = ["doctor"]

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_PROBLEM_FOUND, _BAD_INPUT = 1, 2


@click.command()
@click.argument("reports", metavar="[REPORT]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=Seconds(0, or_more=False),
    default=60.0,
    show_default=True,
    help="How long to wait for other ranks.",
)
def doctor(reports: tuple[Path, ...], as_json: bool, timeout_s: float) -> None:
    """Check this machine, and under torchrun this job.

    \b
      overlap-core doctor
      torchrun --nproc-per-node 8 --no-python overlap-core doctor

    Each finding is "ok", a "note", a "warning" or a "problem", with what to do. Under torchrun the
    ranks compare what they find, and rank 0 prints. REPORTs are files that report.save(path)
    wrote: what they warn of is repeated. Exit status 1: overlap would be off.
    """
    from overlap_core.doctor.place import find_job, is_in_job

    place = find_job(os.environ) if is_in_job(os.environ) else None
    if place is None:
        sys.exit(_alone(reports, as_json))
    from overlap_core.doctor.findings import Finding
    from overlap_core.doctor.job import Table
    from overlap_core.doctor.place import connect

    if isinstance(place, Finding):
        sys.exit(_print([place], as_json))
    store = connect(place, timeout_s)
    if isinstance(store, Finding):
        sys.exit(_print([store], as_json))
    table = Table(
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        attempt=place.attempt,
        timeout_s=timeout_s,
    )
    sys.exit(_follow(table, as_json) if place.rank else _lead(table, reports, as_json))


def _alone(reports: Sequence[Path], as_json: bool) -> int:
    from overlap_core.doctor.findings import Finding
    from overlap_core.doctor.look import look
    from overlap_core.doctor.machine import check_rank

    about_reports = _check_reports(reports)
    job = Finding(
        kind="single-process",
        what="one process was checked, and no job",
        do="to check a job: torchrun --nproc-per-node 8 --no-python overlap-core doctor",
    )
    return _print([*check_rank(look()), job, *about_reports], as_json)


def _lead(table: Table, reports: Sequence[Path], as_json: bool) -> int:
    """Rank 0 of a job. Whatever happens, the others hear that it is over."""
    from overlap_core.doctor.job import check_job, end_job
    from overlap_core.doctor.look import look

    status = _BAD_INPUT
    try:
        # The job first: a file that cannot be read must not keep the others waiting.
        with progress() as say:
            say("looking at this machine, and waiting for the other ranks")
            found = check_job(table, look(rank=0))
        status = _print([*found, *_check_reports(reports)], as_json)
    finally:
        end_job(table, status)
    return status


def _follow(table: Table, as_json: bool) -> int:
    from overlap_core.doctor.job import follow_job
    from overlap_core.doctor.look import look

    answer = follow_job(table, look(rank=table.rank))
    # Only where there is no rank 0 that could say it.
    return answer if isinstance(answer, int) else _print([answer], as_json)


def _check_reports(paths: Sequence[Path]) -> list[Finding]:
    if not paths:
        return []
    from overlap_core.doctor.reports import check_report
    from overlap_core.report import load_report

    return [found for path in paths for found in check_report(str(path), load_report(path))]


def _print(findings: Sequence[Finding], as_json: bool) -> int:
    """Print the findings and what they come to; returns the exit status."""
    from overlap_core.doctor.findings import problems

    found = problems(findings)
    if as_json:
        data = {"overlap": not found, "findings": [_to_json(finding) for finding in findings]}
        click.echo(json.dumps(data, indent=2))
    else:
        _print_lines(findings)
        words = f"would be off: {', '.join(found)}" if found else "would be on"
        click.echo(f"overlap {words}")
    sys.stdout.flush()
    return _PROBLEM_FOUND if found else 0


def _to_json(finding: Finding) -> dict[str, object]:
    return {
        "severity": str(finding.severity),
        "kind": finding.kind,
        "ranks": list(finding.ranks),
        "what": finding.what,
        "do": finding.do,
    }


def _print_lines(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    from overlap_core.report import ranks_in_words

    grid = Grid.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        where = f" ({ranks_in_words(finding.ranks)})" if finding.ranks else ""
        text = Text(f"{finding.kind}{where}: {plain(finding.what).rstrip('.')}")
        if finding.do:
            text.append(f". To do: {plain(finding.do)}", style="italic")
        grid.add_row(Text(str(finding.severity), _STYLES[finding.severity]), text)
    Console(markup=False, highlight=False, emoji=False).print(grid)
