"""Coming together before a collective: all ranks issue it or none, whoever stops waiting when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve, frozen

from overlap_core.errors import DeadlineError
from overlap_core.ranks import Decide, Share, meet

if TYPE_CHECKING:
    from collections.abc import Iterator

LATE = "late"
"""In place of an answer: the rank stopped waiting."""


@frozen
class _Rank:
    posted: bool = False
    told: tuple[tuple[bytes, ...] | str, ...] = ()


@frozen
class _State:
    ranks: tuple[_Rank, ...]
    decided: bytes | None = None


def ask(ready: bool, told: tuple[tuple[bytes, ...] | str, ...]) -> Share | Decide | bool:
    """Where a rank stands after these answers: what it asks next, or whether it goes ahead."""
    protocol = meet("step", ready=ready)
    try:
        request = next(protocol)
        for answer in told:
            if isinstance(answer, str):
                request = protocol.throw(DeadlineError("waited too long"))
            else:
                request = protocol.send(answer)
    except StopIteration as stop:
        return bool(stop.value)
    except DeadlineError:
        return False
    return request


def following(state: _State, ready: tuple[bool, ...], *, silent: bool) -> Iterator[_State]:
    """States after one step of one rank; with `silent` the last rank never comes."""
    for index, rank in enumerate(state.ranks[: len(ready) - silent]):
        request = ask(ready[index], rank.told)
        if isinstance(request, bool):
            continue
        decided = state.decided
        if isinstance(request, Decide):
            decided = decided or request.payload
            ways = [_Rank(True, (*rank.told, (decided,)))]
        elif not rank.posted:
            ways = [evolve(rank, posted=True)]
        else:
            ways = [_Rank(True, (*rank.told, LATE))]
            if all(other.posted for other in state.ranks):
                words = tuple(_word(one) for one in ready)
                ways.append(_Rank(True, (*rank.told, words)))
        for way in ways:
            ranks = (*state.ranks[:index], way, *state.ranks[index + 1 :])
            yield _State(ranks, decided)


def _word(ready: bool) -> bytes:
    request = ask(ready, ())
    assert isinstance(request, Share)
    return request.payload


def endings(ready: tuple[bool, ...], *, silent: bool = False) -> set[tuple[bool, ...]]:
    """Who goes ahead, in every state in which all ranks that came are done."""
    stack, seen, found = [_State((_Rank(),) * len(ready))], set(), set()
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        after = list(following(state, ready, silent=silent))
        if not after:
            ends = [ask(ready[i], r.told) for i, r in enumerate(state.ranks[: len(ready) - silent])]
            found.add(tuple(end is True for end in ends))
        stack += after
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_go_ahead_or_none(ranks: int) -> None:
    assert endings((True,) * ranks) == {(True,) * ranks, (False,) * ranks}


@pytest.mark.parametrize("ready", [(False, True), (True, False), (True, True, False)])
def test_nobody_goes_ahead_if_one_cannot(ready: tuple[bool, ...]) -> None:
    assert endings(ready) == {(False,) * len(ready)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_nobody_goes_ahead_if_one_never_comes(ranks: int) -> None:
    assert endings((True,) * ranks, silent=True) == {(False,) * (ranks - 1)}
