"""Saying what a command is busy with, where a person waits for it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["QUICK_BYTES", "progress", "size_of"]

QUICK_BYTES = 8 << 20
"""Files of so many bytes together are read and drawn within two seconds."""


def size_of(paths: Iterable[str | Path]) -> int:
    """Bytes of all files that are there; what can't be read is told by whoever reads it."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            total += Path(path).stat().st_size
    return total


@contextlib.contextmanager
def progress(*, wanted: bool = True) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what goes on and for how long, and is gone at the end.

    Only on a terminal, and of a job's ranks only on rank 0; elsewhere nothing is written.

    Args:
        wanted: False: it won't take long enough.

    Yields:
        A function that takes the name of what begins now. The line is drawn at once: what comes
        may keep Python from drawing anything until it is done.
    """
    if not (wanted and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        row = shown.add_task("")

        def say(phase: str) -> None:
            shown.update(row, description=phase, refresh=True)

        yield say
