"""From the agreed slots or boundaries to one rank's own boundaries."""

from __future__ import annotations

import pytest
from attrs import evolve

from overlap_core.errors import IllegalOrderError
from overlap_core.placement import Frame, GatherPlacement, Plan, Verdict, align, settle

# Ten base nodes; fixed communication at base nodes 2 and 6. Slots: 0-2, 3-6, 7-10.
FRAME = Frame(
    base=tuple(range(10)),
    boundary_of=(),
    fixed=(2, 6),
    gathers=(),
    floors=(),
    originals=(),
    needed=(),
)


def plan(*boundaries: int, original: int = 10) -> Plan:
    placements = tuple(
        GatherPlacement(
            gather=f"g{i}",
            ordinal=i,
            floor=0,
            original=original,
            boundary=boundary,
            slot=0,
            verdict=Verdict.HIDDEN,
            why="",
        )
        for i, boundary in enumerate(boundaries)
    )
    return align(Plan(placements=placements), FRAME)


def boundaries(settled: Plan) -> list[int]:
    return [p.boundary for p in settled.placements]


def test_slots_are_numbered_by_the_communication_before_them() -> None:
    assert [FRAME.slot(b) for b in (0, 2, 3, 6, 7, 10)] == [0, 0, 1, 1, 2, 2]
    assert [FRAME.slot_start(s) for s in (0, 1, 2)] == [0, 3, 7]


def test_in_its_own_slot_a_gather_stays_and_in_a_later_one_it_goes_to_the_beginning() -> None:
    settled = settle(plan(1, 2), FRAME, (0, 1), by_boundary=False)
    assert boundaries(settled) == [1, 3]
    assert [p.slot for p in settled.placements] == [0, 1]


def test_a_gather_in_its_own_slot_stays_behind_an_earlier_one_that_was_raised() -> None:
    assert boundaries(settle(plan(1, 5), FRAME, (1, 1), by_boundary=False)) == [3, 5]
    assert boundaries(settle(plan(5, 5), FRAME, (1, 1), by_boundary=False)) == [5, 5]
    # Raised into the slot in which its successor is at home, before or behind it.
    assert boundaries(settle(plan(0, 3, 4), FRAME, (1, 1, 1), by_boundary=False)) == [3, 3, 4]


def test_boundaries_are_taken_as_agreed() -> None:
    assert boundaries(settle(plan(1, 4), FRAME, (2, 4), by_boundary=True)) == [2, 4]


def test_an_agreement_outside_what_the_rank_allows_is_refused() -> None:
    with pytest.raises(IllegalOrderError, match=r"'g0' would be launched at boundary 0"):
        settle(plan(1), FRAME, (0,), by_boundary=True)
    with pytest.raises(IllegalOrderError, match=r"boundary 7, outside \[1, 5\]"):
        settle(plan(1, original=5), FRAME, (2,), by_boundary=False)


def test_the_verdict_of_a_placement_survives() -> None:
    limited = Plan(
        placements=tuple(evolve(p, verdict=Verdict.MEMORY_LIMITED) for p in plan(1, 2).placements)
    )
    settled = settle(limited, FRAME, (1, 1), by_boundary=False)
    assert {p.verdict for p in settled.placements} == {Verdict.MEMORY_LIMITED}
