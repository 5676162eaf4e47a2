"""`Report`: the outcome of one compiled graph, with what plugins add and ways to sum it up."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields, frozen

from overlap_core.outcome import RankOutcome
from overlap_core.placement import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from overlap_core.host import PluginHost

__all__ = ["Report", "Section"]


@frozen(kw_only=True)
class Section:
    """What one plugin adds to a report: plain data that JSON can hold."""

    plugin: str
    content: Mapping[str, Any]


@frozen(kw_only=True)
class Report(RankOutcome):
    """Everything that led to one graph's order on one rank: the outcome itself, and sections."""

    sections: tuple[Section, ...] = ()

    @classmethod
    def of(cls, outcome: RankOutcome, host: PluginHost | None = None) -> Report:
        """The report of an outcome; `host`'s plugins add their sections, replacing others.

        Raises:
            PluginError: a plugin fails to make its section.
        """
        if isinstance(outcome, Report):
            report = outcome
        else:
            report = cls(**{a.name: getattr(outcome, a.name) for a in fields(RankOutcome)})
        if host is None:
            return report
        sections = host.report_sections(report)
        return evolve(
            report, sections=tuple(Section(plugin=name, content=data) for name, data in sections)
        )

    @property
    def hidden(self) -> int:
        """How many weight gathers have their time hidden."""
        return sum(gather.verdict == Verdict.HIDDEN for gather in self.gathers)

    @property
    def limits(self) -> dict[str, int]:
        """What keeps the other gathers exposed: verdict and how many, in the verdicts' order."""
        found = Counter(gather.verdict for gather in self.gathers)
        del found[Verdict.HIDDEN]
        known = [str(verdict) for verdict in Verdict if verdict in found]
        return {verdict: found[verdict] for verdict in (*known, *sorted({*found} - {*known}))}

    def save(self, path: str | PathLike[str], host: PluginHost | None = None) -> None:
        """Write the report file (JSON, version 2) that `load` reads back to an equal report.

        Raises:
            ReportFileError: the file cannot be written.
            PluginError: one of `host`'s plugins fails to make its section.
        """
        from .files import save_report

        save_report(self, path, host)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Report:
        """Read a report file.

        Raises:
            ReportFileError: the file is no report that this version reads; says where and why.
        """
        from .files import load_report

        return load_report(path)
