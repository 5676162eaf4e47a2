"""How the command line writes times."""

from __future__ import annotations

__all__ = ["format_us"]


def format_us(ns: int) -> str:
    """Nanoseconds as microseconds with one decimal."""
    return f"{ns / 1000:,.1f}"
