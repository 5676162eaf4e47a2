"""What `doctor` can find: every kind, how bad it is, and one finding of a kind."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["KINDS", "Finding", "Severity", "merge_ranks", "problems"]

_MOST_VARIANTS = 8


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing."""
    WARNING = "warning"
    """Overlap works, but less well, or less safely, than it could."""
    PROBLEM = "problem"
    """Overlap would be off."""


_BY_SEVERITY = {
    Severity.OK: (
        "caches",
        "devices",
        "environment",
        "gloo-group",
        "ops",
        "plan-files",
        "plugins",
        "process-group",
        "ranks-agree",
        "report",
        "versions",
    ),
    Severity.NOTE: (
        "caches-off",
        "cpp-wrapper",
        "cuda-graphs",
        "gloo-missing",
        "no-gpu",
        "one-rank",
        "plans-differ",
        "plugin-note",
        "plugins-left-out",
        "remote-cache",
        "report-costs-estimated",
        "report-note",
        "report-nothing",
        "simple-overlap",
        "single-process",
        "user-passes",
        "warm-start-off",
    ),
    Severity.WARNING: (
        "gloo-group-failed",
        "nccl-missing",
        "op-unknown",
        "overlap-scheduling",
        "plan-file-broken",
        "plan-folder-unusable",
        "python-differs",
        "report-costs-unknown",
        "report-op-undeclared",
        "report-pinned",
        "settings-differ",
        "suppress-errors",
        "torch-differs",
        "variable-unknown",
    ),
    Severity.PROBLEM: (
        "config-differs",
        "deterministic",
        "grouped-nodes",
        "job-incomplete",
        "no-distributed",
        "no-process-group",
        "ops-differ",
        "overlap-core-differs",
        "plugin-unusable",
        "plugins-differ",
        "ranks-missing",
        "report-illegal",
        "report-off",
        "store-unreachable",
        "switch-differs",
        "switch-invalid",
        "switched-off",
        "torch-names-missing",
        "torch-unsupported",
        "torch-unusable",
    ),
}

KINDS: Mapping[str, Severity] = MappingProxyType(
    {kind: severity for severity, kinds in _BY_SEVERITY.items() for kind in kinds}
)
"""Every kind of finding and its severity. docs/doctor.md describes each."""


@frozen(kw_only=True)
class Finding:
    """One thing that was found.

    Raises:
        KeyError: the kind is none of `KINDS`.
    """

    kind: str
    what: str
    do: str = ""
    """What to do about it; empty: nothing."""
    ranks: tuple[int, ...] = ()
    """The ranks that it was found on, where not all of them; ascending."""
    severity: Severity = field(init=False)

    @severity.default
    def _severity_of_kind(self) -> Severity:
        return KINDS[self.kind]


def problems(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Kinds of the problems, each once; empty: overlap would be on."""
    found = (finding.kind for finding in findings if finding.severity is Severity.PROBLEM)
    return tuple(dict.fromkeys(found))


def merge_ranks(found: Mapping[int, Sequence[Finding]]) -> tuple[Finding, ...]:
    """What was found on each rank, with equal findings said once.

    Of a kind that ranks find in many ways, such as a folder of each rank's own, a few are kept and
    the others are summed up.
    """
    ranks_of: dict[Finding, list[int]] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            ranks_of.setdefault(finding, []).append(rank)
    merged: list[Finding] = []
    left_out: dict[str, set[int]] = {}
    shown = Counter[str]()
    for finding, ranks in ranks_of.items():
        shown[finding.kind] += 1
        if shown[finding.kind] > _MOST_VARIANTS:
            left_out.setdefault(finding.kind, set()).update(ranks)
        else:
            everywhere = len(ranks) == len(found)
            merged.append(finding if everywhere else evolve(finding, ranks=tuple(ranks)))
    for kind, others in left_out.items():
        what = f"the same in {shown[kind] - _MOST_VARIANTS} other ways"
        merged.append(Finding(kind=kind, what=what, ranks=tuple(sorted(others))))
    return tuple(merged)
