"""The ops in compiled models with gathered weights, on two gloo ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from overlap_cp_attention import ring_attention, ulysses_attention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.testing import CollectiveRecorder, shard_module

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

OPS = {
    f"overlap_cp.{kind}_attention{way}" for kind in ("ulysses", "ring") for way in ("", "_backward")
}
DIM, HEADS, KV_HEADS = 32, 4, 2


@frozen(kw_only=True)
class Case:
    """Local lengths of the ranks, and how the model runs."""

    lengths: tuple[int, int]
    dynamic: bool = False
    train: bool = False


class Block(nn.Module):
    """Projections, attention over all ranks' rows, projection; on `(batch, local length, DIM)`."""

    def __init__(self, attend: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.attend, self.group = attend, group
        width = DIM // HEADS
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * width, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * width, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, splits: list[int] | None) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(2, (-1, DIM // HEADS)) for proj in (self.q, self.k, self.v))
        y = self.attend(q, k, v, group=self.group, cp_split_sizes=splits, is_causal=True)
        result: torch.Tensor = x + self.out(y.flatten(2))
        return result


class Model(nn.Module):
    """One block with each kind of attention."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ulysses = Block(ulysses_attention, group)
        self.ring = Block(ring_attention, group)

    def forward(self, x: torch.Tensor, splits: list[int] | None = None) -> torch.Tensor:
        result: torch.Tensor = self.ring(self.ulysses(x, splits), splits)
        return result


@frozen(kw_only=True)
class Seen:
    """What one rank saw, as plain data."""

    modes: tuple[str, ...]
    whys: tuple[str, ...]
    skeleton: tuple[str, ...]
    """Opaque ops among the entries of forward and backward."""
    costs: dict[str, tuple[int | None, int | None, str, str]]
    """Of each op: time, the network's part, source, why."""
    hoisted: int
    equal: bool
    before: tuple[Any, ...]
    after: tuple[Any, ...]


def run_case(rank: int, world_size: int, case: Case) -> Seen:
    """A step of training or inference in program order, and again with the pass."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = Model(mesh.get_group())
    shard_module(model, mesh, reshard_after_forward=True)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(2, sum(case.lengths), DIM, generator=generator)
    inputs: list[Any] = [whole.split(list(case.lengths), dim=1)[rank].contiguous()]
    if case.dynamic or len(set(case.lengths)) > 1:
        inputs.append(list(case.lengths))

    def run(options: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=case.dynamic, options=options)
        results: list[torch.Tensor] = []
        for _ in range(2):  # the first call compiles, and ranks measure together
            model.zero_grad()
            with CollectiveRecorder() as recorder, torch.set_grad_enabled(case.train):
                out = compiled(*inputs)
                if case.train:
                    out.square().sum().backward()
            gradients = [p.grad.to_local().clone() for p in model.parameters() if case.train]  # type: ignore[union-attr]
            results = [out.detach(), *gradients]
        return results, tuple(recorder.shared())

    expected, before = run({"fx_graph_cache": False})
    config = oc.OverlapConfig(deadline_s=300, recompile_deadline_s=300)
    results, after = run(oc.inductor_options(config))
    reports = oc.reports()
    costs: dict[str, tuple[int | None, int | None, str, str]] = {}
    for report in reports:
        assert report.graph is not None
        for node, cost in zip(report.graph.nodes, report.costs, strict=True):
            if node.op.startswith("overlap_cp"):
                row = (cost.ns, cost.network_ns, str(cost.source), cost.why)
                costs[node.op.removesuffix(".default")] = row
    return Seen(
        modes=tuple(str(report.mode) for report in reports),
        whys=tuple(report.why for report in reports),
        skeleton=tuple(
            entry.op.removesuffix(".default")
            for report in reports
            for entry in oc.skeleton(report.graph)
            if entry.op.startswith("overlap_cp")
        ),
        costs=costs,
        hoisted=sum(report.hoisted for report in reports),
        equal=all(map(torch.equal, expected, results)),
        before=before,
        after=after,
    )


def check(pooled_ranks: RunRanks, case: Case, mode: str) -> list[Seen]:
    """All ranks agree on a case, and gathers moved; what they saw."""
    results: list[Seen] = pooled_ranks(run_case, 2, case, deadline_s=600, tries=3)
    for seen in results:
        assert set(seen.modes) == {mode}, seen.whys
        assert seen.equal
        assert seen.hoisted > 0
        assert seen.after == results[0].after
        assert seen.after != seen.before
        assert sorted(seen.after) == sorted(seen.before)
        assert set(seen.skeleton) == set(seen.costs)
    return results


def test_even_splits_are_one_graph_and_the_ops_are_measured(
    pooled_ranks: RunRanks,
) -> None:
    results = check(pooled_ranks, Case(lengths=(24, 24), train=True), "identical")
    for seen in results:
        assert set(seen.costs) == OPS
        for ns, network_ns, source, why in seen.costs.values():
            assert (source, why) == ("measured", "")
            assert ns is not None
            assert network_ns is not None
            assert 0 <= network_ns < ns
    assert results[0].costs == results[1].costs


def test_uneven_splits_are_one_graph_with_other_symbols(
    pooled_ranks: RunRanks,
) -> None:
    """Ranks of other lengths would replay other transfers, so this plugin's estimate stands."""
    case = Case(lengths=(24, 23), dynamic=True, train=True)
    results = check(pooled_ranks, case, "identical")
    for seen in results:
        assert set(seen.costs) == OPS
        for ns, network_ns, source, _ in seen.costs.values():
            assert source == "analytical"
            assert ns is not None
            assert network_ns is not None
            assert 0 < network_ns < ns


def test_uneven_splits_at_fixed_lengths_are_one_graph_too(
    pooled_ranks: RunRanks,
) -> None:
    results = check(pooled_ranks, Case(lengths=(24, 16), train=True), "identical")
    for seen in results:
        assert set(seen.costs) == OPS
        assert {source for _, _, source, _ in seen.costs.values()} == {"analytical"}


def test_a_specialized_length_is_another_graph_with_the_same_skeleton(
    pooled_ranks: RunRanks,
) -> None:
    """A local length of 1 makes one rank's graph static."""
    case = Case(lengths=(24, 1), dynamic=True)
    results = check(pooled_ranks, case, "slot")
    for seen in results:
        assert set(seen.costs) == {"overlap_cp.ulysses_attention", "overlap_cp.ring_attention"}
