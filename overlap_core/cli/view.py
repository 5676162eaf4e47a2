"""`overlap-core view`: timelines of reports, as a page or as a trace for Perfetto."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import click

from overlap_core._words import counted

from ._progress import QUICK_BYTES, progress, size_of

__all__ = ["view"]


@click.command()
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o", "--output", metavar="FILE", required=True, type=click.Path(), help="The file to write."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "perfetto"]),
    default="html",
    show_default=True,
    help="A page for any browser, or a trace for ui.perfetto.dev and chrome://tracing.",
)
def view(reports: tuple[str, ...], output: str, kind: str) -> None:
    """Draw the predicted timeline of each REPORT, before above after.

    Lanes are the host, the compute stream and each process group; exposed time has one colour.
    The page needs no network and no other file. REPORT is a file that report.save(path) wrote;
    give one for each rank to see the ranks below each other.
    """
    from overlap_core.report import load_report
    from overlap_core.view import build_timelines, render_page, to_chrome_trace

    _refuse_overwriting(reports, output)
    loaded = []
    with progress(wanted=size_of(reports) > QUICK_BYTES) as say:
        for number, path in enumerate(reports, start=1):
            say(f"reading report {number} of {len(reports)}")
            loaded.append((Path(path).stem, load_report(path)))
        say(f"predicting {2 * len(loaded)} timelines")
        timelines = build_timelines(loaded)
        say(f"drawing {output}")
        if kind == "html":
            text = render_page(timelines)
        else:
            text = json.dumps(to_chrome_trace(timelines), allow_nan=False)
    try:
        # Names may hold what UTF-8 can't; JSON escapes it, and a page can do without.
        Path(output).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise click.BadParameter(
            f"{output}: cannot be written: {error.strerror or error}", param_hint="'-o'"
        ) from None
    click.echo(f"{output}: {counted(len(timelines), 'report')}")


def _refuse_overwriting(reports: tuple[str, ...], output: str) -> None:
    for path in reports:
        with suppress(OSError, ValueError):  # one of them is not there
            if Path(output).samefile(path):
                raise click.BadParameter(
                    f"{output}: is a report to be read; give another file", param_hint="'-o'"
                )
