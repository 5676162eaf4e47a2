"""Where gathers are launched: coordinates, latest safe launch, memory, predicted time."""

from __future__ import annotations

from .frame import Frame, build_frame, rebuild_order
from .liveness import Memory, build_memory, peak_bytes
from .memory import PeakBound, bound_peak, memory_floors
from .plan import GatherPlacement, Plan, Verdict
from .reductions import launch_early, wait_late
from .schedule import align, contention_of, propose
from .settle import follow_slots, settle
from .still import stand_still
from .timeline import Coalesced, Span, SpanKind, Timeline, TimelineModel
from .units import (
    REGION_BYTES,
    alone,
    call_ns,
    calls_of,
    cut_illegal,
    form_units,
    join,
    largest_region_bytes,
    refine,
    units_of,
)

__all__ = [
    "REGION_BYTES",
    "Coalesced",
    "Frame",
    "GatherPlacement",
    "Memory",
    "PeakBound",
    "Plan",
    "Span",
    "SpanKind",
    "Timeline",
    "TimelineModel",
    "Verdict",
    "align",
    "alone",
    "bound_peak",
    "build_frame",
    "build_memory",
    "call_ns",
    "calls_of",
    "contention_of",
    "cut_illegal",
    "follow_slots",
    "form_units",
    "join",
    "largest_region_bytes",
    "launch_early",
    "memory_floors",
    "peak_bytes",
    "propose",
    "rebuild_order",
    "refine",
    "settle",
    "stand_still",
    "units_of",
    "wait_late",
]
