"""`overlap-core demo`, real: each case compiles on two gloo ranks of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from click.testing import CliRunner, Result

from overlap_core.cli import main
from overlap_core.testing import RankFailure, RecordedCollective
from overlap_core.testing.demo import PHASES, DemoResult, slowest_phase

if TYPE_CHECKING:
    from pathlib import Path


def run(*args: str, **env: str) -> Result:
    settings = {"COLUMNS": "100", **env}
    return CliRunner().invoke(main, ["demo", *args], env=settings, catch_exceptions=False)


@pytest.mark.ranks
@pytest.mark.usefixtures("covered_processes")
@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ((), "identical"),
        pytest.param(("--diverge", "compute"), "slot", marks=pytest.mark.full),
        pytest.param(("--diverge", "skeleton"), "pinned", marks=pytest.mark.full),
        pytest.param(("--diverge", "count", "--even"), "abort", marks=pytest.mark.full),
    ],
)
def test_demo_ends_in_the_mode_that_the_divergence_calls_for(
    arguments: tuple[str, ...], mode: str
) -> None:
    result = run("--blocks", "1", *arguments)
    assert result.exit_code == 0, result.output
    assert f"mode: {mode} - " in result.stdout
    assert result.stdout.count("│ equal") == 2
    assert result.stdout.count("ok    ") == 3
    assert not any(phase in result.output for phase in PHASES)  # this is no terminal
    assert "\x1b" not in result.stdout


def gather(numel: int = 64, *, group_size: int = 2) -> RecordedCollective:
    return RecordedCollective(
        op="_allgather_base_",
        group_size=group_size,
        group_ordinal=0,
        shapes=((numel,),),
        dtypes=("float32",),
    )


def all_to_all(length: int) -> RecordedCollective:
    return RecordedCollective(
        op="alltoall_base_",
        group_size=2,
        group_ordinal=0,
        shapes=((length, 8),),
        dtypes=("float32",),
    )


GOOD = DemoResult(
    rank=0,
    mode="identical",
    why="all graphs are equal",
    gathers=(),
    outputs_equal=True,
    before=(),
    after=(gather(64), all_to_all(7), gather(32)),
)


def run_with(monkeypatch: pytest.MonkeyPatch, *results: DemoResult) -> Result:
    monkeypatch.setattr("overlap_core.testing.run_ranks", lambda *_, **__: list(results))
    return run("--blocks", "2")


def other(**changes: object) -> DemoResult:
    return attrs.evolve(GOOD, rank=1, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"after": (gather(64), all_to_all(9), gather(32))},
        {"after": (gather(64), all_to_all(7), gather(8, group_size=1), gather(32))},
    ],
)
def test_lengths_and_groups_of_one_rank_may_differ(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    result = run_with(monkeypatch, GOOD, other(**changes))
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.stdout


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"outputs_equal": False}, "bit for bit"),
        ({"after": (gather(32), all_to_all(7), gather(64))}, "one order"),
        ({"after": (gather(64), gather(32), all_to_all(7))}, "one order"),
        ({"after": (gather(64),)}, "one order"),
        ({"mode": "slot"}, "mode identical"),
        ({"mode": None, "why": "the pass was not called"}, "mode identical"),
    ],
)
def test_a_check_that_fails_is_named_and_is_status_1(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], check: str
) -> None:
    result = run_with(monkeypatch, GOOD, other(**changes))
    assert result.exit_code == 1
    (failed,) = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert check in failed


def test_a_rank_that_dies_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankFailure("rank 1 died")

    monkeypatch.setattr("overlap_core.testing.run_ranks", fail)
    result = run()
    assert result.exit_code == 1
    assert "rank 1 died" in result.stderr


@pytest.mark.parametrize("arguments", [("--ranks", "1"), ("--diverge", "wildly"), ("extra",)])
def test_bad_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_the_phase_shown_is_that_of_the_slowest_rank(tmp_path: Path) -> None:
    assert slowest_phase(tmp_path, 2) == 0
    (tmp_path / "rank0").write_text("2")
    assert slowest_phase(tmp_path, 2) == 0
    (tmp_path / "rank1").write_text("1")
    assert slowest_phase(tmp_path, 2) == 1
    (tmp_path / "rank1").write_text("")  # about to be written
    assert slowest_phase(tmp_path, 2) == 0
