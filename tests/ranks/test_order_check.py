"""Comparing orders of collectives in memory: ranks take turns on one store, in virtual time."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from overlap_core.errors import OverlapError
from overlap_core.ranks.issue_order import Group, IssueOrder, stream_for, window_for
from overlap_core.ranks.order_check import Divergence, OrderComparison, Stall

from ..virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.ranks.store import KeyValueStore

PAIR, OTHER, WORLD = Group((0, 1)), Group((0, 1), 1), Group((0, 1, 2, 3))
DEADLINE_S = 10.0

Program = list[tuple[Group, str]]


class CountingStore:
    """A store that remembers which keys were written and how large the values were."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.sizes: dict[str, int] = {}

    def set(self, key: str, value: str, /) -> None:
        self.sizes[key] = max(self.sizes.get(key, 0), len(value.encode()))
        self.store.set(key, value)

    def get(self, key: str, /) -> bytes:
        assert self.store.check([key]), f"a get of {key} would block"
        return self.store.get(key)

    def check(self, keys: list[str], /) -> bool:
        return self.store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        raise AssertionError("nothing is decided here")


class Ranks:
    """Some ranks of one job."""

    def __init__(self, world_size: int, store: KeyValueStore | None = None, serial: int = 0):
        self.clock = VirtualClock()
        store = store or CountingStore()
        self.sides = [
            OrderComparison(
                store,
                rank,
                serial=serial,
                every=4,
                deadline_s=DEADLINE_S,
                clock=self.clock,
            )
            for rank in range(world_size)
        ]
        self.found: list[Divergence | Stall] = []

    def issue(self, rank: int, program: Program) -> None:
        for group, what in program:
            self.sides[rank].add(group, what)

    def poll(self, *ranks: int) -> list[Divergence | Stall]:
        """What these ranks, or all of them, find in one turn each."""
        turns = ranks or range(len(self.sides))
        found = [finding for rank in turns for finding in self.sides[rank].poll()]
        self.found += found
        return found

    def end(self) -> list[Divergence | Stall]:
        """Everything found until all is compared."""
        for side in self.sides:
            side.close()
        for _ in range(3):
            self.poll()
        return self.found


def on(*groups: Group, what: str = "allreduce_ float32[4]") -> Program:
    return [(group, what) for group in groups]


def divergence(found: Sequence[Divergence | Stall]) -> Divergence:
    (one,) = found
    assert isinstance(one, Divergence)
    return one


def test_equal_orders_settle_without_a_word() -> None:
    ranks = Ranks(2)
    for rank in (0, 1):
        ranks.issue(rank, on(PAIR, OTHER, PAIR) * 5)
        assert not ranks.sides[rank].settled
    assert ranks.end() == []
    assert all(side.settled for side in ranks.sides)


def test_a_rank_that_is_ahead_is_not_a_difference() -> None:
    ranks = Ranks(2)
    ranks.issue(0, on(PAIR) * 50)
    ranks.issue(1, on(PAIR) * 3)
    assert [ranks.poll() for _ in range(3)] == [[]] * 3
    ranks.issue(1, on(PAIR) * 47)
    assert ranks.end() == []


def test_groups_in_another_order_are_reported_with_both_sequences() -> None:
    """Each communicator by itself sees the same order on both ranks."""
    ranks = Ranks(2)
    common = on(PAIR, PAIR, PAIR, PAIR, what="_allgather_base_ bfloat16[8]")
    ranks.issue(0, [*common, *on(PAIR, OTHER, PAIR, PAIR, PAIR, PAIR)])
    ranks.issue(1, [*common, *on(OTHER, PAIR, PAIR, PAIR)])
    ranks.poll(0)
    found = divergence(ranks.poll(1))
    assert (found.rank, found.peer, found.position, found.exact) == (1, 0, 5, True)
    title, *table = str(found).splitlines()
    assert title == (
        "ranks 1 and 0 issue collectives in different orders on groups [0,1], [0,1]#1: "
        "entry 5 differs first"
    )
    assert table == [
        "     entry  rank 1                                 rank 0",
        "         2  _allgather_base_ bfloat16[8] on [0,1]  _allgather_base_ bfloat16[8] on [0,1]",
        "         3  _allgather_base_ bfloat16[8] on [0,1]  _allgather_base_ bfloat16[8] on [0,1]",
        "         4  _allgather_base_ bfloat16[8] on [0,1]  _allgather_base_ bfloat16[8] on [0,1]",
        ">        5  allreduce_ float32[4] on [0,1]#1       allreduce_ float32[4] on [0,1]",
        "         6  allreduce_ float32[4] on [0,1]         allreduce_ float32[4] on [0,1]#1",
        "         7  allreduce_ float32[4] on [0,1]         allreduce_ float32[4] on [0,1]",
        "         8  allreduce_ float32[4] on [0,1]         allreduce_ float32[4] on [0,1]",
    ]
    assert divergence(ranks.poll(0)).position == 5
    assert ranks.poll() == []  # once


