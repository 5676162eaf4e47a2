"""The check of the collective order on real ranks, in eager and in compiled code."""

from __future__ import annotations

import logging
import queue
import re
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.errors import ConfigError
from overlap_core.inductor.groups import default_store
from overlap_core.testing import (
    CollectiveRecorder,
    Transformer,
    TransformerConfig,
    example_input,
    shard_module,
)

if TYPE_CHECKING:
    from pathlib import Path

    from overlap_core.testing import RunRanks

real_ranks = pytest.mark.ranks


LONG_S = 200.0
"""Of waits that end well before."""


class Messages(logging.Handler):
    """What the check logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.fresh: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        logging.getLogger("overlap_core.inductor.order_check").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))
        self.fresh.put(self.seen[-1])

    def wait_for(self, text: str) -> tuple[str, str]:
        """The first one that holds a text, of those that nobody waited for."""
        while text not in (found := self.fresh.get())[1]:
            pass
        return found


def tell(key: str) -> None:
    default_store().set(f"test/{key}", "")


def wait_for(key: str) -> None:
    """Wait until some rank tells it, on a connection that nobody else uses."""
    default_store().clone().wait([f"test/{key}"], timedelta(seconds=LONG_S))


def eager_steps(rank: int, world: int) -> dict[str, Any]:
    """Three steps of every kind of collective on a mesh of groups, then one that isn't recorded."""
    messages = Messages()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    twin = dist.new_group()
    groups = [dist.group.WORLD, twin, mesh.get_group("a"), mesh.get_group("b")]
    results = []

    def step() -> None:
        x = torch.arange(4.0) + rank
        for group in groups:
            size = dist.get_world_size(group)
            root = dist.get_process_group_ranks(group)[0]  # type: ignore[arg-type]
            parts = [torch.zeros(4) for _ in range(size)]
            work = dist.all_gather(parts, x, group=group, async_op=True)
            dist.all_reduce(x.clone(), group=group)
            dist.broadcast(parts[0].clone(), root, group=group)
            dist.gather(x, parts if rank == root else None, root, group=group)
            dist.reduce_scatter_tensor(torch.zeros(4), torch.cat([x] * size), group=group)
            # Uneven: each rank has its own sizes.
            splits = [1 + number + dist.get_rank(group) for number in range(size)]
            received = [1 + number + dist.get_rank(group) for number in range(size)]
            out = torch.zeros(sum(received))
            dist.all_to_all_single(out, torch.ones(sum(splits)), received, splits, group=group)
            dist.barrier(group)
            work.wait()
            results.append(torch.cat([*parts, out]))

    other = rank ^ 1
    with oc.check_collective_order(steps=3, every=4, deadline_s=LONG_S) as check:
        for _ in range(4):
            assert check.recording is (len(results) < 12)
            step()
            if rank % 2:
                dist.send(torch.ones(1), other)
                dist.recv(torch.ones(1), other)
            else:
                dist.recv(torch.ones(1), other)
                dist.send(torch.ones(1), other)
            check.step()
    return {
        "found": (*check.divergences, *check.stalls),
        "log": messages.seen,
        "equal": all(torch.equal(results[i], results[12 + i % 4]) for i in range(12)),
    }


@real_ranks
def test_equal_orders_are_not_reported(pooled_ranks: RunRanks) -> None:
    """Nor are lists that only roots have, uneven splits, and point-to-point operations."""
    for result in pooled_ranks(eager_steps, 4):
        assert result == {"found": (), "log": [], "equal": True}


def swapped(rank: int, world: int) -> tuple[list[tuple[str, str]], list[Any]]:
    """Two communicators of the same ranks, used in another order by the last rank."""
    messages = Messages()
    weights, context = dist.new_group(), dist.new_group()
    with oc.check_collective_order(steps=1, deadline_s=LONG_S) as check:
        for group in (weights, context, weights):
            dist.all_reduce(torch.ones(8), group=group)
        order = (context, weights) if rank == world - 1 else (weights, context)
        works = [dist.all_reduce(torch.ones(8), group=g, async_op=True) for g in order]
        for work in works:
            work.wait()
        dist.barrier()
        check.step()
    return messages.seen, list(check.divergences)


