"""What profiles say: traces of `torch.profiler`, and the exposed time of gathers in them."""

from __future__ import annotations

from .exposure import MeasuredGather, Measurement, measure_gathers
from .intervals import Interval, length, subtract, union
from .kernels import interval_of, kernel_kinds, stream_of
from .trace import Event, Trace, load_trace

__all__ = [
    "Event",
    "Interval",
    "MeasuredGather",
    "Measurement",
    "Trace",
    "interval_of",
    "kernel_kinds",
    "length",
    "load_trace",
    "measure_gathers",
    "stream_of",
    "subtract",
    "union",
]
