"""What would keep overlap off on this machine and in this job, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .findings import KINDS, Finding, Severity, problems
from .look import look
from .machine import check_process_group, check_rank

if TYPE_CHECKING:
    from overlap_core.config import OverlapConfig

__all__ = ["KINDS", "Finding", "Severity", "examine", "problems"]


def examine(config: OverlapConfig | None = None) -> tuple[Finding, ...]:
    """Check a running program, with all that it has set so far. Waits for no other rank.

    Unlike the command, it sees settings that are made in code, the process group, the ops that
    were registered by now, and the reports of the graphs that were compiled by now.

    Args:
        config: as it is given to `enable`; None: the defaults.

    Raises:
        ConfigError: `config` is no `OverlapConfig`.
    """
    facts = look(config)
    found = [*check_rank(facts), *check_process_group(facts)]
    if not facts.torch_fault:
        from overlap_core.report import reports

        from .reports import check_report

        for number, report in enumerate(reports()):
            found += check_report(f"reports()[{number}]", report)
    return tuple(found)
