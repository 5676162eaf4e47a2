"""Kernels of a trace: what kind of communication each one is, when and on which stream it runs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .intervals import Interval
    from .trace import Event

__all__ = ["interval_of", "kernel_kinds", "stream_of"]

_KINDS = (
    ("gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all_to_all", re.compile(r"SendRecv|all_?to_?all", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce_?scatter|all_?reduce|Broadcast|_Reduce_", re.IGNORECASE)),
)


def interval_of(event: Event) -> Interval:
    """Start and end in microseconds."""
    start = float(event["ts"])
    return start, start + float(event["dur"])


def stream_of(event: Event) -> tuple[str, str]:
    """The device and the stream that a kernel runs on."""
    args = event.get("args") or {}
    return str(event.get("pid")), str(args.get("stream", event.get("tid")))


def kernel_kinds(kernels: Sequence[Event]) -> list[str]:
    """`compute`, `gather`, `all_to_all`, `reduce` or `nccl` for each kernel.

    NCCL's kernels carry the collective in their name, or in what torch notes beside it. One that
    doesn't (NCCL's generic kernel) takes the kind that most of its stream has; `nccl` is one of
    which nothing is known.
    """
    kinds: list[str] = []
    by_stream: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for event in kernels:
        kind = _kind(event)
        if kind not in ("compute", "nccl"):
            by_stream[stream_of(event)][kind] += 1
        kinds.append(kind)
    for index, event in enumerate(kernels):
        if kinds[index] == "nccl" and (seen := by_stream.get(stream_of(event))):
            kinds[index] = seen.most_common(1)[0][0]
    return kinds


def _kind(event: Event) -> str:
    name = str(event.get("name", ""))
    if "nccl" not in name.lower():
        return "compute"
    noted = str((event.get("args") or {}).get("Collective name", ""))
    return next((kind for kind, words in _KINDS if words.search(f"{name} {noted}")), "nccl")
