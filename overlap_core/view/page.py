"""One self-contained HTML page of timelines: no network, no files beside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .words import BLOCK_WORDS, IN_FLIGHT, ORDER_WORDS, describe_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .lanes import OrderTimeline, RankTimeline

__all__ = ["render_page"]

_KINDS = tuple(BLOCK_WORDS)


def render_page(timelines: Sequence[RankTimeline]) -> str:
    """The page, as text; names from reports are escaped wherever they stand."""
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        timelines=timelines,
        style=_source(environment, "page.css"),
        scripts=[_source(environment, name) for name in ("lanes.js", "page.js")],
        data=_script_json(_to_json(timelines)),
        legend=[*((str(kind), BLOCK_WORDS[kind]) for kind in _KINDS), ("memory", IN_FLIGHT)],
    )


def _source(environment: Environment, name: str) -> Markup:
    """A file of ours as it is: it holds nothing that a report says."""
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _script_json(value: object) -> Markup:
    """JSON that can't end the script element it stands in, whatever the strings hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _to_json(timelines: Sequence[RankTimeline]) -> dict[str, Any]:
    orders = [order for timeline in timelines for _, order in timeline.orders]
    return {
        "kinds": [{"name": str(kind), "words": BLOCK_WORDS[kind]} for kind in _KINDS],
        "memory": {"words": IN_FLIGHT, "most": max((o.most_bytes for o in orders), default=0)},
        "ranks": [_rank_to_json(timeline) for timeline in timelines],
    }


def _rank_to_json(timeline: RankTimeline) -> dict[str, Any]:
    return {
        "label": timeline.label,
        "nodes": [describe_node(timeline, p) for p in range(len(timeline.graph.nodes))],
        "orders": [
            {"label": ORDER_WORDS[name], **_order_to_json(order)} for name, order in timeline.orders
        ],
    }


def _order_to_json(order: OrderTimeline) -> dict[str, Any]:
    """Blocks are flat lists of start, end, node, kind: a quarter of what objects take.

    Memory is a flat list of start, bytes.
    """
    return {
        "total": order.total_ns,
        "exposed": order.exposed_ns,
        "memory": [number for step in order.in_flight for number in step],
        "lanes": [
            {
                "kind": str(lane.kind),
                "label": lane.label,
                "blocks": [
                    number
                    for b in lane.blocks
                    for number in (b.start_ns, b.end_ns, b.position, _KINDS.index(b.kind))
                ],
            }
            for lane in order.lanes
        ],
    }
