"""Ranks that do not come together, and what their reports say then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import HashStore

from overlap_core.ranks import Share, StoreExchange
from overlap_core.ranks.notices import say_off

from ..virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlap_core.ranks.negotiation import Protocol

__all__ = ["MEETINGS"]

Prepare = "Callable[[Any, VirtualClock], object]"


def exchange(store: Any, rank: int, clock: VirtualClock, **more: Any) -> StoreExchange:
    return StoreExchange(store, rank, "f", 60, clock, **more)


def seen_from_rank_0(prepare: Prepare, ranks: int = 3, **more: Any) -> str:
    """The reason for program order, after the others did or said something."""
    store, clock = HashStore(), VirtualClock()
    prepare(store, clock)
    try:
        return exchange(store, 0, clock, **more).find_scope([tuple(range(ranks))]).why
    except TimeoutError as error:
        return str(error)


def nobody_comes() -> list[str]:
    return [seen_from_rank_0(lambda store, clock: None)]


def ranks_that_gave_up() -> list[str]:
    def leave(store: Any, clock: VirtualClock) -> None:
        exchange(store, 1, clock).leave("the pass failed: KeyError: 'buf0'")

    return [seen_from_rank_0(leave)]


def ranks_without_overlap() -> list[str]:
    def one(store: Any, clock: VirtualClock) -> None:
        say_off(store, 1, 2, "switched off by OVERLAP_CORE=0 in the environment")

    def two(store: Any, clock: VirtualClock) -> None:
        one(store, clock)
        say_off(store, 1, 1, "plugin 'x' cannot be imported")

    return [seen_from_rank_0(one), seen_from_rank_0(two)]


def ranks_that_know_nothing_of_each_other() -> list[str]:
    def publish(store: Any, clock: VirtualClock) -> None:
        exchange(store, 1, clock).publish_scope([])

    return [seen_from_rank_0(publish, ranks=2)]


def a_rank_without_gathers() -> list[str]:
    def publish(store: Any, clock: VirtualClock) -> None:
        exchange(store, 1, clock).publish_scope([(0, 1)], gathers=0)

    return [seen_from_rank_0(publish, ranks=2)]


def other_versions() -> list[str]:
    def newer(store: Any, clock: VirtualClock) -> None:
        other = exchange(store, 1, clock, software={"overlap_core": "1.3"})
        other.publish_scope([(0, 1)])

    def strange(store: Any, clock: VirtualClock) -> None:
        store.set("overlap_core/f/scope/1", "?")

    software = {"overlap_core": "1.2"}
    return [seen_from_rank_0(one, ranks=2, software=software) for one in (newer, strange)]


def meetings_elsewhere() -> list[str]:
    store, clock = HashStore(), VirtualClock()
    calls = [
        lambda rank=rank: StoreExchange(store, rank, f"f{rank}", 60, clock).find_scope([(0, 1)])
        for rank in (0, 1)
    ]
    return [str(error) for error in clock.run(calls)]


def a_rank_lost_in_the_middle() -> list[str]:
    """It died between saying a word and counting it."""

    def share() -> Protocol[None]:
        yield Share("vote/digest", b"a")

    store, clock = HashStore(), VirtualClock()
    store.set("overlap_core/f/0-1.2/vote/digest/1", "a")
    try:
        exchange(store, 0, clock).run(share(), (0, 1))
    except TimeoutError as error:
        return [str(error)]
    return []


MEETINGS: tuple[Callable[[], list[str]], ...] = (
    nobody_comes, ranks_that_gave_up, ranks_without_overlap, ranks_that_know_nothing_of_each_other,
    a_rank_without_gathers, other_versions, meetings_elsewhere, a_rank_lost_in_the_middle,
)  # fmt: skip
"""Each returns what reports say."""
