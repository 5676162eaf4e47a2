"""What report files say that a user should do something about. Pure functions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from overlap_core.costs import CostSource
from overlap_core.ranks import Mode
from overlap_core.report import cost_entries

from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlap_core.report import Report

__all__ = ["check_report"]

_UNDECLARED = "communicates inside and is not registered"
_OTHER_NUMBERS = "different numbers of weight gathers"
_MOST_REASONS = 4

_LATE = (
    "look why the named rank was late or died; if it only compiles more slowly, raise deadline_s "
    "in OverlapConfig"
)
_PLUGINS = (
    "install the same plugins and versions on all ranks; `overlap-core doctor` under torchrun "
    "names the difference"
)
_REMEDIES = (
    ("switched off by OVERLAP_CORE=0", "unset it on the named rank, or set it on all ranks"),
    ("deterministic algorithms", "switch them off, for instance in a run that need not be exact"),
    ("no process group", "call torch.distributed.init_process_group before the first compile"),
    ("switched off by OverlapConfig", "leave `enabled` at True, on all ranks"),
    ("on without overlap:", "mend what the reason names there, or set OVERLAP_CORE=0 on all ranks"),
    ("runs overlap_core", "install one version of overlap-core on all ranks"),
    ("runs torch", "install one version of torch on all ranks"),
    ("the pass failed", "report this, with the report file"),
    ("different plugins", _PLUGINS),
    ("different configuration", "give every rank the same OverlapConfig"),
    (_OTHER_NUMBERS, "shard and use the same parameters on all ranks"),
    ("GroupedSchedulerNode", "take the named pass out of reorder_for_compute_comm_overlap_passes"),
    ("does not communicate with", "make every rank of a group use it in this graph"),
    ("will not come", "call the same compiled functions in the same order on all ranks"),
    ("did not reach step", _LATE),
    ("gave up on step", _LATE),
    ("was lost in the middle", _LATE),
    ("PluginError", "fix the named plugin, or leave it out with OVERLAP_CORE_DISABLE_PLUGINS"),
)
"""Words in the reason for program order -> what to do; the first that fits."""


def check_report(name: str, report: Report) -> tuple[Finding, ...]:
    """All findings about one report.

    Args:
        name: of its file, which begins every finding.
        report: of one graph on one rank.
    """
    checks = (_check_outcome, _check_notes, _check_costs)
    return tuple(finding for check in checks for finding in check(name, report))


def _check_outcome(name: str, report: Report) -> Iterator[Finding]:
    if not report.legal:
        yield Finding(
            kind="report-illegal",
            what=f"{name}: the order is not legal",
            do="set OVERLAP_CORE=0 on all ranks, and report this with the report file",
        )
    elif _had_nothing_to_gain(report):
        yield Finding(kind="report-nothing", what=f"{name}: the graph has no weight gathers")
    elif not report.committed:
        yield Finding(
            kind="report-off",
            what=f"{name}: the graph is in program order: {report.why}",
            do=_remedy(report.why, name),
        )
    elif report.mode is Mode.PINNED:
        yield Finding(
            kind="report-pinned",
            what=f"{name}: no gather may pass other communication: {report.why}",
            do=f"see how the ranks' communication differs: overlap-core explain {name}",
        )
    else:
        yield Finding(
            kind="report",
            what=f"{name}: mode {report.mode}, {report.hidden} of {len(report.gathers)} gathers "
            "hidden",
        )


def _had_nothing_to_gain(report: Report) -> bool:
    """Whether no rank has a weight gather, as far as is known."""
    if report.graph is None or report.gathers or _OTHER_NUMBERS in report.why:
        return False
    known = not any(entry.weight_gather for entry in report.skeleton)
    return known and all(vote.can and not vote.weight_gathers for vote in report.votes)


def _remedy(why: str, name: str) -> str:
    known = (do for words, do in _REMEDIES if words in why)
    return next(known, f"look at the votes: overlap-core explain {name}")


def _check_notes(name: str, report: Report) -> Iterator[Finding]:
    for note in report.notes:
        if _UNDECLARED in note:
            what, _, do = note.partition(". Register")
            yield Finding(
                kind="report-op-undeclared", what=f"{name}: {what}", do=f"register{do}".strip()
            )
        else:
            yield Finding(kind="report-note", what=f"{name}: {note}")


def _check_costs(name: str, report: Report) -> Iterator[Finding]:
    if not report.costs:
        return
    entries = cost_entries(report)
    unknown = Counter(entry.why or "no reason given" for entry in entries if entry.ns is None)
    estimated = Counter(
        entry.why
        for entry in entries
        if entry.ns is not None and entry.source is CostSource.ANALYTICAL and entry.why
    )
    look = f"see which: overlap-core explain {name} --costs"
    if unknown:
        yield Finding(
            kind="report-costs-unknown",
            what=f"{name}: the time of {unknown.total()} of {len(entries)} kinds of node is "
            f"unknown, and counts as nothing: {_reasons(unknown)}",
            do=look,
        )
    if estimated:
        yield Finding(
            kind="report-costs-estimated",
            what=f"{name}: the time of {estimated.total()} of {len(entries)} kinds of node could "
            f"not be measured and is estimated: {_reasons(estimated)}",
            do=look,
        )


def _reasons(counted: Counter[str]) -> str:
    words = [f"{why} ({count})" for why, count in counted.most_common(_MOST_REASONS)]
    left_out = len(counted) - _MOST_REASONS
    return "; ".join(words) + (f"; and {left_out} more reasons" if left_out > 0 else "")
