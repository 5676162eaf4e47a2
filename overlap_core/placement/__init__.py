"""Where gathers are launched: coordinates, latest safe launch, memory, predicted time."""

from __future__ import annotations

from .frame import Frame, build_frame, rebuild_order
from .liveness import in_flight_bytes, peak_bytes, timeline_of_bytes
from .plan import GatherPlacement, Plan, Verdict
from .reductions import launch_early, wait_late
from .schedule import align, contention_of, propose
from .settle import follow_slots, settle
from .still import stand_still
from .timeline import Coalesced, Span, SpanKind, Timeline, TimelineModel
from .units import (
    alone,
    call_ns,
    calls_of,
    cut_illegal,
    default_region_bytes,
    form_units,
    join,
    largest_region_bytes,
    refine,
    units_of,
)

__all__ = [
    "Coalesced",
    "Frame",
    "GatherPlacement",
    "Plan",
    "Span",
    "SpanKind",
    "Timeline",
    "TimelineModel",
    "Verdict",
    "align",
    "alone",
    "build_frame",
    "call_ns",
    "calls_of",
    "contention_of",
    "cut_illegal",
    "default_region_bytes",
    "follow_slots",
    "form_units",
    "in_flight_bytes",
    "join",
    "largest_region_bytes",
    "launch_early",
    "peak_bytes",
    "propose",
    "rebuild_order",
    "refine",
    "settle",
    "stand_still",
    "timeline_of_bytes",
    "units_of",
    "wait_late",
]
