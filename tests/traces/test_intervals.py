"""Stretches of time: sets of points, whatever order they come in."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from overlap_core.traces import Interval, length, subtract, union


def intervals() -> st.SearchStrategy[list[Interval]]:
    pairs = st.tuples(st.integers(0, 60), st.integers(1, 20))
    return st.lists(pairs.map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=12)


def points(found: list[Interval]) -> set[int]:
    return {point for start, end in found for point in range(int(start), int(end))}


@given(intervals(), intervals())
def test_they_are_sets(some: list[Interval], others: list[Interval]) -> None:
    one, other = union(some), union(others)
    left = subtract(one, other)
    assert points(one) == points(some)
    assert points(left) == points(some) - points(others)
    for found in (one, left):
        assert length(found) == len(points(found))
        assert all(start < end for start, end in found)
        assert all(a[1] <= b[0] for a, b in pairwise(found))
