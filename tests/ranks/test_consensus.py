"""One slot for each gather: the latest over ranks, never decreasing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.ranks import reconcile


@pytest.mark.parametrize(
    ("proposals", "agreed"),
    [
        ([(0, 1, 4)], (0, 1, 4)),
        ([(0, 1, 4), (2, 1, 1)], (2, 2, 4)),
        ([(), ()], ()),
    ],
)
def test_the_latest_proposal_counts(
    proposals: list[tuple[int, ...]], agreed: tuple[int, ...]
) -> None:
    assert reconcile(proposals) == agreed


def test_different_numbers_of_gathers_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        reconcile([(1, 2), (1,)])


@given(
    st.integers(0, 6).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 20), min_size=n, max_size=n), min_size=1, max_size=5
        )
    )
)
def test_agreement_is_late_enough_for_all_and_no_later(proposals: list[list[int]]) -> None:
    agreed = reconcile(proposals)
    assert list(agreed) == sorted(agreed)
    assert reconcile(proposals[::-1]) == agreed
    assert reconcile([agreed, *proposals]) == agreed
    for i, unit in enumerate(agreed):
        assert unit == max(p[j] for p in proposals for j in range(i + 1))
