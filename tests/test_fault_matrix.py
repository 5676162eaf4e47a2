"""Every way in which ranks can fail to arrive together, on real gloo processes.

Each case must end in time, and leave all ranks that are alive with one sequence of communication,
or in program order.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from overlap_core.ranks import StoreExchange
from overlap_core.testing import run_ranks

from .fault_cases import (
    CASES,
    HOOKS,
    LONG_S,
    ON_FOUR_RANKS,
    PLUGIN_S,
    SHORT_S,
    function,
    inputs,
    order_of,
    play,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

DYING = tuple(name for name in CASES if name.startswith("dies"))


Seen = "list[list[dict[str, Any]]]"


def on(*names: str) -> Any:
    """Run a test for each of these cases, on two ranks and on four."""
    rows = []
    for name in names:
        marks = () if name in ON_FOUR_RANKS else pytest.mark.full
        rows += [(2, name), pytest.param(4, name, marks=marks)]
    return pytest.mark.parametrize(("world_size", "name"), rows)


@pytest.fixture(scope="module")
def play_once(pooled_ranks: RunRanks) -> Callable[[int, str], Seen]:
    return cache(lambda world_size, name: pooled_ranks(play, world_size, name, deadline_s=500))


@pytest.fixture
def runs(play_once: Callable[[int, str], Seen], world_size: int, name: str) -> Seen:
    """What each rank saw of a case; every rank but the second behaves alike."""
    return play_once(world_size, name)


def alive(runs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [run for run in runs if run[-1]["mode"] not in ("died", "none", "refused")]


def is_program_order(graph: dict[str, Any]) -> bool:
    return graph["sequence"] == sorted(graph["sequence"])


@on(*CASES)
def test_ranks_end_alike(runs: Seen, name: str) -> None:
    there = alive(runs)
    assert there
    lasts = [run[-1] for run in there]
    if name == "alone_after":
        lasts = [graph for run in there for graph in run]
    one_sequence = len({tuple(graph["sequence"]) for graph in lasts}) == 1
    assert one_sequence or all(map(is_program_order, lasts)), lasts
    assert len({graph["committed"] for graph in lasts}) == 1 or all(map(is_program_order, lasts))


@on("plain", "compute_differs", "extra_graph", "threads", "late")
def test_overlap_stays_on(runs: Seen) -> None:
    for run in runs:
        for graph in run:
            assert graph["committed"]
            assert graph["hoisted"]


@on("plain", "compute_differs")
def test_modes(runs: Seen, name: str) -> None:
    mode = {"plain": "identical", "compute_differs": "slot"}[name]
    assert {run[0]["mode"] for run in runs} == {mode}


@on("no_gather")
def test_a_rank_without_gathers_is_not_waited_for(runs: Seen) -> None:
    assert max(run[0]["seconds"] for run in runs) < LONG_S / 2
    assert runs[0][0]["why"] == "different numbers of weight gathers: rank 1: 0"


@on("alone_after")
def test_alone_after_an_agreement_nobody_is_asked(runs: Seen) -> None:
    for again in runs[1][1:]:
        assert again["sequence"] == runs[0][0]["sequence"]
        assert again["hoisted"] == runs[0][0]["hoisted"]
        assert "compiled alone: follows what was agreed for an earlier graph" in again["notes"]


@on("alone_after_with_another_skeleton")
def test_alone_with_communication_that_peers_lack_is_refused_and_said(runs: Seen) -> None:
    alone = runs[1][1]
    assert alone["mode"] == "refused"
    assert "_c10d_functional.all_reduce_.default float32 on a group of" in alone["why"]
    assert f"did not reach step 'scope' within {LONG_S:g} s" in alone["why"]
    # What all ranks compile next is not disturbed.
    for run in runs:
        assert run[-1]["committed"]


@on("alone_and_broken")
def test_a_pass_that_fails_where_gathers_were_moved_is_no_program_order(runs: Seen) -> None:
    for broken in runs[1][1:]:
        assert broken["mode"] == "refused"
        assert "the pass failed: TypeError" in broken["why"]
        assert "peers may run one of this function in which gathers were moved" in broken["why"]


@on("too_late")
def test_too_late_is_program_order_for_all(runs: Seen) -> None:
    for run in runs:
        assert not run[0]["committed"]


@on("blocks")
def test_a_plugin_that_blocks_is_named_on_all_ranks(runs: Seen) -> None:
    for run in runs:
        assert not run[0]["committed"]
        assert "'failing', hook overlap_classify_node" in run[0]["why"]
        assert f"has not returned for {PLUGIN_S:g} s" in run[0]["why"]
        assert run[0]["seconds"] < LONG_S / 2


@on("stages")
def test_stages_negotiate_for_themselves(runs: Seen) -> None:
    half = len(runs) // 2
    for rank, run in enumerate(runs):
        first = rank // half * half
        assert run[0]["scope"] == tuple(range(first, first + half))
        assert run[0]["committed"]
    if half > 1:
        assert [run[0]["mode"] for run in runs] == ["slot", "slot", "identical", "identical"]


@on(*(f"raises in {hook}" for hook in HOOKS))
def test_a_hook_that_raises_is_named_on_all_ranks(runs: Seen, name: str) -> None:
    hook = name.removeprefix("raises in ")
    for run in runs:
        assert not run[0]["committed"]
        assert f"plugin 'failing', hook {hook}" in run[0]["why"]
        assert "rank 1" in run[0]["why"]


@on(*DYING)
def test_the_others_go_on_long_before_their_deadline_for_peers_that_come(runs: Seen) -> None:
    for run in alive(runs):
        assert run[0]["seconds"] < LONG_S / 2


def killed(rank: int, world_size: int, step: int) -> dict[str, Any]:
    """One rank's process ends in the middle of a negotiation."""
    original = StoreExchange._share
    count = 0

    def share(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        if rank == 1 and count == step:
            os._exit(9)
        return original(self, *args)

    StoreExchange._share = share  # type: ignore[method-assign]
    extra = "x = x.cos()" if rank else "pass"
    return order_of(function("killed", extra), *inputs(), deadline_s=SHORT_S)


@pytest.mark.parametrize("step", [1, pytest.param(4, marks=pytest.mark.full)])
def test_when_a_process_is_killed_the_others_keep_program_order_in_time(step: int) -> None:
    results = run_ranks(killed, 4, step, deadline_s=400, may_die=[1])
    assert results[1] is None
    for result in (results[0], *results[2:]):
        assert not result["committed"]
        assert is_program_order(result)
        assert "rank 1 did not reach step" in result["why"]
        assert result["seconds"] < LONG_S / 2
