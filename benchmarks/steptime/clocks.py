"""The clock and power of this rank's GPU while it is timed: a busy device may run slower."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Clocks", "Reading"]

_QUERY = (
    "--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap",
    "--format=csv,noheader,nounits",
    "--loop-ms=100",
)


@attrs.frozen(kw_only=True)
class Reading:
    """Medians over a stretch of time."""

    sm_mhz: float
    watts: float
    capped: float
    """Share of the readings in which the driver held the clock down to keep within the power."""


class Clocks:
    """What `nvidia-smi` says of one GPU several times a second, while the context is open.

    Reading costs the host some time, so it is only done where it is asked for. Without the
    program, or without a GPU, there is nothing to read.
    """

    def __init__(self, device: torch.device, *, wanted: bool = True) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread()
        self._command: list[str] = []
        self._read: list[tuple[float, float, float, float]] = []
        program = shutil.which("nvidia-smi")
        if wanted and program and device.type == "cuda":
            uuid = torch.cuda.get_device_properties(device).uuid
            self._command = [program, f"--id=GPU-{uuid}", *_QUERY]

    def __enter__(self) -> Self:
        if self._command:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
            self._reader = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._process = None

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                try:
                    mhz, watts, capped = line.split(",")
                    reading = (float(mhz), float(watts), float(capped.strip() == "Active"))
                except ValueError:  # a message, or a number that this GPU does not have
                    continue
                self._read.append((time.perf_counter(), *reading))

    def between(self, start: float, end: float) -> Reading | None:
        """Medians of what was read from `start` to `end` by `time.perf_counter`; None: nothing."""
        found = [reading for at, *reading in [*self._read] if start <= at <= end]
        if not found:
            return None
        mhz, watts, capped = zip(*found, strict=True)
        return Reading(
            sm_mhz=statistics.median(mhz),
            watts=statistics.median(watts),
            capped=statistics.mean(capped),
        )
