"""Results as tables for people, and as JSON lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
from rich.table import Table

from .ranks import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .progress import Report
    from .timing import Round, Summary
    from .traces import StepProfile

__all__ = ["Lines", "Result", "print_tables"]


@attrs.define(kw_only=True)
class Result:
    """What is known of one contender at one size."""

    label: str
    failed: str = ""
    """Why there is no more, first line only; `skipped: ...` where it was not to be expected."""
    compile_s: float | None = None
    rounds: list[Round] = attrs.field(factory=list)
    summary: Summary | None = None
    equal: bool | None = None
    """Whether what a step returns equals the reference's bit for bit on all ranks; None: not
    compared."""
    largest_difference: float | None = None
    own_bytes: int = 0
    """Parameters that stay on a rank."""
    peak_bytes: int | None = None
    profile: StepProfile | None = None
    transfer_ms: float | None = None
    """Gather time of a step without waiting for late peers: each gather's least over ranks."""
    pass_note: str = ""


class Lines:
    """A file of JSON lines, written as results come; without a folder it writes nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "results.jsonl").open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Add a line; attrs classes become objects."""
        if self._file is not None:
            text = json.dumps({"kind": kind, **values}, default=_plain)
            self._file.write(text + "\n")
            self._file.flush()


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    if isinstance(value, BaseException):
        return first_line(value)
    return str(value)


def print_tables(report: Report, title: str, results: Sequence[Result]) -> None:
    """Print step times, and where the time goes if there are profiles."""
    baseline = next((r.summary for r in results if r.label == "unsharded" and r.summary), None)
    report.show(_times(title, results, baseline))
    if any(result.profile for result in results):
        report.show(_profiles(title, results), _gather_groups(title, results))
    for result in results:
        if result.failed:
            report.show(f"{result.label}: {result.failed}")
        if result.pass_note:
            report.show(f"{result.label}: {result.pass_note}")


def _times(title: str, results: Sequence[Result], baseline: Summary | None) -> Table:
    table = Table(title=f"{title}: milliseconds a step, medians over rounds, slowest rank")
    table.add_column("contender", overflow="fold")
    for name in (
        *("back to back", "ratio", "spread", "synchronized", "ratio", "spread"),
        *("host", "compile s", "peak GB", "bits"),
    ):
        table.add_column(name, justify="right")
    clocked = any(result.summary and result.summary.sm_mhz for result in results)
    for name in ("SM MHz", "W", "held by power") if clocked else ():
        table.add_column(name, justify="right")
    for result in results:
        row = result.summary
        if row is None:
            skipped = result.failed.startswith("skipped")
            table.add_row(result.label, "skipped" if skipped else "failed")
            continue
        table.add_row(
            result.label,
            f"{row.back_to_back_ms:.2f}",
            _ratio(row.back_to_back_ms, baseline.back_to_back_ms if baseline else None),
            f"{row.back_to_back_spread_ms:.2f}",
            f"{row.synchronized_ms:.2f}",
            _ratio(row.synchronized_ms, baseline.synchronized_ms if baseline else None),
            f"{row.synchronized_spread_ms:.2f}",
            f"{row.host_ms:.2f}",
            _number(result.compile_s, 1),
            _number(None if result.peak_bytes is None else result.peak_bytes / 1e9, 2),
            _bits(result),
            *(
                (_number(row.sm_mhz, 0), _number(row.watts, 0), _share(row.capped))
                if clocked
                else ()
            ),
        )
    return table


def _profiles(title: str, results: Sequence[Result]) -> Table:
    table = Table(title=f"{title}: where a profiled step goes, milliseconds, rank 0")
    table.add_column("contender", overflow="fold")
    for name in (
        *("step", "compute", "gathers alone", "a2a alone", "reduces alone", "other", "idle"),
        *("gathers", "total", "transfer", "exposed", "of it head", "past head", "beside a2a"),
        *("a2a total", "reduces total"),
    ):
        table.add_column(name, justify="right")
    for result in results:
        found = result.profile
        if found is None:
            continue
        table.add_row(
            result.label,
            *(
                f"{value:.2f}"
                for value in (
                    *(found.step_ms, found.compute_ms, found.gather_exposed_ms),
                    *(found.all_to_all_alone_ms, found.reduce_alone_ms),
                    *(found.other_ms, found.idle_ms),
                )
            ),
            str(found.gathers),
            f"{found.gather_ms:.2f}",
            _number(result.transfer_ms, 2),
            _share(found.exposed_share),
            f"{found.head_exposed_ms:.2f}",
            _share(found.past_head_share),
            f"{found.gather_exposed_beside_all_to_all_ms:.2f}",
            f"{found.all_to_all_ms:.2f}",
            f"{found.reduce_ms:.2f}",
        )
    return table


def _gather_groups(title: str, results: Sequence[Result]) -> Table:
    table = Table(title=f"{title}: gathers by group (stream), milliseconds of a step, rank 0")
    table.add_column("contender", overflow="fold")
    for name in ("stream", "gathers", "total", "exposed ms", "exposed", "of it head", "past head"):
        table.add_column(name, justify="right")
    for result in results:
        for group in result.profile.gather_groups if result.profile else ():
            table.add_row(
                result.label,
                str(group.stream),
                str(group.gathers),
                f"{group.gather_ms:.2f}",
                f"{group.exposed_ms:.2f}",
                _share(group.exposed_ms / group.gather_ms if group.gather_ms else None),
                f"{group.head_exposed_ms:.2f}",
                _share(group.past_head_share),
            )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _ratio(value: float, baseline: float | None) -> str:
    return "-" if not baseline else f"{value / baseline:.3f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _bits(result: Result) -> str:
    if result.equal is None:
        return "-"
    return "equal" if result.equal else f"differ by {result.largest_difference:.2g}"
