"""The lockstep step for several ranks in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.costs import Cost, CostSource
from overlap_core.ranks import agree_on_costs, run_in_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@define
class Bench:
    """A rank that measures what it is told."""

    compute: dict[str, int] = field(factory=dict)
    issuing: dict[str, int] = field(factory=dict)
    signatures: dict[str, str] = field(factory=dict)
    broken: tuple[str, ...] = ()
    """Keys whose rehearsal fails here."""
    late: tuple[str, ...] = ()
    """Keys whose replay fails here."""
    table: dict[str, Cost] = field(factory=dict)
    kept: dict[str, Cost] = field(factory=dict)
    calls: list[str] = field(factory=list)

    def saved(self) -> Mapping[str, Cost]:
        return self.table

    def measure_compute(self, known: Mapping[str, Cost]) -> Mapping[str, Cost]:
        return {
            key: Cost(ns=ns, source=CostSource.MEASURED)
            for key, ns in self.compute.items()
            if key not in known
        }

    def offer(self, known: Mapping[str, Cost]) -> Sequence[str]:
        return [key for key in self.issuing if key not in known]

    def rehearse(self, key: str) -> str:
        if key in self.broken:
            raise ValueError("no rehearsal")
        return self.signatures.get(key, "all_gather")

    def refused(self) -> Mapping[str, str]:
        return {}

    def compute_part_ns(self, key: str) -> int | None:
        return self.issuing[key] // 2

    def replay(self, key: str) -> int:
        self.calls.append(key)
        if key in self.late:
            raise RuntimeError("no replay")
        return self.issuing[key]

    def save(self, table: Mapping[str, Cost]) -> None:
        self.kept = dict(table)


def agree(*benches: Bench) -> tuple[dict[str, Cost], ...]:
    results = run_in_memory([agree_on_costs(bench, i) for i, bench in enumerate(benches)])
    assert len({tuple(bench.calls) for bench in benches}) == 1, "ranks replayed different things"
    return results


def test_what_all_share_gets_the_maximum_and_the_rest_stays_ones_own() -> None:
    first = Bench(compute={"mm": 5, "mine": 1}, issuing={"gather": 10})
    second = Bench(compute={"mm": 7, "theirs": 2}, issuing={"gather": 8})
    one, two = agree(first, second)
    assert one["mm"] == two["mm"] == Cost(ns=7, source=CostSource.MEASURED)
    assert one["gather"] == two["gather"]
    assert (one["gather"].ns, one["gather"].network_ns) == (10, 5)
    assert one["mine"].ns == 1
    assert "mine" not in two


def test_a_rank_with_an_empty_table_still_takes_part() -> None:
    full, empty = agree(Bench(compute={"mm": 5}, issuing={"gather": 10}), Bench())
    assert empty == {}
    assert full["mm"].ns == 5
    assert full["gather"].ns is None
    assert "1 of 2 ranks do not have it" in full["gather"].why


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (Bench(issuing={"gather": 1}, broken=("gather",)), "no rehearsal"),
        (Bench(issuing={"gather": 1}, late=("gather",)), "no replay"),
        (Bench(issuing={"gather": 1}, signatures={"gather": "other"}), "different collectives"),
    ],
)
def test_a_collective_that_fails_on_one_rank_is_an_estimate_on_all(second: Bench, why: str) -> None:
    for result in agree(Bench(issuing={"gather": 9}), second):
        assert result["gather"].ns is None
        assert why in result["gather"].why


def test_equal_saved_tables_leave_nothing_to_measure() -> None:
    table = {"gather": Cost(ns=3, source=CostSource.MEASURED)}
    benches = [Bench(issuing={"gather": 9}, table=dict(table)) for _ in range(3)]
    assert all(result["gather"].ns == 3 for result in agree(*benches))
    assert all(bench.calls == [] for bench in benches)


def test_unequal_saved_tables_are_used_by_none() -> None:
    benches = [
        Bench(issuing={"gather": 9}, table={"gather": Cost(ns=ns, source=CostSource.MEASURED)})
        for ns in (3, 4)
    ]
    assert all(result["gather"].ns == 9 for result in agree(*benches))
    assert benches[0].kept == benches[1].kept


keys = st.sampled_from("abcdef")
times = st.dictionaries(keys, st.integers(0, 1000), max_size=6)
some = st.lists(keys, max_size=2).map(tuple)


@given(st.lists(st.builds(Bench, times, times, broken=some, late=some), min_size=1, max_size=4))
def test_ranks_replay_the_same_and_agree_on_what_communicates(benches: list[Bench]) -> None:
    for bench in benches:
        bench.compute = {f"compute {key}": ns for key, ns in bench.compute.items()}
    results = agree(*benches)
    for key in "abcdef":
        found = {result[key].ns for result in results if key in result}
        assert len(found) <= 1
