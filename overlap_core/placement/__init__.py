"""Where gathers are launched: coordinates, latest safe launch, memory, predicted time."""

from __future__ import annotations

from .frame import Frame, build_frame, rebuild_order
from .plan import GatherPlacement, Plan, Verdict
from .schedule import align, propose
from .settle import follow_slots, settle
from .still import stand_still
from .timeline import Span, SpanKind, Timeline, TimelineModel

__all__ = [
    "Frame",
    "GatherPlacement",
    "Plan",
    "Span",
    "SpanKind",
    "Timeline",
    "TimelineModel",
    "Verdict",
    "align",
    "build_frame",
    "follow_slots",
    "propose",
    "rebuild_order",
    "settle",
    "stand_still",
]
