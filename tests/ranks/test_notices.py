"""Ranks that go on without overlap, give up, or run another version: peers hear why, at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import HashStore

from overlap_core.errors import DeadlineError
from overlap_core.pipeline import negotiate
from overlap_core.ranks import StoreExchange
from overlap_core.ranks.notices import find_off, in_one_line, off_in_words, say_off
from overlap_core.ranks.scope_messages import ScopeFound, ScopeSaid

from ..pipeline_views import same
from ..virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEADLINE_S = 60.0
SOON_S = 3.0
"""Who waits looks for notices once a second."""
WHY = "plugin 'x' of dist (mod) can't be imported: ImportError: no y"
CORE = {"overlap_core": "1.2", "torch": "2.13.0"}


@pytest.fixture
def clock() -> VirtualClock:
    """The time of all ranks of a test."""
    return VirtualClock()


@pytest.fixture
def store() -> Any:
    """Shared by all ranks of a test."""
    return HashStore()


def exchange(store: Any, rank: int, clock: VirtualClock, **more: Any) -> StoreExchange:
    return StoreExchange(store, rank, "graph 1", DEADLINE_S, clock, **more)


def waiting(
    store: Any, clock: VirtualClock, ranks: int = 2, rank: int = 0, **more: Any
) -> Callable[[], ScopeFound]:
    """One rank at the meeting, which leaves it as the pass does."""

    def run() -> ScopeFound:
        one = exchange(store, rank, clock, **more)
        try:
            return one.find_scope([tuple(range(ranks))])
        finally:
            one.leave()

    return run


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(DeadlineError) as error:
        call()
    return str(error.value)


# ---- going on without overlap


def test_a_rank_that_goes_on_without_overlap_is_named_with_its_cause(
    store: Any, clock: VirtualClock
) -> None:
    say_off(store, 1, 1, WHY)
    assert refusal(waiting(store, clock)) == f"rank 1 goes on without overlap: {WHY}"
    assert clock.now() < SOON_S


def test_it_is_heard_by_ranks_that_wait_already(store: Any, clock: VirtualClock) -> None:
    def goes_off() -> str:
        clock.sleep(20)
        say_off(store, 1, 1, WHY)
        return ""

    found, _ = clock.run([waiting(store, clock), goes_off])  # type: ignore[list-item]
    assert str(found) == f"rank 1 goes on without overlap: {WHY}"
    assert clock.now() < 20 + SOON_S


def test_all_ranks_hear_of_it_themselves(store: Any, clock: VirtualClock) -> None:
    say_off(store, 1, 3, WHY)
    calls = [waiting(store, clock, ranks=4, rank=rank) for rank in range(3)]
    assert {str(one) for one in clock.run(calls)} == {f"rank 3 goes on without overlap: {WHY}"}
    assert clock.now() < SOON_S


def test_what_a_rank_said_in_another_job_is_not_met(store: Any, clock: VirtualClock) -> None:
    say_off(store, 1, 1, WHY)
    said = refusal(waiting(store, clock, job=2))
    assert said.startswith("rank 1 did not reach step 'scope' within 60 s")


def test_what_was_taken_back_is_not_met(store: Any, clock: VirtualClock) -> None:
    say_off(store, 1, 1, WHY)
    say_off(store, 1, 1, "")
    assert find_off(store, 1, [0, 1]) == {}
    assert refusal(waiting(store, clock)).startswith("rank 1 did not reach")


def test_a_rank_that_came_all_the_same_takes_part(store: Any, clock: VirtualClock) -> None:
    say_off(store, 1, 1, WHY)

    def negotiator(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            one, view = exchange(store, rank, clock), same(2)[rank]
            scope = one.find_scope([(0, 1)]).ranks
            if rank == 1:
                clock.sleep(10)
            return one.run(negotiate(view, scope), scope)

        return run

    assert [one.committed for one in clock.run([negotiator(0), negotiator(1)])] == [True, True]


def test_a_rank_that_only_says_so_at_the_meeting_is_named(store: Any, clock: VirtualClock) -> None:
    off = exchange(store, 1, clock)
    off.publish_scope([(0, 1)], gathers=0, off="switched off by OverlapConfig(enabled=False)")
    off.leave()
    found = waiting(store, clock)()
    assert found.ranks == (0, 1)
    assert found.why == (
        "rank 1 goes on without overlap: switched off by OverlapConfig(enabled=False)"
    )
    assert clock.now() < SOON_S


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        ({3: "a"}, "rank 3 goes on without overlap: a"),
        ({3: "a", 1: "a"}, "ranks 1, 3 go on without overlap: a"),
        ({3: "a", 1: "b"}, "ranks 1, 3 go on without overlap: rank 1: b"),
        (
            dict.fromkeys(range(1, 12), "a"),
            "ranks 1, 2, 3, 4, 5, 6, 7, 8, ... go on without overlap: a",
        ),
    ],
)
def test_reasons_of_many_ranks_in_words(reasons: dict[int, str], words: str) -> None:
    assert off_in_words(reasons) == words


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store, self.asked = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)


def test_where_nobody_said_anything_one_question_is_enough() -> None:
    store: Any = Counting()
    assert find_off(store, 1, range(1000)) == {}
    assert store.asked == 1


def test_a_reason_is_one_line_of_some_length() -> None:
    assert in_one_line("ImportError:\n  no y\n") == "ImportError: no y"
    assert len(in_one_line("x" * 10_000)) == 600


# ---- giving up


def test_a_rank_that_fails_at_the_meeting_says_why(store: Any, clock: VirtualClock) -> None:
    exchange(store, 1, clock).leave("the pass failed: KeyError:\n 'buf0'")
    said = refusal(waiting(store, clock))
    assert said == "rank 1 gave up on step 'scope' (the pass failed: KeyError: 'buf0')"
    assert clock.now() < SOON_S


def test_the_first_reason_stays(store: Any, clock: VirtualClock) -> None:
    one = exchange(store, 1, clock)
    one.leave("first")
    one.leave("second")
    one.leave()
    assert refusal(waiting(store, clock)) == "rank 1 gave up on step 'scope' (first)"


def test_of_several_that_gave_up_the_first_reason_is_quoted(
    store: Any, clock: VirtualClock
) -> None:
    exchange(store, 1, clock).leave()
    exchange(store, 2, clock).leave("no luck")
    said = refusal(waiting(store, clock, ranks=3))
    assert said == "ranks 1, 2 gave up on step 'scope' (rank 2: no luck)"


def test_a_late_rank_hears_for_whom_its_peers_waited_in_vain(
    store: Any, clock: VirtualClock
) -> None:
    refusal(waiting(store, clock))
    late = exchange(store, 1, clock)
    scope = late.find_scope([(0, 1)]).ranks
    outcome = late.run(negotiate(same(2)[1], scope), scope)
    assert not outcome.committed
    assert outcome.why == (
        "rank 0 gave up on step '0-1.2/vote/digest' (rank 1 did not reach step 'scope' within "
        "60 s; see deadline_s in OverlapConfig)"
    )


def test_who_left_in_good_order_gives_no_reason(store: Any, clock: VirtualClock) -> None:
    exchange(store, 1, clock).leave()
    assert refusal(waiting(store, clock)) == "rank 1 gave up on step 'scope'"


# ---- other versions


def meet(store: Any, clock: VirtualClock, *software: Mapping[str, str]) -> set[str]:
    """What ranks that run these hear; it must be the same."""
    calls = [
        waiting(store, clock, ranks=len(software), rank=rank, software=one)
        for rank, one in enumerate(software)
    ]
    found = clock.run(calls)
    assert clock.now() < SOON_S
    assert all(isinstance(one, ScopeFound) for one in found), found
    return {one.why for one in found}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (CORE, ""),
        ({**CORE, "overlap_core": "1.3"}, "rank 0 runs overlap_core 1.2, rank 2 overlap_core 1.3"),
        ({**CORE, "torch": "2.14.1"}, "rank 0 runs torch 2.13.0, rank 2 torch 2.14.1"),
        (
            {"overlap_core": "1.3", "torch": "3"},
            "rank 0 runs overlap_core 1.2 and torch 2.13.0, rank 2 overlap_core 1.3 and torch 3",
        ),
        (
            {"overlap_core": "1.3", "gloo": "7"},
            "rank 0 runs overlap_core 1.2, rank 2 overlap_core 1.3",
        ),
    ],
)
def test_ranks_of_other_versions_do_not_negotiate(
    store: Any, clock: VirtualClock, other: dict[str, str], words: str
) -> None:
    assert meet(store, clock, CORE, CORE, other) == {words}


def foreign(**changes: Any) -> str:
    """A message with other fields than ours."""
    said = ScopeSaid(groups=[(0, 1)], seen=(), gathers=2, software=CORE)
    data = {**json.loads(said.encode()), **changes}
    return json.dumps({name: value for name, value in data.items() if value is not None})


UNKNOWN = "rank 0 runs overlap_core 1.2, rank 1 overlap_core (unknown version)"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (
            foreign(software={"overlap_core": "1.3"}, groups="mesh 2x4", more=[1]),
            "rank 0 runs overlap_core 1.2, rank 1 overlap_core 1.3",
        ),
        (foreign(more=1), UNKNOWN),
        (foreign(gathers=None), UNKNOWN),  # the field is missing
        (foreign(groups=[{"first": 0}]), UNKNOWN),
        (foreign(software=None), UNKNOWN),
        (foreign(software="1.3"), UNKNOWN),
        ("[1]", UNKNOWN),
        ("\x00not JSON", UNKNOWN),
    ],
)
def test_a_message_that_cannot_be_read_is_one_of_another_version(
    store: Any, clock: VirtualClock, payload: str, words: str
) -> None:
    store.set("overlap_core/graph 1/scope/1", payload)
    found = waiting(store, clock, software=CORE)()
    assert (found.ranks, found.why) == ((0, 1), words)


def test_another_version_is_found_by_all_that_it_is_reached_from(
    store: Any, clock: VirtualClock
) -> None:
    """Pairs in a row, of which each rank knows its own: the scope of all of them keeps out."""
    groups = {0: [(0, 1)], 1: [(0, 1), (1, 2)], 2: [(1, 2), (2, 3)], 3: [(2, 3)]}
    for odd in groups:
        fresh: Any = HashStore()

        def run(rank: int, odd: int = odd, fresh: Any = fresh) -> str:
            software = {**CORE, "overlap_core": "1.3"} if rank == odd else CORE
            one = exchange(fresh, rank, clock, software=software)
            return one.find_scope(groups[rank]).why

        found = clock.run([lambda rank=rank: run(rank) for rank in groups])  # type: ignore[misc]
        assert all("overlap_core 1.2" in why and "1.3" in why for why in found), (odd, found)
