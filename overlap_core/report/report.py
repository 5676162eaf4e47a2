"""`Report`: the outcome of one compiled graph, with what plugins add and ways to sum it up."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields, frozen

from overlap_core.outcome import RankOutcome
from overlap_core.placement import Verdict
from overlap_core.placement.liveness import timeline_of_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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

    @property
    def in_flight_before(self) -> tuple[tuple[int, int], ...]:
        """Bytes of weight gathers between launch and first wait, over program order.

        Pairs of a place in the order and the bytes from there up to the next pair's place; none
        before the first. A gather of unknown size counts as nothing.
        """
        return () if self.graph is None else self._in_flight(range(len(self.graph.nodes)))

    @property
    def in_flight_after(self) -> tuple[tuple[int, int], ...]:
        """As `in_flight_before`, over the final order."""
        return self._in_flight(self.positions)

    @property
    def most_bytes_before(self) -> int:
        """The most bytes of weight gathers in flight at once in program order."""
        return max((nbytes for _, nbytes in self.in_flight_before), default=0)

    @property
    def most_bytes_after(self) -> int:
        """The most bytes of weight gathers in flight at once in the final order."""
        return max((nbytes for _, nbytes in self.in_flight_after), default=0)

    def _in_flight(self, order: Sequence[int]) -> tuple[tuple[int, int], ...]:
        if self.graph is None:
            return ()
        place = self.graph.index
        launches = [place[gather.name] for gather in self.gathers]
        communicates = {place[name] for name in self.collectives}
        return timeline_of_bytes(self.graph, order, launches, communicates)

    def save(self, path: str | PathLike[str], host: PluginHost | None = None) -> None:
        """Write the report file (JSON, version 3) that `load` reads back to an equal report.

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
