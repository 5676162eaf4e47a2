"""The memory bandwidth of a device, measured once in a process, for kernels with dynamic shapes."""

from __future__ import annotations

from functools import lru_cache

import torch
from attrs import frozen

from overlap_core.replay.timing import time_calls

__all__ = ["BandwidthModel", "calibrate"]

_LARGE_BYTES, _SMALL_BYTES = 64 << 20, 4 << 10


@frozen(kw_only=True)
class BandwidthModel:
    """Time of a kernel that is bound by memory: a least time, then bytes over bandwidth."""

    bytes_per_ns: float
    least_ns: int

    def time_ns(self, nbytes: int) -> int:
        """Predicted time of a kernel that reads and writes `nbytes` in total."""
        return max(self.least_ns, round(nbytes / self.bytes_per_ns))

    def describe(self) -> str:
        """The model in words."""
        return f"bytes over {self.bytes_per_ns:.1f} GB/s as measured here"


@lru_cache(maxsize=16)
def calibrate(device: str) -> BandwidthModel:
    """Measure how fast a device copies."""

    def copy_ns(nbytes: int) -> int:
        source = torch.zeros(nbytes // 4, device=device)
        target = torch.empty_like(source)
        return max(1, time_calls(lambda: target.copy_(source), device))

    return BandwidthModel(
        bytes_per_ns=2 * _LARGE_BYTES / copy_ns(_LARGE_BYTES), least_ns=copy_ns(_SMALL_BYTES)
    )
