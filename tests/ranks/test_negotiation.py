"""The protocol between ranks: what it sends, and that no interleaving splits the ranks.

The model of a shared store below takes every possible order of posting, collecting, giving up and
deciding of two and three ranks. It knows nothing of time: a rank may give up whenever an answer
that it waits for is not there yet, and may die at any moment.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from attrs import define, evolve, field, frozen

from overlap_core.errors import DeadlineError, OverlapError
from overlap_core.outcome import RankOutcome
from overlap_core.pipeline import negotiate
from overlap_core.ranks import (
    Decide,
    Mode,
    Share,
    Vote,
    decode_votes,
    encode_vote,
    run_in_memory,
    run_loopback,
    share_distinct,
    share_explained,
)

from ..pipeline_views import same, skewed, slower_unless_pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlap_core.ranks.negotiation import Protocol
    from overlap_core.views import RankView

T = TypeVar("T")

Answers = tuple[tuple[bytes, ...] | None, ...]
"""What one rank was told so far; None: it gave up."""


@frozen
class _Rank:
    told: Answers = ()
    posted: bool = False
    """Its payload of the present step is in the store."""
    dead: bool = False


@frozen
class _State:
    ranks: tuple[_Rank, ...]
    decided: bytes | None = None


@define
class _Model:
    """All states that ranks with one store can reach."""

    views: list[RankView]
    known: dict[tuple[int, Answers], Share | Decide | RankOutcome] = field(factory=dict)

    def ask(self, index: int, told: Answers) -> Share | Decide | RankOutcome:
        """Where a rank stands after these answers."""
        if (index, told) not in self.known:
            scope = tuple(view.graph.rank for view in self.views)
            protocol = negotiate(self.views[index], scope)
            try:
                request = next(protocol)
                for answer in told:
                    if answer is None:
                        request = protocol.throw(DeadlineError(f"rank {index} waited too long"))
                    else:
                        request = protocol.send(answer)
                self.known[index, told] = request
            except StopIteration as stop:
                self.known[index, told] = stop.value
        return self.known[index, told]

    def payload(self, state: _State, index: int, step: str) -> bytes | None:
        """What a rank has posted for a step."""
        rank = state.ranks[index]
        for count in range(len(rank.told) + rank.posted):
            request = self.ask(index, rank.told[:count])
            if isinstance(request, Share) and request.step == step:
                return request.payload
        return None

    def next_states(self, state: _State, *, deaths: bool) -> Iterator[_State]:
        for index, rank in enumerate(state.ranks):
            request = self.ask(index, rank.told)
            if rank.dead or isinstance(request, RankOutcome):
                continue
            if isinstance(request, Decide):
                decided = request.payload if state.decided is None else state.decided
                yield self._with(state, index, _Rank((*rank.told, (decided,))), decided)
            elif not rank.posted:
                yield self._with(state, index, evolve(rank, posted=True), state.decided)
            else:
                payloads = [self.payload(state, i, request.step) for i in range(len(state.ranks))]
                found = tuple(payload for payload in payloads if payload is not None)
                answer = found if len(found) == len(payloads) else None
                yield self._with(state, index, _Rank((*rank.told, answer)), state.decided)
            if deaths and not any(other.dead for other in state.ranks):
                yield self._with(state, index, evolve(rank, dead=True), state.decided)

    def _with(self, state: _State, index: int, rank: _Rank, decided: bytes | None) -> _State:
        ranks = (*state.ranks[:index], rank, *state.ranks[index + 1 :])
        return _State(ranks, decided)

    def endings(self, *, deaths: bool) -> list[list[RankOutcome]]:
        """The outcomes of the ranks that live, for every state in which all are done."""
        start = _State((_Rank(),) * len(self.views))
        seen, stack, found = {start}, [start], []
        while stack:
            state = stack.pop()
            following = list(self.next_states(state, deaths=deaths))
            if not following:
                ends = [
                    self.ask(i, rank.told) for i, rank in enumerate(state.ranks) if not rank.dead
                ]
                found.append([end for end in ends if isinstance(end, RankOutcome)])
                assert len(found[-1]) == len(ends)
            new = [s for s in dict.fromkeys(following) if s not in seen]
            seen.update(new)
            stack += new
        return found


def _slower(ranks: int) -> list[RankView]:
    views = same(ranks, extra=2, scatter=True)
    return [*views[:-1], slower_unless_pinned(views[-1])]


@pytest.mark.parametrize(
    ("views", "modes"),
    [
        (same(2), {Mode.IDENTICAL, Mode.ABORT}),
        (same(3), {Mode.IDENTICAL, Mode.ABORT}),
        (skewed({}, {"extra": 2}), {Mode.SLOT, Mode.ABORT}),
        (skewed({}, {"extra": 2}, {"extra": 1}), {Mode.SLOT, Mode.ABORT}),
        (same(4), {Mode.IDENTICAL, Mode.ABORT}),
        (skewed({}, {"extra": 2}, {"extra": 1}, {}), {Mode.SLOT, Mode.ABORT}),
        (skewed({}, {"scatter": True}), {Mode.PINNED, Mode.ABORT}),
        (_slower(2), {Mode.PINNED, Mode.ABORT}),
        (_slower(3), {Mode.PINNED, Mode.ABORT}),
        (skewed({}, {"gathers": 1}), {Mode.ABORT}),
        (skewed({}, {"gathers": 1}, {}), {Mode.ABORT}),
    ],
    ids=lambda value: f"{len(value)}" if isinstance(value, list) else "-".join(sorted(value)),
)
@pytest.mark.parametrize("deaths", [False, True])
def test_no_interleaving_splits_the_ranks(
    views: list[RankView], modes: set[Mode], deaths: bool
) -> None:
    endings = _Model(views).endings(deaths=deaths)
    reached = set()
    for outcomes in endings:
        stories = {(o.mode, o.why, o.committed) for o in outcomes}
        assert len(stories) <= 1
        reached |= {outcome.mode for outcome in outcomes}
        for outcome in outcomes:
            program = [node.name for node in outcome.graph.nodes] if outcome.graph else []
            assert outcome.committed or list(outcome.order) == program
    assert reached == modes


def test_equal_payloads_cost_one_digest_each() -> None:
    protocol = share_distinct("vote", b"long " * 1000, 1)
    request = next(protocol)
    assert isinstance(request, Share)
    assert request.step == "vote/digest"
    assert len(request.payload) == 64
    with pytest.raises(StopIteration) as stop:
        protocol.send((request.payload,) * 3)
    assert stop.value.value == (b"long " * 1000,) * 3


def test_of_equal_payloads_only_the_first_rank_sends_the_detail() -> None:
    protocols = [share_distinct("vote", p, i) for i, p in enumerate((b"a", b"b", b"a", b"b"))]
    digests = tuple(next(protocol).payload for protocol in protocols)
    details = tuple(protocol.send(digests).payload for protocol in protocols)
    assert details == (b"a", b"b", b"", b"")
    for protocol in protocols:
        with pytest.raises(StopIteration) as stop:
            protocol.send(details)
        assert stop.value.value == (b"a", b"b", b"a", b"b")


def _count(protocol: Protocol[T], sent: list[int]) -> Protocol[T]:
    """The same protocol, noting the bytes that it sends."""
    request = next(protocol)
    while True:
        sent.append(len(request.payload))
        answer = yield request
        try:
            request = protocol.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def test_what_a_rank_sends_does_not_grow_with_the_world() -> None:
    def bytes_sent(ranks: int) -> int:
        sent: list[int] = []
        scope = tuple(range(ranks))
        first, *others = [negotiate(view, scope) for view in same(ranks)]
        outcomes = run_in_memory([_count(first, sent), *others])
        assert outcomes[0].committed
        return sum(sent)

    assert bytes_sent(2) == bytes_sent(16) < 400


def test_votes_travel_without_their_rank() -> None:
    votes = [Vote(rank=r, can=True, plugin_names=("a 1", "b 2"), entries=3) for r in (4, 7)]
    payloads = [encode_vote(vote) for vote in votes]
    assert payloads[0] == payloads[1]
    assert decode_votes(payloads, (4, 7)) == tuple(votes)


def test_ranks_at_different_steps_are_a_fault_of_the_protocol() -> None:
    with pytest.raises(OverlapError, match="ranks are at different steps"):
        run_in_memory([share_distinct("one", b"", 0), share_distinct("two", b"", 1)])


def test_one_rank_alone_agrees_with_itself() -> None:
    (view,) = same(1)
    outcome = run_loopback(negotiate(view, (0,)), 0, 1)
    assert outcome.mode is Mode.IDENTICAL
    assert outcome == run_in_memory([negotiate(view, (0,))])[0]


def test_the_first_two_that_differ_explain_themselves_in_no_round_of_their_own() -> None:
    def explained(payload: bytes, index: int) -> Any:
        return share_explained("vote", payload, index, lambda: b"because\n%d" % index)

    alike = [explained(b"a", index) for index in range(3)]
    assert run_in_memory(alike) == (((b"a",) * 3, {}),) * 3
    said = (b"b", b"b", b"a", b"c", b"a")
    protocols = [explained(payload, index) for index, payload in enumerate(said)]
    assert run_in_memory(protocols) == ((said, {0: b"because\n0", 2: b"because\n2"}),) * 5
    silent = explained(b"b", 1)
    next(silent)
    digests = tuple(hashlib.sha256(payload).hexdigest().encode() for payload in said)
    assert silent.send(digests).payload == b""