def test_a_rank_that_is_blocked_behind_reports_as_well() -> None:
    """The one ahead has no digest for its count, so it reads the entries."""
    ranks = Ranks(2)
    ranks.issue(0, on(OTHER))
    ranks.issue(1, on(PAIR) * 3)
    ranks.poll(1)
    ranks.poll(0)
    assert divergence(ranks.poll(0)).position == 1


def test_a_difference_further_back_than_entries_are_published() -> None:
    ranks = Ranks(2)
    ranks.issue(0, [*on(PAIR), *on(PAIR) * 2000])
    ranks.issue(1, [*on(PAIR, what="barrier"), *on(PAIR) * 2000])
    ranks.poll(0)
    found = divergence(ranks.poll(1))
    assert (found.position > 1000, found.exact) == (True, False)
    assert f"entry {found.position} or one before it differs first" in str(found)
    assert "(forgotten)" in found.theirs


def test_a_group_that_one_rank_uses_early() -> None:
    """What was issued before a group's first use counts for the peers in it."""
    ranks = Ranks(4)
    for rank in range(4):
        own = on(PAIR) if rank < 2 else []
        ranks.issue(rank, [*on(WORLD), *own, *on(WORLD)] if rank else [*own, *on(WORLD, WORLD)])
    found = [one for one in ranks.end() if isinstance(one, Divergence)]
    assert {(one.rank, one.peer, one.position) for one in found} == {(0, 1, 1), (1, 0, 1)}


def test_a_sequence_that_ends_early() -> None:
    ranks = Ranks(2)
    ranks.issue(0, on(PAIR) * 5)
    ranks.issue(1, on(PAIR) * 3)
    by_rank = {one.rank: one for one in ranks.end()}
    assert by_rank.keys() == {0, 1}
    for rank, one in by_rank.items():
        assert isinstance(one, Divergence)
        assert one.position == 4
        shorter = one.theirs if rank == 0 else one.mine
        assert shorter[2:] == ("allreduce_ float32[4] on [0,1]", *["(ended)"] * 4)


def test_a_rank_that_stops_issuing_is_named_once_with_its_count() -> None:
    ranks = Ranks(4)
    ranks.issue(0, on(PAIR, PAIR, PAIR, what="_allgather_base_ bfloat16[8]"))
    ranks.issue(1, on(PAIR, what="_allgather_base_ bfloat16[8]"))
    ranks.issue(1, on(Group((1, 2)), what="alltoall_base_ float32"))
    for seconds in (0, DEADLINE_S - 1):
        ranks.clock.sleep(seconds)
        assert [one for one in ranks.poll(1, 0) if one.rank == 0] == []
    ranks.clock.sleep(1)
    (stall,) = (one for one in ranks.poll(1, 0) if one.rank == 0)
    assert str(stall) == (
        "rank 1 has issued 1 of 3 on group [0,1], and nothing in the last 10.0 s, while rank 0 is "
        "ahead; last: _allgather_base_ bfloat16[8] on [0,1]; last on any group: alltoall_base_ "
        "float32 on [1,2]; its process answers"
    )
    ranks.clock.sleep(2 * DEADLINE_S)
    assert [one for one in ranks.poll(0) if one.rank == 0] == []


def test_a_slow_rank_is_not_a_stall_and_a_stall_is_not_an_end() -> None:
    ranks = Ranks(2)
    ranks.issue(0, on(PAIR) * 5)
    for _ in range(5):
        ranks.clock.sleep(0.9 * DEADLINE_S)
        assert ranks.poll() == []
        ranks.issue(1, on(PAIR))
    ranks.issue(0, on(PAIR))
    for _ in range(3):
        ranks.clock.sleep(DEADLINE_S)
        ranks.poll()
    assert [type(one) for one in ranks.found] == [Stall]
    ranks.issue(1, on(PAIR))
    assert len(ranks.end()) == 1
    assert all(side.settled for side in ranks.sides)


def test_a_rank_without_the_check_is_a_stall() -> None:
    ranks = Ranks(2)
    ranks.issue(0, on(PAIR))
    for seconds in (0, DEADLINE_S):
        ranks.clock.sleep(seconds)
        found = ranks.poll(0)
    (stall,) = found
    assert "rank 1 has issued 0 of 1 on group [0,1]" in str(stall)
    assert "last: (nothing yet); its process does not answer" in str(stall)


