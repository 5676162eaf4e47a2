"""Stretches of time as sorted lists of disjoint (start, end) pairs, in microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Interval", "length", "subtract", "union"]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All time that lies in any of the intervals, which may overlap and come in any order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: list[Interval], taken: list[Interval]) -> list[Interval]:
    """What is left of disjoint sorted intervals without other disjoint sorted ones."""
    left: list[Interval] = []
    position = 0
    for start, end in intervals:
        while position < len(taken) and taken[position][1] <= start:
            position += 1
        at = position
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Time in disjoint intervals."""
    return sum(end - start for start, end in intervals)
