"""How far a run is: a bar at the bottom of a terminal, plain lines everywhere else."""

from __future__ import annotations

import time

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Report"]

_PLAIN_WIDTH = 190


class Report:
    """What one rank prints; nothing on all ranks but the first."""

    def __init__(self, *, quiet: bool) -> None:
        self._start = time.monotonic()
        self._quiet = quiet
        console = Console()
        # In a file or a pipe the tables must not be folded to some terminal's width.
        self.console = console if console.is_terminal else Console(width=_PLAIN_WIDTH)
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        """Print a line, at once, with the seconds since the start."""
        line = f"[{time.monotonic() - self._start:6.1f} s] {text}"
        if not self._quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self.console.file.flush()

    def show(self, *parts: RenderableType | str) -> None:
        """Print tables and lines as they are."""
        if self._quiet:
            return
        for part in parts:
            self.console.print(part, markup=False, highlight=False)
        self.console.file.flush()

    def begin(self, title: str, total: int) -> None:
        """Start to count a new run of so many pieces of work."""
        self.end()
        if self._quiet or not self.console.is_terminal:
            return
        # No thread that refreshes by itself: it would disturb the host that is timed.
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        self._bar.add_task(title, total=total)
        self._bar.start()
        self.console.show_cursor(True)  # the process may be ended at any time

    def working_on(self, text: str) -> None:
        """Say which piece of work is begun."""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, description=text, refresh=True)

    def done(self, pieces: int = 1) -> None:
        """Count pieces of work as done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=pieces, refresh=True)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
