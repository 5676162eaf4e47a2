"""Timelines of reports to look at: a page of its own, or a trace for Perfetto."""

from __future__ import annotations

from .lanes import Block, BlockKind, Lane, LaneKind, OrderTimeline, RankTimeline, build_timelines
from .page import render_page
from .perfetto import to_chrome_trace

__all__ = [
    "Block",
    "BlockKind",
    "Lane",
    "LaneKind",
    "OrderTimeline",
    "RankTimeline",
    "build_timelines",
    "render_page",
    "to_chrome_trace",
]
