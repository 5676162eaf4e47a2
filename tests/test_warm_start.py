"""The second start of a job: what was agreed and compiled before is used, by all ranks or by none.

Starts that load what another one left are new processes: living ranks know ops of other tests,
which are part of a plan's identity. Elsewhere ranks forget what is not on disk. Every rank has
Inductor caches of its own, as on two machines.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import overlap_core as oc
from overlap_core.inductor.warm_start import _content_digest
from overlap_core.session import session
from overlap_core.testing import host_with, run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]


def gather(shard: torch.Tensor) -> torch.Tensor:
    ops, world = torch.ops._c10d_functional, dist.group.WORLD
    launched = ops.all_gather_into_tensor(shard, world.size(), world.group_name)
    return ops.wait_tensor(launched)


def model(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ops, world = torch.ops._c10d_functional, dist.group.WORLD
    """Without a kernel of its own, whose compiler is slow."""
    x = x @ gather(a)
    x = ops.wait_tensor(ops.all_reduce(x, "sum", world.group_name))
    return x @ gather(b)


def job(rank: int, world_size: int, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """One start: two shapes of one function."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    settings = {"costs": "analytical", "plan_dir": f"{folder}/plans", **config}
    compiled = torch.compile(
        model, fullgraph=True, options=oc.inductor_options(oc.OverlapConfig(**settings))
    )
    torch.manual_seed(0)
    weights = [torch.randn(32, 64)[rank::world_size].contiguous() for _ in range(2)]
    weights = [weight[:, :32].contiguous() for weight in weights]
    with torch.no_grad():
        outputs = [float(compiled(torch.ones(rows, 32), *weights).sum()) for rows in (8, 24)]
    return {
        "outputs": outputs,
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "reports": [(str(r.mode), r.why, r.hoisted, list(r.order)) for r in oc.reports()],
        "calls": [[len(call.launches) for call in r.coalesced] for r in oc.reports()],
        "alone": [any("compiled alone" in note for note in r.notes) for r in oc.reports()],
    }


def start(
    folder: Path, run: RunRanks = run_ranks, world_size: int = 2, **config: Any
) -> list[dict[str, Any]]:
    return run(job, world_size, str(folder), config, deadline_s=500, tries=3)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A job that ran once, and what it saw."""
    folder = tmp_path_factory.mktemp("job")
    return folder, start(folder)


@pytest.fixture
def kept(first: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of what the first start left."""
    return shutil.copytree(first[0], tmp_path / "kept")


@pytest.fixture
def folder(first: tuple[Path, Any], kept: Path) -> Iterator[Path]:
    """What the first start left, in the same place, and as it was again afterwards."""
    yield first[0]
    restore(first[0], kept)


def restore(folder: Path, kept: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)


def plans(folder: Path) -> list[Path]:
    return sorted((folder / "plans").glob("*/rank*.json"))


def test_the_first_start_negotiates_once_and_follows_afterwards(first: Any) -> None:
    for rank in first[1]:
        assert rank["hits"] == 0
        assert [mode for mode, *_ in rank["reports"]] == ["identical", "identical"]
        assert rank["alone"] == [False, True]
    assert len(plans(first[0])) == 2


def test_the_second_start_loads_what_the_first_compiled(folder: Path, first: Any) -> None:
    for before, after in zip(first[1], start(folder), strict=True):
        assert after["hits"] == 2
        assert after["outputs"] == before["outputs"]
        assert after["reports"] == before["reports"]


def test_a_rank_without_its_cache_compiles_the_same_order_alone(folder: Path, first: Any) -> None:
    for cache in ("fxgraph", "aotautograd"):
        shutil.rmtree(folder / "cache1" / cache)
    hit, miss = start(folder)
    assert (hit["hits"], miss["hits"]) == (2, 0)
    assert miss["alone"] == [True, True]
    assert miss["reports"] == hit["reports"] == first[1][0]["reports"]
    assert miss["outputs"] == hit["outputs"]


