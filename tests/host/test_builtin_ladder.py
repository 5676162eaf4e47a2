"""The default ladder: a pure function of the votes, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.builtin.ladder import default
from overlap_core.ranks.votes import Mode, Vote

if TYPE_CHECKING:
    import random

few = st.sampled_from(["a", "b"])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "can": st.booleans(),
    "why": few,
    "config": few,
    "plugins": few,
    "plugin_names": st.sampled_from([(), ("x 1",), ("x 1", "y 2")]),
    "fingerprint": few,
    "skeleton": few,
    "weight_gathers": st.integers(2, 3),
}
SAME_CONFIG = "Give every rank the same OverlapConfig"
BASE = Vote(rank=0, can=True, fingerprint="f", skeleton="s", entries=3, weight_gathers=2)


@st.composite
def ballots(draw: st.DrawFn) -> tuple[Vote, ...]:
    """Votes of 1 to 9 ranks that differ in few things, so that agreement is common."""
    ranks = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True))
    varied = draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=3))
    return tuple(
        attrs.evolve(BASE, rank=rank, **{name: draw(VALUES[name]) for name in sorted(varied)})
        for rank in ranks
    )


def votes(*changes: dict[str, Any], **common: Any) -> tuple[Vote, ...]:
    """One able vote a change, ranks from 0."""
    base: dict[str, Any] = {"can": True, "fingerprint": "f", "skeleton": "s", "entries": 4}
    return tuple(
        Vote(rank=rank, **{**base, **common, **change}) for rank, change in enumerate(changes)
    )


@given(ballots(), st.randoms(use_true_random=False))
def test_the_order_of_votes_changes_nothing(ballot: tuple[Vote, ...], rng: random.Random) -> None:
    shuffled = list(ballot)
    rng.shuffle(shuffled)
    assert default(tuple(shuffled)) == default(ballot)


@given(ballots())
def test_modes_mean_what_they_say(ballot: tuple[Vote, ...]) -> None:
    decision = default(ballot)
    assert decision.why

    def agree(name: str) -> bool:
        return len({getattr(vote, name) for vote in ballot}) == 1

    able = all(vote.can for vote in ballot)
    fits = able and all(agree(name) for name in ("plugins", "config", "weight_gathers"))
    assert (decision.mode is Mode.ABORT) == (not fits)
    if fits:
        assert (decision.mode is Mode.IDENTICAL) == agree("fingerprint")
        assert (decision.mode is Mode.PINNED) == (
            not agree("fingerprint") and not agree("skeleton")
        )


@given(ballots(), st.integers(0, 8))
def test_one_rank_that_cannot_aborts_all(ballot: tuple[Vote, ...], which: int) -> None:
    which %= len(ballot)
    unable = attrs.evolve(ballot[which], can=False, why="out of luck")
    decision = default((*ballot[:which], unable, *ballot[which + 1 :]))
    assert decision.mode is Mode.ABORT
    assert "out of luck" in decision.why or decision.why.count(";") >= 3


@pytest.mark.parametrize(
    ("ballot", "mode", "why"),
    [
        (votes({}), Mode.IDENTICAL, "one graph on rank 0"),
        (votes({}, {}), Mode.IDENTICAL, "one graph on all 2 ranks"),
        (
            votes({}, {"fingerprint": "g"}),
            Mode.SLOT,
            "graphs differ, the 4 skeleton entries match: rank 0: graph f; rank 1: graph g",
        ),
        (
            votes({}, {"fingerprint": "g", "skeleton": "t", "entries": 5}),
            Mode.PINNED,
            "skeletons differ: rank 0: 4 entries, digest s; rank 1: 5 entries, digest t",
        ),
        (
            votes({"weight_gathers": 3}, {}, {}, weight_gathers=2),
            Mode.ABORT,
            "different numbers of weight gathers: rank 0: 3; ranks 1-2: 2",
        ),
        (
            votes({}, {"config": "d"}, {}, config="c"),
            Mode.ABORT,
            f"different configuration: ranks 0, 2: c; rank 1: d. {SAME_CONFIG}",
        ),
        (
            votes({}, {"can": False, "why": "no torch"}, {"can": False, "why": "no torch"}),
            Mode.ABORT,
            "ranks 1-2: cannot (no torch)",
        ),
        (votes({"can": False}), Mode.ABORT, "rank 0: cannot (gave no reason)"),
        ((), Mode.ABORT, "no rank voted"),
    ],
)
def test_decisions_and_their_reasons(ballot: tuple[Vote, ...], mode: Mode, why: str) -> None:
    decision = default(ballot)
    assert (decision.mode, decision.why) == (mode, why)


def test_a_plugin_difference_names_the_plugins() -> None:
    both, one = ("a 1", "b 1"), ("a 1",)
    decision = default(
        votes({}, {}, {"plugins": "q", "plugin_names": one}, plugins="p", plugin_names=both)
    )
    assert decision.mode is Mode.ABORT
    assert decision.why.startswith(
        "different plugins: ranks 0-1: b 1 (digest p); rank 2: nothing that others lack (digest q)."
    )


def test_a_plugin_difference_without_other_names_says_so() -> None:
    decision = default(votes({"plugins": "p"}, {"plugins": "q"}, plugin_names=("a 1",)))
    assert "same names and versions, other order or registered ops: rank 0: " in decision.why


def test_unknown_digests_agree_with_nothing() -> None:
    assert default(votes({}, {}, fingerprint="")).mode is Mode.SLOT
    assert default(votes({}, {}, fingerprint="", skeleton="")).mode is Mode.PINNED


def test_reasons_stay_short_for_many_ranks() -> None:
    alternating: list[dict[str, Any]] = [{"fingerprint": "fg"[rank % 2]} for rank in range(2000)]
    decision = default(votes(*alternating))
    assert decision.mode is Mode.SLOT
    assert "ranks 0, 2, 4, 6, 8, 10 and 994 more: graph f" in decision.why
    every = default(votes(*({"can": False, "why": f"reason {rank}"} for rank in range(2000))))
    assert every.why.endswith("rank 3: cannot (reason 3); and 1996 more")
    assert len(every.why) < 500
