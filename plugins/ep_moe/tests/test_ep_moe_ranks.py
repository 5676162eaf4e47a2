"""Eager code on real ranks: equal to a mixture on one rank, and replays that fit together."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overlap_ep_moe
import pytest
import torch
import torch.distributed as dist
from overlap_ep_moe import ops
from overlap_ep_moe._replay import COMMUNICATING

from overlap_core import OverlapConfig
from overlap_core.host import PluginHost
from overlap_core.testing import CollectiveRecorder

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = pytest.mark.ranks

FOLDER = Path(__file__).parents[1]


def load_check() -> Any:
    """The script for GPUs as a module."""
    path = FOLDER / "benchmarks" / "check_numerics.py"
    spec = importlib.util.spec_from_file_location("ep_moe_check_numerics", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes look themselves up
    spec.loader.exec_module(module)
    return module


def numerics(rank: int, world_size: int) -> list[tuple[str, float, dict[str, float]]]:
    check = load_check()
    return [
        (
            str(case),
            check.TOLERANCES[case.dtype],
            check.differences(case, torch.device("cpu"), 16, 24),
        )
        for case in check.cases(world_size, 12)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_output_and_gradients_are_those_of_one_rank(
    world_size: int, pooled_ranks: RunRanks
) -> None:
    """Equal, different and no tokens; top-1 and top-2; dropped or not; float32 and bfloat16."""
    results = pooled_ranks(numerics, world_size)
    for result in results:
        assert len(result) == 48
        for case, tolerance, differences in result:
            assert set(differences) == {"out", "x", "router", "up", "down"}
            assert max(differences.values()) <= tolerance, (case, differences)


def test_the_cases_are_those_that_matter() -> None:
    check = load_check()
    cases = check.cases(4, 12)
    assert any(0 in case.tokens for case in cases)
    assert any(len(set(case.tokens)) == 4 for case in cases)
    assert {(case.top_k, case.capacity is None) for case in cases} == {
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    }


def test_the_script_counts_failures() -> None:
    """With a tolerance of nothing a difference is one; infinities and lost gradients are too."""
    check = load_check()
    one = torch.ones(2)
    assert check._difference(one * 1.5, one) == 0.5
    assert check._difference(one, one) == 0.0
    assert check._difference(None, one) == float("inf")
    assert check._difference(one * float("nan"), one) == float("inf")


def replay(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Each communicating op on materialized arguments, with what it issued."""
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    host = PluginHost.discover(OverlapConfig(), plugins=[overlap_ep_moe], environ={})
    local, experts = 3, 3 * world_size
    counts = torch.zeros(2, world_size, local, dtype=torch.int64)
    generic: dict[str, tuple[Any, ...]] = {
        "dispatch": (torch.randn(11, 8), torch.zeros(11, 2).long(), experts, local, group),
        "combine": (torch.randn(50, 8), counts, group),
        "combine_backward": (torch.randn(22, 8), counts, 50, group),
        "dispatch_padded": (torch.randn(experts, 5, 8), local, group),
        "combine_padded": (torch.randn(local, 5 * world_size, 8), experts, group),
    }
    seen = {}
    for name, given in generic.items():
        args, _ = host.materialize(f"overlap_ep::{name}", given, {})
        metadata = [value.tolist() for value in args if torch.is_tensor(value) and value.ndim == 3
                    and value.dtype == torch.int64]  # fmt: skip
        with CollectiveRecorder() as recorder:
            out = getattr(ops, name)(*args)
        shape = tuple((out[0] if name == "dispatch" else out).shape)
        seen[name] = (metadata, recorder.shared(), shape)
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_replays_fit_together_on_real_ranks(world_size: int, pooled_ranks: RunRanks) -> None:
    """Sizes divide by nothing, and still every rank receives just what its peers send."""
    results = pooled_ranks(replay, world_size)
    assert {f"overlap_ep::{name}" for name in results[0]} == COMMUNICATING
    for name in results[0]:
        metadata, issued, _ = results[0][name]
        assert issued
        assert all(result[name][:2] == (metadata, issued) for result in results)
    # 22 assignments go to each expert in turn, so the first ranks receive more than the last.
    received = [result["dispatch"][2][0] for result in results]
    assert sum(received) == 22 * world_size
    assert all(result["combine"][2] == (50 // world_size * world_size, 8) for result in results)
    assert all(result["combine_backward"][2] == (50, 8) for result in results)


def counts_that_travel(rank: int, world_size: int) -> tuple[Any, ...]:
    """A dispatch by hand: rank 0 has two tokens, rank 1 has one, all for other experts."""
    assert dist.group.WORLD is not None
    tokens = [[10.0], [11.0]] if rank == 0 else [[20.0]]
    expert_ids = [[3], [0]] if rank == 0 else [[3]]
    rows, counts = overlap_ep_moe.dispatch(
        torch.tensor(tokens), torch.tensor(expert_ids), 4, 2, dist.group.WORLD.group_name
    )
    back = overlap_ep_moe.combine(rows * 2, counts, dist.group.WORLD.group_name)
    placed = back[overlap_ep_moe.sorted_positions(torch.tensor(expert_ids))]
    return rows.tolist(), counts.tolist(), placed.tolist()


def test_a_dispatch_by_hand(pooled_ranks: RunRanks) -> None:
    first, second = pooled_ranks(counts_that_travel, 2)
    assert first == ([[11.0]], [[[1, 0], [0, 1]], [[1, 0], [0, 0]]], [[[20.0]], [[22.0]]])
    assert second == (
        [[10.0], [20.0]],
        [[[0, 0], [0, 1]], [[0, 1], [0, 1]]],
        [[[40.0]]],
    )


def test_the_script_runs() -> None:
    """As users start it, on one rank; the exit status says whether all cases passed."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
         "--nproc-per-node=1", str(FOLDER / "benchmarks" / "check_numerics.py"), "--tokens=8"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok  ") == 48
