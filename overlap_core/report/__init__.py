"""Reports of compiled graphs: what was decided and why, as an object, a file and words."""

from __future__ import annotations

from .costs import CostEntry, cost_entries, request_in_words
from .files import load_report, report_from_json, report_to_json, save_report
from .report import Report, Section
from .words import bytes_in_words, ranks_in_words, votes_in_words

__all__ = [
    "CostEntry",
    "Report",
    "Section",
    "bytes_in_words",
    "cost_entries",
    "load_report",
    "ranks_in_words",
    "report_from_json",
    "report_to_json",
    "reports",
    "request_in_words",
    "save_report",
    "votes_in_words",
]


def reports() -> tuple[Report, ...]:
    """Reports of the graphs that this process compiled with overlap installed, newest last.

    A graph that is compiled for new process groups starts them anew.
    """
    from overlap_core.inductor import records  # a report that is read from a file needs no torch

    return tuple(Report.of(outcome) for outcome in records())
