"""The rules of the Chrome trace format, as far as the two viewers rely on them.

From the format's description ("Trace Event Format") and from what Perfetto's importer drops or
counts as an error: slices that overlap without nesting, flows that no slice holds, counters whose
values are no numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

__all__ = ["find_problems"]

_TOP_LEVEL = {"traceEvents", "displayTimeUnit"}
_COMMON = {"ph", "name", "pid", "tid"}
_TIMED = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "s": {"id"}, "f": {"id", "bp"}}
_META = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
_ROUNDING_US = 1e-6


def find_problems(trace: Any) -> list[str]:
    """Everything in a trace, as parsed JSON, that a viewer would drop or complain of."""
    problems = [f"unknown top-level key {key!r}" for key in sorted(set(trace) - _TOP_LEVEL)]
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        problems.append("displayTimeUnit is neither ms nor ns")
    events = trace["traceEvents"]
    bad = [(number, _about_event(event)) for number, event in enumerate(events)]
    problems += [f"event {number}: {why}" for number, why in bad if why]
    if problems:
        return problems
    return [*_about_names(events), *_about_nesting(events), *_about_flows(events)]


def _about_event(event: Any) -> str:
    if missing := sorted(_COMMON - set(event)):
        return f"lacks {missing[0]}"
    if not isinstance(event["name"], str):
        return "its name is no text"
    if any(type(event[key]) is not int for key in ("pid", "tid")):
        return "pid and tid are integers"
    phase, arguments = event["ph"], event.get("args", {})
    if not isinstance(arguments, dict):
        return "args is no object"
    if phase == "M":
        wanted = _META.get(event["name"])
        return "" if wanted in arguments else f"metadata {event['name']!r} without its argument"
    if phase not in _TIMED:
        return f"phase {phase!r} is not one that is used here"
    if missing := sorted(({"ts", "cat"} | _TIMED[phase]) - set(event)):
        return f"phase {phase} lacks {missing[0]}"
    times = [event[key] for key in ("ts", "dur") if key in event]
    if not all(type(t) in (int, float) and math.isfinite(t) and t >= 0 for t in times):
        return "its times are no numbers from 0"
    if phase == "C" and not (
        arguments and all(type(value) in (int, float) for value in arguments.values())
    ):
        return "a counter's values are numbers"
    if phase == "i" and event["s"] not in ("g", "p", "t"):
        return "an instant's scope is g, p or t"
    return ""


def _about_names(events: list[Any]) -> list[str]:
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in ("X", "i")}
    return [
        f"thread {tid} of process {pid} has no {what} name"
        for pid, tid in sorted(used)
        for what, wanted in (
            ("process", ("process_name", pid, 0)),
            ("thread", ("thread_name", pid, tid)),
        )
        if wanted not in named
    ]


def _about_nesting(events: list[Any]) -> list[str]:
    """Slices of one thread lie apart or within each other; counters never go back in time."""
    tracks: dict[tuple[int, int], list[Any]] = defaultdict(list)
    clocks: dict[tuple[int, str], float] = {}
    problems = []
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            which = event["pid"], event["name"]
            if which in clocks and event["ts"] <= clocks[which]:
                problems.append(f"counter {event['name']!r} has two values at {event['ts']}")
            clocks[which] = event["ts"]
    for slices in tracks.values():
        open_ends: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + _ROUNDING_US:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + _ROUNDING_US:
                problems.append(f"slice {event['name']!r} at {event['ts']} overlaps another")
            open_ends.append(end)
    return problems


def _about_flows(events: list[Any]) -> list[str]:
    """Both ends of a flow lie in a slice of their thread, the first no later than the second."""
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    ends: dict[int, dict[str, Any]] = defaultdict(dict)
    problems = []
    for event in events:
        if event["ph"] not in ("s", "f"):
            continue
        if event["ph"] in ends[event["id"]]:
            problems.append(f"flow {event['id']} has two ends of phase {event['ph']}")
        ends[event["id"]][event["ph"]] = event
        inside = spans[event["pid"], event["tid"]]
        if not any(start <= event["ts"] < end for start, end in inside):
            problems.append(f"flow {event['id']}: no slice holds its end {event['ph']}")
    for number, pair in ends.items():
        if set(pair) != {"s", "f"}:
            problems.append(f"flow {number} has one end only")
        elif pair["s"]["ts"] > pair["f"]["ts"]:
            problems.append(f"flow {number} goes back in time")
    return problems
