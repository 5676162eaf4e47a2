"""Random sets of ranks through the whole pipeline, and that the checks find what they look for.

`benchmarks/random_ranks.py` runs many more of the same sets.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from overlap_core import pipeline
from overlap_core.ranks import Mode
from overlap_core.testing import (
    FakeRanks,
    GraphBuilder,
    assert_same_collective_sequence,
    graphs_for_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from overlap_core.outcome import RankOutcome

SEED, SETS, CHUNK = 20_240, 3_000, 250
G0, G1 = (("0", (0, 1)), "gather", 0), (("1", (0, 1)), "gather", 0)
"""The first launches on two groups of two ranks."""


@pytest.fixture(scope="module", autouse=True)
def _scripts(repo_root: Path) -> Iterator[None]:
    """The scripts of the benchmarks import each other by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo_root / "benchmarks"))
        yield


@pytest.fixture
def sets() -> ModuleType:
    return import_module("random_sets")


@pytest.fixture
def checks() -> ModuleType:
    return import_module("rank_checks")


@pytest.fixture
def command() -> ModuleType:
    return import_module("random_ranks")


@pytest.fixture
def disunited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks keep their own proposals, and nobody compares what would be committed."""
    monkeypatch.setattr(pipeline, "settle", lambda plan, *args, **options: plan)
    monkeypatch.setattr(pipeline._Side, "plan_digest", lambda *args: "any")


def two_gathers() -> tuple[RankOutcome, ...]:
    """Two gathers on two groups, `w0` and `w1`, of which nothing says which comes first."""

    def fill(g: GraphBuilder) -> None:
        g.mm(name="a")
        g.gather("w0", group="g0")
        g.gather("w1", group="g1")
        g.mm("a", "w0", name="b")
        g.mm("b", "w1", name="c")

    outcomes = FakeRanks(graphs=graphs_for_ranks(2, fill)).run()
    assert [outcome.mode for outcome in outcomes] == [Mode.IDENTICAL] * 2
    return outcomes


def swapped(outcome: RankOutcome, one: str, other: str) -> RankOutcome:
    names = {one: other, other: one}
    return evolve(outcome, order=tuple(names.get(name, name) for name in outcome.order))


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(CHUNK, SETS, CHUNK))],
)
def test_random_sets(command: ModuleType, first: int) -> None:
    print(f"seed {SEED}, sets {first} to {first + CHUNK - 1}")
    tally = command.check_range(SEED, first, first + CHUNK)
    assert tally.faults == ()
    assert tally.sets == CHUNK
    # The sets are worth nothing if they don't reach every mode, or nothing moves in them.
    assert all(tally.modes[str(mode)] > CHUNK // 50 for mode in Mode)
    assert tally.hoisted > CHUNK
    assert tally.misfits > CHUNK // 50


def test_a_set_is_determined_by_seed_and_number(sets: ModuleType) -> None:
    some = [sets.make_set(SEED, number) for number in range(20)]
    assert some == [sets.make_set(SEED, number) for number in range(20)]
    assert len({str([graph.nodes for graph in ranks.graphs]) for ranks in some}) == 20
    assert some[0] != sets.make_set(SEED + 1, 0)


def test_sets_reach_what_they_are_for(sets: ModuleType) -> None:
    some = [sets.make_set(SEED, number) for number in range(200)]
    nodes = [node for ranks in some for graph in ranks.graphs for node in graph.nodes]
    ranks_of = {
        (graph.world_size, node.group_ranks)
        for ranks in some
        for graph in ranks.graphs
        for node in graph.nodes
    }
    assert {len(s.graphs) for s in some} == {2, 3, 4}
    assert {s.divergence for s in some} == {"identical", "compute", "skeleton", "count"}
    assert {s.holds_back for s in some} == {True, False}
    assert len({s.config.max_in_flight_bytes for s in some}) > 2
    assert {(4, (0, 1, 2, 3)), (4, (0, 1)), (4, (0, 2)), (4, (1,))} <= ranks_of
    assert any(node.issues_collective for node in nodes)
    assert any(node.issues_collective and node.group is None for node in nodes)
    assert any("reduce_scatter" in node.op for node in nodes)
    assert any("all_reduce_" in node.op and node.mutates for node in nodes)
    assert any(node.cost_ns is None for node in nodes)


def test_the_shipped_assertion_agrees(sets: ModuleType, checks: ModuleType) -> None:
    """Another check, which names launches by their place among all that two ranks share."""
    compared = 0
    for number in range(100):
        outcomes = sets.run_set(sets.make_set(SEED, number))
        # By place, a launch has another name once an order was restored.
        if not checks.check(outcomes).misfits:
            assert_same_collective_sequence(outcomes)
            compared += 1
    assert compared > 50


def test_good_outcomes_have_no_faults(checks: ModuleType) -> None:
    assert checks.check(two_gathers()) == checks.Checked()


def test_two_collectives_swapped_on_one_rank_are_found(checks: ModuleType) -> None:
    one, other = two_gathers()
    found = checks.check((one, swapped(other, "w0", "w1"))).faults
    assert found[0].startswith("divergent: ranks 0 and 1 issue (('0', (0, 1)), '_c10d_functional.")
    assert found[0].endswith("as number 0 of what they share")
    assert found[1].startswith("deadlock (all block): ")
    assert len(found) == 2
    assert checks.check((swapped(one, "w0", "w1"), swapped(other, "w0", "w1"))).faults == ()


def test_an_illegal_order_is_found(checks: ModuleType) -> None:
    one, other = two_gathers()
    (fault,) = checks.check((one, swapped(other, "a", "b"))).faults
    assert fault.startswith("illegal: rank 1: node 'b' reads buffer 'a' before anything")
    (fault,) = checks.check((one, evolve(other, order=other.order[1:]))).faults
    assert fault.startswith("illegal: rank 1: the order is not one of this graph: missing")


def test_a_move_without_a_commit_is_found(checks: ModuleType) -> None:
    one, other = two_gathers()
    program = tuple(node.name for node in one.graph.nodes)  # type: ignore[union-attr]
    moved = swapped(evolve(one, order=program, committed=False), "w0", "w1")
    assert "illegal: rank 0 moves nodes without a commit" in checks.check((moved, other)).faults
    assert "split: the ranks of scope (0, 1) decide differently" in (
        checks.check((evolve(one, order=program, committed=False), other)).faults
    )


def test_programs_that_do_not_fit_may_stay_or_be_restored(checks: ModuleType) -> None:
    def fill(g: GraphBuilder) -> None:
        for name in ("r0", "r1") if g.rank else ("r1", "r0"):
            g.reduce_scatter("x", name=name, group=f"g{name[-1]}")
        g.mm("r0", "r1")

    graphs = graphs_for_ranks(2, fill)
    untouched = [
        evolve(outcome, order=tuple(node.name for node in graph.nodes), committed=False)
        for graph, outcome in zip(graphs, FakeRanks(graphs=graphs).run(), strict=True)
    ]
    assert checks.check(untouched) == checks.Checked(misfits=1)
    one, other = (evolve(outcome, committed=True) for outcome in untouched)
    restored = (one, swapped(other, "r0", "r1"))
    assert checks.check(restored) == checks.Checked(misfits=1, restored=1)
    found = checks.check((swapped(one, "r0", "r1"), swapped(other, "r0", "r1"))).faults
    assert found[0].startswith("divergent: ranks 0 and 1 issue ")
    assert len(found) == 2


@pytest.mark.parametrize(
    ("first", "second", "stuck"),
    [
        (["issue g0", "issue g1"], ["issue g1", "issue g0"], ""),
        (["issue g0", "issue g1", "block g1"], ["issue g1", "issue g0", "block g0"], ""),
        (["issue g0", "block g0", "issue g1"], ["issue g1", "issue g0", "block g0"], ""),
        (
            ["issue g0", "block g0", "issue g1", "block g1"],
            ["issue g1", "block g1", "issue g0", "block g0"],
            f"rank 0 at {G0}; rank 1 at {G1}; rank 0 issued {G0} alone; rank 1 issued {G1} alone",
        ),
        (["issue g0"], [], f"rank 0 issued {G0} alone"),
    ],
)
def test_deadlocks(checks: ModuleType, first: list[str], second: list[str], stuck: str) -> None:
    def steps(words: list[str]) -> list[Any]:
        return [(word[:5], G0 if word.endswith("g0") else G1) for word in words]

    assert checks.find_deadlock({0: steps(first), 1: steps(second)}) == stuck


def test_two_collectives_of_one_group_swapped_hang(checks: ModuleType) -> None:
    first, second = G0, (*G0[:2], 1)
    ours = [("issue", first), ("issue", second)]
    theirs = [("issue", second), ("issue", first)]
    assert "alone" in checks.find_deadlock({0: ours, 1: theirs})
    assert checks.find_deadlock({0: ours, 1: ours}) == ""


@pytest.mark.usefixtures("disunited")
def test_ranks_that_do_not_agree_are_found(command: ModuleType) -> None:
    tally = command.check_range(3, 0, 100)
    kinds = {fault.split()[0] for _, fault in tally.faults}
    assert kinds == {"divergent:", "deadlock"}


def test_command(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["random_ranks.py", "--sets", "30", "--seed", "5"])
    assert command.main() == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 5: 30 sets, ")
    assert "0 divergent, 0 illegal, 0 deadlock; " in out


@pytest.mark.usefixtures("disunited")
def test_command_prints_sets_that_fail(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["random_ranks.py", "--sets", "100", "--seed", "3"])
    assert command.main() == 1
    first = capsys.readouterr().out.splitlines()[0]
    number = first.split()[3].rstrip(":")
    assert first.startswith(f"seed 3, set {number}: ")
    monkeypatch.setattr(sys, "argv", ["random_ranks.py", "--only", number, "--seed", "3"])
    assert command.main() == 1
    assert capsys.readouterr().out.splitlines()[0] == first
