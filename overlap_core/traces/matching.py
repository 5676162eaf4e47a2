"""Matching what a step shows with what reports expect, by order on each queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from attrs import frozen

from overlap_core.errors import TraceFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .expected import Call

__all__ = ["Matched", "match_steps"]

S = TypeVar("S")


@frozen(kw_only=True)
class Matched(Generic[S]):
    """What was seen of each call, for each run of the graphs."""

    runs: list[list[tuple[Call, S]]]
    incomplete: int
    """Steps that don't hold a whole number of runs."""


def match_steps(
    expected: Mapping[str, Sequence[Call]],
    steps: Sequence[Mapping[str, Sequence[S]]],
    *,
    by_name: bool,
) -> Matched[S]:
    """Pair calls with samples; a step may run the graphs more than once.

    Args:
        expected: calls of each queue in one run.
        steps: samples of each queue in each step, in order.
        by_name: whether queues have the same names in both; if not, they are told apart by how
            many samples they have.

    Raises:
        TraceFileError: no step has the samples that the calls need, or queues cannot be told
            apart.
    """
    if not by_name:
        names = _name_queues(expected, steps)
        steps = [{names[q]: seen for q, seen in step.items() if q in names} for step in steps]
    runs: list[list[tuple[Call, S]]] = []
    incomplete = 0
    for step in steps:
        count = _runs_in(expected, step)
        incomplete += count == 0
        for run in range(count):
            pairs: list[tuple[Call, S]] = []
            for queue, calls in expected.items():
                seen = step[queue][run * len(calls) : (run + 1) * len(calls)]
                pairs += zip(calls, seen, strict=True)
            runs.append(pairs)
    if not runs:
        raise TraceFileError(_mismatch(expected, steps))
    return Matched(runs=runs, incomplete=incomplete)


def _runs_in(expected: Mapping[str, Sequence[Call]], step: Mapping[str, Sequence[S]]) -> int:
    """How often a step runs the graphs; 0 if it isn't a whole number on all queues."""
    counts = {divmod(len(step.get(queue, ())), len(calls)) for queue, calls in expected.items()}
    whole, rest = counts.pop() if len(counts) == 1 else (0, 0)
    return 0 if rest else whole


def _name_queues(
    expected: Mapping[str, Sequence[Call]], steps: Sequence[Mapping[str, Sequence[S]]]
) -> dict[str, str]:
    """For each queue of the trace the group that it must be, by how much happens on it."""
    seen: dict[str, int] = {}
    for step in steps:
        for queue, samples in step.items():
            seen[queue] = seen.get(queue, 0) + len(samples)
    by_share = sorted(seen, key=lambda queue: (-seen[queue], queue))
    groups = sorted(expected, key=lambda group: (-len(expected[group]), group))
    sizes = [len(expected[group]) for group in groups]
    if len(by_share) != len(groups) or len(set(sizes)) != len(sizes):
        raise TraceFileError(
            f"the trace has all-gathers on {len(by_share)} streams without the names of their "
            f"process groups, which can't be told apart for the {len(groups)} groups of the "
            "report: record it with ProfilerActivity.CPU too"
        )
    return dict(zip(by_share, groups, strict=True))


def _mismatch(
    expected: Mapping[str, Sequence[Call]], steps: Sequence[Mapping[str, Sequence[S]]]
) -> str:
    wanted = ", ".join(f"{len(calls)} on {queue!r}" for queue, calls in expected.items())
    fullest = max(steps, key=lambda step: sum(map(len, step.values())), default={})
    seen = ", ".join(f"{len(samples)} on {queue!r}" for queue, samples in fullest.items())
    return (
        f"no step of the trace matches: a step has {seen or 'none'}, the graphs have {wanted}. "
        "Give the reports of all graphs that a step runs, in order, such as forward and backward"
    )
