"""The type of options that take a length of time."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["Seconds"]

_MOST_S = 30 * 24 * 3600
"""30 days: far below where a clock of the system overflows, and nobody waits longer."""


class Seconds(click.FloatRange):
    """A length of time in seconds, of 30 days at most.

    Args:
        least_s: the shortest one.
        or_more: False: that one is too short itself.
    """

    name = "seconds"

    def __init__(self, least_s: float, *, or_more: bool = True) -> None:
        super().__init__(min=least_s, min_open=not or_more, max=_MOST_S)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number, where it is one and in the range; click tells the user where not."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):  # neither below nor above the range
            self.fail(f"{value} is no length of time.", param, ctx)
        return seconds
