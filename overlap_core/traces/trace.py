"""The Chrome trace that `torch.profiler`'s `export_chrome_trace` writes, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from overlap_core._json import parse_json, read_bytes
from overlap_core.errors import TraceFileError

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Event", "Trace", "load_trace"]

Event = Mapping[str, Any]
"""One event as the file holds it; `ts` and `dur` are microseconds."""

_GZIP = b"\x1f\x8b"
_NAMES = ("correlation", "Process Group Name")
"""What is looked up by its value."""
_LATEST_US = 2.0**63


@frozen(kw_only=True)
class Trace:
    """The complete events of a trace, by start."""

    events: tuple[Event, ...]
    rank: int | None
    """Of the process group that was up; None: not in the trace."""

    def of(self, *categories: str) -> list[Event]:
        """The events of some categories, such as `kernel`, `cpu_op` or `user_annotation`."""
        return [event for event in self.events if event.get("cat") in categories]


def load_trace(path: str | PathLike[str]) -> Trace:
    """Read a trace.

    Raises:
        TraceFileError: the file is no Chrome trace; says where and why.
    """
    where = str(path)
    try:
        raw = read_bytes(path)
        data = parse_json(
            gzip.decompress(raw) if raw.startswith(_GZIP) else raw, "a trace", any_number=True
        )
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TraceFileError(f"{where}: cut off: the compressed data has no end") from None
    except ValueError as error:
        raise TraceFileError(f"{where}: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise TraceFileError(
            f"{where}: not a trace of torch.profiler: there is no list 'traceEvents'"
        )
    found = data.get("distributedInfo")
    rank = found.get("rank") if isinstance(found, dict) else None
    events = [event for event in data["traceEvents"] if _is_complete(event)]
    return Trace(
        events=tuple(sorted(events, key=lambda event: (event["ts"], event["dur"]))),
        rank=rank if isinstance(rank, int) else None,
    )


def _is_complete(event: object) -> bool:
    """Whether an event has a time and a length, and names where names belong."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return False
    args = event.get("args") or {}
    if not isinstance(args, dict):
        return False
    names = [event.get("cat"), event.get("name"), *(args.get(key) for key in _NAMES)]
    return all(_is_time(event.get(key)) for key in ("ts", "dur")) and not any(
        isinstance(name, (list, dict)) for name in names
    )


def _is_time(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LATEST_US
    )
