"""`run_ranks` returns, reports and cleans up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap_core.testing import CollectiveRecorder, RankFailure, processes, run_ranks

pytestmark = pytest.mark.ranks


def facts(rank: int, world: int, value: object) -> tuple[object, ...]:
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    variables = (os.environ["OMP_NUM_THREADS"], os.environ["SOME_VARIABLE"])
    return rank, world, value, int(total), torch.get_num_threads(), *variables


def test_returns_results_by_rank() -> None:
    results = run_ranks(facts, 3, {"a": 1}, deadline_s=120, env={"SOME_VARIABLE": "x"})
    assert results == [(rank, 3, {"a": 1}, 6, 1, "1", "x") for rank in range(3)]
    assert "SOME_VARIABLE" not in os.environ


def rank_one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def test_a_raising_rank_is_shown_with_its_traceback() -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(rank_one_raises, 2, deadline_s=120)
    message = str(raised.value)
    assert "rank 1 raised" in message
    assert "ValueError: rank one has had enough" in message
    assert "in rank_one_raises" in message
    assert re.search("rank 0 (gave no result|raised)", message)


def rank_one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)


def test_a_dying_rank_is_shown_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match="rank 0 finished\n--- rank 1 died\nexit code 7"):
        run_ranks(rank_one_dies, 2, deadline_s=120)


def hangs(rank: int, world: int, folder: str) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, f"{rank}.new").write_text(f"{os.getpid()} {sleeper.pid}")
    Path(folder, f"{rank}.new").rename(Path(folder, str(rank)))
    if rank == 0:
        dist.barrier()
    time.sleep(600)


def test_the_deadline_shows_where_ranks_are_and_ends_all_they_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes as soon as both ranks hang, however long that takes."""

    def clock() -> float:
        hanging = all((tmp_path / rank).exists() for rank in "01")
        return time.monotonic() + 10_000 * hanging

    monkeypatch.setattr(processes, "monotonic", clock)
    with pytest.raises(RankFailure) as raised:
        run_ranks(hangs, 2, str(tmp_path), deadline_s=600)
    message = str(raised.value)
    assert message.count("the deadline of 600 s; at:") == 2
    assert message.count("in hangs") == 2
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be reaped by a distant parent."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.1)
    return True


def test_needs_a_module_level_function() -> None:
    with pytest.raises(TypeError, match="module-level function"):
        run_ranks(lambda rank, world: None, 1, deadline_s=60)


def records(rank: int, world: int) -> list[tuple[str, int, int]]:
    alone, _ = dist.new_subgroups(group_size=1)
    with CollectiveRecorder() as recorder:
        dist.all_reduce(torch.ones(1), group=alone)
        dist.all_reduce(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="another CollectiveRecorder is active"):
            CollectiveRecorder().__enter__()
    dist.all_reduce(torch.ones(1))  # not recorded
    with CollectiveRecorder() as second:
        dist.broadcast(torch.ones(1), 0)
    assert [(seen.op, seen.numel) for seen in second.collectives] == [("broadcast_", 1)]
    assert recorder.shared() == [("allreduce_", 2, 0, ("float32",))]
    return [(seen.op, seen.group_size, seen.numel) for seen in recorder.collectives]


def test_recorder_sees_eager_collectives_while_it_is_active() -> None:
    expected = [("allreduce_", 1, 1), ("allreduce_", 2, 6)]
    assert run_ranks(records, 2, deadline_s=120) == [expected] * 2


def abort_once(rank: int, world_size: int, marker: str) -> int:
    """Die of a memory fault at the first try."""
    path = Path(f"{marker}{rank}")
    if not path.exists():
        path.write_text("tried")
        os.abort()
    return rank


def test_ranks_that_died_of_a_memory_fault_are_started_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = str(tmp_path / "tried")
    with pytest.raises(RankFailure, match="exit code -6"):
        run_ranks(abort_once, 2, marker + "-first", deadline_s=120)
    assert run_ranks(abort_once, 2, marker, deadline_s=120, tries=2) == [0, 1]
    assert "anew after a memory fault" in capfd.readouterr().err
