"""The Chrome trace that `torch.profiler`'s `export_chrome_trace` writes, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from overlap_core.errors import TraceFileError

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Event", "Trace", "load_trace"]

Event = Mapping[str, Any]
"""One event as the file holds it; `ts` and `dur` are microseconds."""

_GZIP = b"\x1f\x8b"


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
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(_GZIP) else raw).decode()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TraceFileError(f"{where}: cut off: the compressed data has no end") from None
    except OSError as error:
        raise TraceFileError(f"{where}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TraceFileError(f"{where}: not a trace: the file is no text") from None
    if not text.strip():
        raise TraceFileError(f"{where}: not a trace: the file is empty")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"{where}: not JSON, or cut off: {error}") from None
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
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and all(isinstance(event.get(key), (int, float)) for key in ("ts", "dur"))
        and isinstance(event.get("args", {}), dict)
    )
