"""Where gathers are launched: coordinates, latest safe launch, memory, predicted time."""

from __future__ import annotations

from .frame import Frame, build_frame, rebuild_order
from .plan import GatherPlacement, Plan, Verdict
from .schedule import align, propose
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
    "cut_illegal",
    "default_region_bytes",
    "follow_slots",
    "form_units",
    "join",
    "largest_region_bytes",
    "propose",
    "rebuild_order",
    "refine",
    "settle",
    "stand_still",
    "units_of",
]