def test_what_an_earlier_check_left_is_no_news() -> None:
    store = CountingStore()
    for serial in range(3):
        ranks = Ranks(2, store, serial)
        for rank in (0, 1):
            ranks.issue(rank, on(PAIR, what=f"check {serial}"))
            assert ranks.poll(rank) == []
        assert ranks.end() == []
    assert len(store.sizes) == 2 * 2 * 2  # ranks, alternating checks, keys


def test_traffic_is_bounded() -> None:
    """A mesh of 4 x 4 x 4 and its planes, each group used, many different operations."""
    store = CountingStore()
    order = IssueOrder(0, every=1)
    clock = VirtualClock()
    side = OrderComparison(store, 0, serial=0, every=1, deadline_s=DEADLINE_S, clock=clock)
    strides = {"x": range(4), "y": range(0, 16, 4), "z": range(0, 64, 16)}
    groups = [Group(tuple(range(64)))]
    for size in (1, 2):
        for axes in combinations(strides.values(), size):
            ranks = {0}
            for axis in axes:
                ranks = {rank + step for rank in ranks for step in axis}
            groups.append(Group(tuple(sorted(ranks))))
    for number in range(3000):
        order.add(groups[number % 7], f"allreduce_ float32[{number}]")
        side.add(groups[number % 7], f"allreduce_ float32[{number}]")
    side.poll()
    prefix = "overlap_core/order_check/0/0"
    assert sorted(store.sizes) == [f"{prefix}/head", f"{prefix}/recent"]
    assert max(store.sizes.values()) < 8192
    assert len(order.neighbours()) <= 2 * 7


def test_too_many_groups_to_publish() -> None:
    order = IssueOrder(0, every=4)
    for peer in range(1, 400):
        order.add(Group((0, peer)), "barrier")
    with pytest.raises(OverlapError, match="rank 0 uses 399 process groups, more than the check"):
        order.head()


@given(
    ranks=st.sets(st.integers(0, 40), min_size=2, max_size=12),
    reader=st.integers(0, 40),
    ordinal=st.integers(0, 2),
)
def test_a_group_is_known_by_its_name(ranks: set[int], reader: int, ordinal: int) -> None:
    order = IssueOrder(min(ranks), every=1)
    group = Group(tuple(sorted(ranks)), ordinal)
    order.add(group, "barrier")
    found = stream_for(reader, json.loads(order.head()))
    assert (found is not None) == (reader in ranks)
    rows = window_for(reader, json.loads(order.recent())).rows
    assert rows == ((f"barrier on {group.name}",) if reader in ranks else ())


WORLD_SIZE = 5
GROUPS = [
    Group(ranks) for size in (2, 3, 4, 5) for ranks in combinations(range(WORLD_SIZE), size)
] + [Group(tuple(range(WORLD_SIZE)), 1)]


@st.composite
def programs(draw: st.DrawFn) -> list[Program]:
    """One program for each rank: the same one, then changed on some."""
    choice = draw(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=4, unique=True))
    entries = st.tuples(st.sampled_from(choice), st.sampled_from(["a", "b"]))
    shared = draw(st.lists(entries, max_size=12))
    result = []
    for rank in range(WORLD_SIZE):
        mine = list(shared)
        if mine and draw(st.integers(0, 4)) == 0:
            index = draw(st.integers(0, len(mine) - 1))
            mine.insert(draw(st.integers(0, len(mine) - 1)), mine.pop(index))
        result.append([entry for entry in mine if rank in entry[0].ranks])
    return result


def differing_pairs(programs: list[Program]) -> bool:
    """Whether two ranks issue different sequences on the groups that both are in."""

    def common(program: Program, peer: int) -> Program:
        return [entry for entry in program if peer in entry[0].ranks]

    return any(
        common(programs[a], b) != common(programs[b], a)
        for a, b in combinations(range(len(programs)), 2)
    )


@settings(max_examples=settings.default.max_examples * 3)
@given(programs=programs(), data=st.data())
def test_a_difference_is_found_exactly_if_there_is_one(
    programs: list[Program], data: st.DataObject
) -> None:
    """Although each rank looks at neighbours alone, and whoever is ahead whenever they look."""
    ranks = Ranks(WORLD_SIZE)
    left = [list(program) for program in programs]
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank in range(WORLD_SIZE) if left[rank]]))
        many = data.draw(st.integers(1, len(left[rank])))
        ranks.issue(rank, left[rank][:many])
        del left[rank][:many]
        if data.draw(st.booleans()):
            ranks.poll(rank)
    found = ranks.end()
    assert bool(found) == differing_pairs(programs)
    for one in found:
        assert isinstance(one, Divergence)
        assert one.exact
        at = one.position - one.first
        assert one.mine[:at] == one.theirs[:at]
        assert one.mine[at] != one.theirs[at]
