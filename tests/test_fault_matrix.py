"""Every way in which ranks can fail to arrive together, on real gloo processes.

Each case must end in time, and leave all ranks that are alive with one sequence of communication,
or in program order.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from overlap_core.ranks import StoreExchange

from .fault_cases import CASES, HOOKS, LONG_S, SHORT_S, function, inputs, order_of, play

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlap_core.testing import RunRanks

Result = "dict[str, Any]"

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

DYING = tuple(name for name in CASES if name.startswith("dies"))


@pytest.fixture(scope="module", params=[2, 4])
def results(
    request: pytest.FixtureRequest, pooled_ranks: RunRanks
) -> list[Mapping[str, list[dict[str, Any]]]]:
    """What each rank saw of each case; every rank but the second behaves alike."""
    return pooled_ranks(play, request.param, list(CASES), deadline_s=500)


def of(results: list[Mapping[str, list[Any]]], name: str) -> list[list[dict[str, Any]]]:
    return [result[name] for result in results]


def alive(runs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [run for run in runs if run[-1]["mode"] not in ("died", "none")]


def is_program_order(graph: dict[str, Any]) -> bool:
    return graph["sequence"] == sorted(graph["sequence"])


@pytest.mark.parametrize("name", CASES)
def test_ranks_end_alike(results: Any, name: str) -> None:
    runs = alive(of(results, name))
    assert runs
    lasts = [run[-1] for run in runs]
    if name == "alone_after":
        lasts = [graph for run in runs for graph in run]
    one_sequence = len({tuple(graph["sequence"]) for graph in lasts}) == 1
    assert one_sequence or all(map(is_program_order, lasts)), lasts
    assert len({graph["committed"] for graph in lasts}) == 1 or all(map(is_program_order, lasts))


@pytest.mark.parametrize("name", ["plain", "compute_differs", "extra_graph", "threads", "late"])
def test_overlap_stays_on(results: Any, name: str) -> None:
    for run in of(results, name):
        for graph in run:
            assert graph["committed"]
            assert graph["hoisted"]


def test_modes(results: Any) -> None:
    assert {run[0]["mode"] for run in of(results, "plain")} == {"identical"}
    assert {run[0]["mode"] for run in of(results, "compute_differs")} == {"slot"}


def test_a_rank_without_gathers_is_not_waited_for(results: Any) -> None:
    runs = of(results, "no_gather")
    assert max(run[0]["seconds"] for run in runs) < LONG_S / 2
    assert runs[0][0]["why"] == "different numbers of weight gathers: rank 1: 0"


def test_alone_after_an_agreement_nobody_is_asked(results: Any) -> None:
    runs = of(results, "alone_after")
    for again in runs[1][1:]:
        assert again["sequence"] == runs[0][0]["sequence"]
        assert again["hoisted"] == runs[0][0]["hoisted"]
        assert "compiled alone: follows what was agreed for an earlier graph" in again["notes"]


def test_alone_with_a_new_skeleton_program_order_is_kept_and_said(results: Any) -> None:
    runs = of(results, "alone_after_with_another_skeleton")
    alone = runs[1][1]
    assert is_program_order(alone)
    assert f"did not reach step 'scope' within {SHORT_S:g} s" in alone["why"]
    # What all ranks compile next is not disturbed.
    for run in runs:
        assert run[-1]["committed"]


def test_too_late_is_program_order_for_all(results: Any) -> None:
    for run in of(results, "too_late"):
        assert not run[0]["committed"]


def test_a_plugin_that_blocks_is_named_on_all_ranks(results: Any) -> None:
    for run in of(results, "blocks"):
        assert not run[0]["committed"]
        assert "'failing', hook overlap_classify_node" in run[0]["why"]
        assert "has not returned for 0.5 s" in run[0]["why"]
        assert run[0]["seconds"] < LONG_S / 2


def test_stages_negotiate_for_themselves(results: Any) -> None:
    runs = of(results, "stages")
    half = len(runs) // 2
    for rank, run in enumerate(runs):
        first = rank // half * half
        assert run[0]["scope"] == tuple(range(first, first + half))
        assert run[0]["committed"]
    if half > 1:
        assert [run[0]["mode"] for run in runs] == ["slot", "slot", "identical", "identical"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_named_on_all_ranks(results: Any, hook: str) -> None:
    for run in of(results, f"raises in {hook}"):
        assert not run[0]["committed"]
        assert f"plugin 'failing', hook {hook}" in run[0]["why"]
        assert "rank 1" in run[0]["why"]


@pytest.mark.parametrize("name", DYING)
def test_the_others_go_on_within_the_deadline(results: Any, name: str) -> None:
    """The time of a compile is left out of account generously: machines are busy."""
    for run in alive(of(results, name)):
        assert run[0]["seconds"] < SHORT_S + 20


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


@pytest.mark.parametrize("step", [1, 4])
def test_when_a_process_is_killed_the_others_keep_program_order_in_time(
    step: int, pooled_ranks: RunRanks
) -> None:
    results = pooled_ranks(killed, 4, step, may_die=[1])
    assert results[1] is None
    for result in (results[0], *results[2:]):
        assert not result["committed"]
        assert is_program_order(result)
        assert "rank 1 did not reach step" in result["why"]
        assert result["seconds"] < SHORT_S + 20
