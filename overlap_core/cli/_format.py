"""How the command line writes times and names, and gathers as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_core.outcome import GatherOutcome

__all__ = ["format_us", "gather_to_json", "plain"]


def format_us(ns: int) -> str:
    """Nanoseconds as microseconds with one decimal."""
    return f"{ns / 1000:,.1f}"


def plain(text: str) -> str:
    """Names in a file may hold anything; a terminal must not obey it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def gather_to_json(gather: GatherOutcome) -> dict[str, Any]:
    """One gather as every command writes it."""
    return {
        "name": gather.name,
        "from": gather.source,
        "to": gather.target,
        "slot": gather.slot,
        "verdict": gather.verdict,
        "why": gather.why,
        "exposed_ns_before": gather.exposed_ns_before,
        "exposed_ns_after": gather.exposed_ns_after,
    }