@real_ranks
@pytest.mark.parametrize("world", [2, 4])
def test_communicators_in_another_order_are_reported_with_both_sequences(
    world: int, pooled_ranks: RunRanks
) -> None:
    results = pooled_ranks(swapped, world)
    last = world - 1
    everybody = "[0,1]" if world == 2 else "[0-3]"
    neighbours = {0, last - 1}
    for rank, (log, divergences) in enumerate(results):
        peers = sorted(neighbours) if rank == last else [last] if rank in neighbours else []
        assert sorted(one.peer for one in divergences) == peers
        assert log == [("ERROR", str(one)) for one in divergences]
        for one in divergences:
            usual, changed = (one.theirs, one.mine) if rank == last else (one.mine, one.theirs)
            text = f"allreduce_ float32[8] on {everybody}"
            assert one.position == 4
            assert one.groups == (everybody, f"{everybody}#1", f"{everybody}#2")
            names = [f"{text}#{number}" for number in (1, 2, 1, 1, 2)]
            ending = (f"barrier on {everybody}", "(ended)")
            assert usual == (*names, *ending)
            assert changed == (*names[:3], names[4], names[3], *ending)


def one_is_missing(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 keeps back the third all-reduce, in which rank 0 blocks, until that was reported."""
    messages = Messages()
    seen: list[tuple[str, str]] = []

    def tell_what_is_seen() -> None:
        seen.append(messages.wait_for("rank 1 has issued 2 of 3"))
        tell("reported")

    check = oc.check_collective_order(deadline_s=1)
    check.start()
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2))
    if rank == 0:
        threading.Thread(target=tell_what_is_seen, daemon=True).start()
    else:
        wait_for("reported")
    dist.all_reduce(torch.ones(3))
    check.stop(wait=False)
    return {"while blocked": seen, "stalls": check.stalls, "divergences": check.divergences}


@real_ranks
def test_a_collective_that_a_rank_never_issues_is_reported_while_the_other_blocks(
    pooled_ranks: RunRanks,
) -> None:
    blocked, _ = pooled_ranks(one_is_missing, 2, pg_timeout_s=LONG_S)
    *_, stall = blocked["stalls"]  # a rank that is only slow is a stall as well
    assert blocked["while blocked"] == [("WARNING", str(stall))]
    assert "rank 1 has issued 2 of 3 on group [0,1], and nothing in the last " in str(stall)
    assert "last: allreduce_ float32[2] on [0,1]; its process " in str(stall)
    assert stall.waited_s >= 1


def another_collective(rank: int, world: int) -> dict[str, Any]:
    """Both block, each in a collective of another communicator, until both have been told why."""
    messages = Messages()
    seen: list[tuple[str, str]] = []
    limit = timedelta(seconds=LONG_S)
    weights, context = (dist.new_group(timeout=limit) for _ in range(2))
    dist.barrier(weights)
    dist.barrier(context)

    def gather() -> None:
        dist.all_gather_into_tensor(torch.ones(8), torch.ones(4), group=weights)

    def exchange() -> None:
        dist.all_to_all_single(torch.ones(6), torch.ones(6), group=context)

    mine, other = (gather, exchange) if rank == 0 else (exchange, gather)

    def help_the_other() -> None:
        seen.append(messages.wait_for("in different orders"))
        tell(f"reported {rank}")
        wait_for(f"reported {1 - rank}")
        other()

    check = oc.check_collective_order(deadline_s=LONG_S)
    check.start()
    dist.all_reduce(torch.ones(2), group=weights)
    helper = threading.Thread(target=help_the_other, daemon=True)
    helper.start()
    mine()
    helper.join()
    check.stop(wait=False)
    return {"while blocked": seen, "divergences": check.divergences}


@real_ranks
@pytest.mark.usefixtures("covered_processes")
def test_ranks_that_wait_for_each_other_are_told_why_while_they_block(
    gloo_ranks: RunRanks,
) -> None:
    results = gloo_ranks(another_collective, 2)
    for rank, result in enumerate(results):
        (one,) = result["divergences"]
        assert result["while blocked"] == [("ERROR", str(one))]
        gather = ("_allgather_base_ float32[8] on [0,1]#1", *["(nothing yet)"] * 3)
        exchange = ("alltoall_base_ float32 on [0,1]#2", *["(nothing yet)"] * 3)
        assert one.position == 2
        assert (one.mine[1:], one.theirs[1:])[:: 1 if rank == 0 else -1] == (gather, exchange)


def documented(rank: int, world: int, code: str) -> list[bool]:
    """Run the documentation's example with four batches; whether each was recorded."""
    recorded: list[bool] = []
    total = torch.zeros(())

    def train(batch: torch.Tensor) -> None:
        recorded.append(names["check"].recording)
        dist.all_reduce(total.add_(batch))

    names: dict[str, Any] = {"batches": torch.ones(4), "train": train}
    exec(code, names)
    return recorded


@real_ranks
def test_the_documented_example(repo_root: Path, pooled_ranks: RunRanks) -> None:
    text = (repo_root / "docs" / "order-check.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert pooled_ranks(documented, 2, code) == [[True, True, True, False]] * 2


def broken(rank: int, world: int) -> dict[str, Any]:
    """A torch whose table of groups is not what we know."""
    messages = Messages()
    total = torch.ones(1)
    group = dist.group.WORLD
    assert group is not None
    with (
        oc.check_collective_order(deadline_s=LONG_S) as check,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(distributed_c10d, "_world", None)
        group.allreduce([total]).wait()
        recording = check.recording
    return {"total": total.item(), "recording": recording, "log": messages.seen}


@real_ranks
def test_a_failure_of_the_check_does_not_stop_the_collective(pooled_ranks: RunRanks) -> None:
    for result in pooled_ranks(broken, 2):
        message = "the check of the collective order stops at allreduce_"
        assert result == {"total": 2.0, "recording": False, "log": [("ERROR", message)]}


def compiled_step(rank: int, world: int) -> dict[str, Any]:
    """A sharded model with an opaque attention op, compiled with gathers moved; then two
    all-reduces in another order on rank 1.
    """
    config = TransformerConfig(n_blocks=1, dim=32, ffn_dim=64)
    model = Transformer(config, dist.group.WORLD)
    shard_module(model, init_device_mesh("cpu", (world,)))
    options = oc.inductor_options(oc.OverlapConfig(costs="analytical"))
    compiled = torch.compile(model, fullgraph=True, options=options)
    x = example_input(config, [8, 8], rank)
    groups = [dist.group.WORLD, dist.new_group()]
    with torch.no_grad():
        usual = compiled(x)
        with oc.check_collective_order(steps=1, deadline_s=LONG_S) as check:
            with CollectiveRecorder() as recorder:
                checked = compiled(x)
            works = [
                dist.all_reduce(torch.ones(1), group=group, async_op=True)
                for group in (groups if rank == 0 else reversed(groups))
            ]
            for work in works:
                work.wait()
            check.step()
    (one,) = check.divergences
    return {
        "equal": torch.equal(usual, checked),
        "issued": [seen.op for seen in recorder.collectives],
        "position": one.position,
        "before": one.mine[:3],
    }


@real_ranks
def test_compiled_code_and_opaque_ops_are_recorded(pooled_ranks: RunRanks) -> None:
    for result in pooled_ranks(compiled_step, 2, tries=3):
        assert result["equal"]
        assert "alltoall_base_" in result["issued"]
        assert any("allgather" in op for op in result["issued"])
        assert result["position"] == len(result["issued"]) + 1
        assert [text.split()[0] for text in result["before"]] == result["issued"][-3:]


def test_arguments_out_of_range() -> None:
    for name, value in (("steps", 0), ("every", True), ("every", 1.5)):
        with pytest.raises(ConfigError, match=rf"\({name}={value}\): expected an integer of at"):
            oc.check_collective_order(**{name: value})
    with pytest.raises(ConfigError, match=r"\(deadline_s=0\): expected seconds above 0"):
        oc.check_collective_order(deadline_s=0)


def test_no_process_group() -> None:
    with pytest.raises(oc.OverlapError, match="needs an initialized process group"):
        oc.check_collective_order().start()
