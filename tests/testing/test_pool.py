"""A `RankPool` keeps its ranks, and each call finds them as new ones."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.testing import RankFailure, RankPool, shard_module

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def compiled_step(rank: int, world_size: int) -> dict[str, Any]:
    """A model compiled with the pass on, and settings left behind."""
    mesh = init_device_mesh("cpu", (world_size,))
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(2)]
    model = shard_module(torch.nn.Sequential(*layers), mesh)
    oc.enable(oc.OverlapConfig(costs="analytical"))
    with torch.no_grad():
        output = torch.compile(model, fullgraph=True)(torch.ones(8, 32))
    torch._inductor.config.max_autotune = not torch._inductor.config.max_autotune
    os.environ["TORCH_LEFT_BEHIND"] = "1"
    return {
        "pid": os.getpid(),
        "output": output.tolist(),
        "reports": [(str(report.mode), report.why) for report in oc.reports()],
        "group": mesh.get_group().group_name,
        "plans": os.environ["OVERLAP_CORE_PLAN_DIR"],
    }


def found(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "reports": len(oc.reports()),
        "environment": "TORCH_LEFT_BEHIND" in os.environ,
        "max_autotune": torch._inductor.config.max_autotune,
        "random": torch.rand(1).item(),
        "sum": float(sum_of(torch.tensor([rank + 1.0]))),
    }


def sum_of(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value


@pytest.mark.timeout(600)
def test_each_call_finds_ranks_as_new_ones(pool: RankPool) -> None:
    before = pool.run(found, deadline_s=120)
    first = pool.run(compiled_step, deadline_s=300, tries=3)
    between = pool.run(found, deadline_s=120)
    second = pool.run(compiled_step, deadline_s=300, tries=3)
    assert between == before
    assert [rank["pid"] for rank in first] == [rank["pid"] for rank in before]
    for one, other in zip(first, second, strict=True):
        assert one["reports"] == [("identical", "one graph on all 2 ranks")]
        assert one.pop("plans") != other.pop("plans")
        assert one == other


def rank_one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def rank_one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)


@pytest.mark.parametrize("fails", [rank_one_raises, rank_one_dies])
def test_ranks_of_a_call_that_failed_are_replaced(pool: RankPool, fails: Any) -> None:
    before = pool.run(found, deadline_s=120)
    with pytest.raises(RankFailure, match=f"{fails.__name__} failed on 2 ranks"):
        pool.run(fails, deadline_s=120)
    after = pool.run(found, deadline_s=120)
    assert not {rank.pop("pid") for rank in before} & {rank.pop("pid") for rank in after}
    assert after == before


def cannot_be_made_fresh(rank: int, world: int) -> None:
    """Its group cannot be destroyed."""

    def fail() -> None:
        raise RuntimeError("the group stays")

    if rank == 1:
        dist.destroy_process_group = fail  # type: ignore[assignment]


def test_a_call_that_leaves_ranks_unusable_fails_itself(pool: RankPool) -> None:
    with pytest.raises(
        RankFailure,
        match=r"rank 0 finished\n--- rank 1 raised\n(.*\n)*RuntimeError: the group stays",
    ):
        pool.run(cannot_be_made_fresh, deadline_s=120)
    assert len(pool.run(found, deadline_s=120)) == 2