def test_calls_are_loaded_beside_a_rank_that_compiles_them(
    tmp_path: Path, pooled_ranks: RunRanks
) -> None:
    before = start(tmp_path, pooled_ranks, coalesce=1 << 20)
    for cache in ("fxgraph", "aotautograd"):
        shutil.rmtree(tmp_path / "cache1" / cache)
    hit, miss = start(tmp_path, pooled_ranks, coalesce=1 << 20)
    assert (hit["hits"], miss["hits"]) == (2, 0)
    assert miss["calls"] == hit["calls"] == before[0]["calls"] == [[2], [2]]
    assert miss["reports"] == hit["reports"] == before[0]["reports"]
    assert miss["outputs"] == hit["outputs"] == before[0]["outputs"]


DAMAGE = ("lost", "of another version", "broken", "of another run")


def hurt(path: Path, how: str) -> None:
    """Damage a plan file in one of the ways; anything else leaves it as it is."""
    data = json.loads(path.read_text())
    if how == "lost":
        path.unlink()
    elif how == "of another version":
        data["header"]["overlap_core"] = "0.0.1"
        path.write_text(json.dumps(data))
    elif how == "broken":
        path.write_text(path.read_text()[:-20])
    elif how == "of another run":
        data["file"]["name"] = "another"
        path.write_text(json.dumps(data))


def jobs_after_damage(rank: int, world_size: int, folder: str, kept: str) -> dict[str, Any]:
    """A job for each kind of damage to the plan of rank 1, and one without."""
    found = {}
    for how in (*DAMAGE, "none"):
        dist.barrier()
        if rank == 0:
            restore(Path(folder), Path(kept))
            hurt(plans(Path(folder))[1], how)
        dist.barrier()
        session.reset()
        torch.compiler.reset()
        counters.clear()
        found[how] = job(rank, world_size, folder, {})
        dist.barrier()
        files = [json.loads(path.read_text()) for path in plans(Path(folder))]
        found[how]["names"] = {data["file"]["name"] for data in files}
    return found


def test_a_rank_with_another_plan_makes_all_ranks_start_anew(folder: Path, kept: Path) -> None:
    ranks = run_ranks(jobs_after_damage, 2, str(folder), str(kept), deadline_s=500, tries=3)
    for found in ranks:
        for how in DAMAGE:
            assert found[how]["hits"] == 0, how
            assert found[how]["alone"] == [False, True], how
            assert len(found[how]["names"]) == 1, how
        assert found["none"]["hits"] == 2


def test_another_configuration_is_another_job(folder: Path, pooled_ranks: RunRanks) -> None:
    for rank in start(folder, pooled_ranks, slack_ns=1):
        assert rank["hits"] == 0
        assert rank["alone"] == [False, True]


def test_a_world_of_another_size_is_another_job(folder: Path, pooled_ranks: RunRanks) -> None:
    for rank in start(folder, pooled_ranks, world_size=1):
        assert rank["hits"] == 0


def test_an_edited_plugin_is_another_job(tmp_path: Path) -> None:
    """Its file counts, not its version alone."""
    (tmp_path / "edited_policy.py").write_text("x = 1")
    one = _content_digest([str(tmp_path / "edited_policy.py")])
    (tmp_path / "edited_policy.py").write_text("x = 2")
    assert _content_digest([str(tmp_path / "edited_policy.py")]) != one
    files = host_with("mode_ladders").source_files()
    assert any(file.endswith("overlap_mode_ladders/_ladders.py") for file in files)


def test_without_warm_starts_nothing_is_kept(folder: Path, pooled_ranks: RunRanks) -> None:
    before = {path: path.read_bytes() for path in plans(folder)}
    for _ in range(2):
        for rank in start(folder, pooled_ranks, warm_start=False):
            assert rank["hits"] == 0
            assert rank["alone"] == [False, True]
    assert {path: path.read_bytes() for path in plans(folder)} == before
