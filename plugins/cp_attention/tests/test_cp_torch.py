"""torch's own context parallelism, traced into a graph with gathered weights on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import evolve, frozen
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.nn import functional as F

import overlap_core as oc
from overlap_core.testing import run_ranks

pytestmark = pytest.mark.ranks

PASSES = "reorder_for_compute_comm_overlap_passes"
GATHER = "_c10d_functional.all_gather_into_tensor.default"


class Stop(BaseException):
    """Ends a compile behind the pass: nothing here needs the kernels."""


@frozen(kw_only=True)
class Seen:
    mode: str
    why: str
    graph: oc.OverlapGraph
    skeleton: tuple[oc.SkeletonEntry, ...]


def gathered(shard: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(functional.all_gather_tensor(shard, 0, dist.group.WORLD))


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's ring attention, with its kernel for the CPU."""

    def kernel(q: Any, k: Any, v: Any, is_causal: bool = False) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

    out, *_ = torch_cp._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v)
    return out


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The gather with which torch makes flex attention context-parallel; plain attention after."""
    group = dist.group.WORLD
    assert group is not None
    k, v = torch.ops.cplib.flex_cp_allgather(k, v, 2, group.group_name)
    return F.scaled_dot_product_attention(q, k, v)


def look(fn: Any, *args: torch.Tensor) -> Seen:
    torch.compiler.reset()
    options = oc.inductor_options(
        oc.OverlapConfig(costs="analytical", deadline_s=300, recompile_deadline_s=300)
    )

    def stop(snodes: list[Any]) -> list[Any]:
        raise Stop

    options[PASSES].append(stop)
    with pytest.raises(Stop), torch.no_grad():
        torch.compile(fn, fullgraph=True, options=options)(*args)
    report = oc.reports()[-1]
    assert report.graph is not None
    return Seen(mode=str(report.mode), why=report.why, graph=report.graph, skeleton=report.skeleton)


def trace(rank: int, world_size: int) -> dict[str, Seen]:
    torch_cp._cp_options.enable_load_balance = False
    x = torch.randn(2, 16, 32)
    weights = [torch.randn(16, 32) for _ in range(4)]

    def model(attend: Any) -> Any:
        def forward(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                (x @ gathered(shard)).unflatten(-1, (4, 8)).transpose(1, 2) for shard in shards[:3]
            )
            return attend(q, k, v).transpose(1, 2).flatten(2) @ gathered(shards[3])

        return forward

    def attention_alone(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for shard in shards:
            x = x @ gathered(shard)
        return ring(q, k, v), x

    def use(method: Any) -> None:
        torch_cp._cp_options.rotate_method = method

    seen = {"flex": look(model(flex), x, *weights)}
    use(torch_cp._RotateMethod.ALL_TO_ALL)
    seen["all-to-all"] = look(model(ring), x, *weights)
    use(torch_cp._RotateMethod.ALL_GATHER)
    seen["all-gather"] = look(model(ring), x, *weights)
    qkv = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    seen["keys and values are inputs"] = look(attention_alone, *qkv, x, *weights[:3])
    return seen


@pytest.fixture(scope="module")
def results() -> list[dict[str, Seen]]:
    # In new processes: torch's context parallelism changes its own dispatch for good.
    return run_ranks(trace, 2, deadline_s=300, tries=3)


@pytest.mark.parametrize(
    ("way", "op"),
    [
        ("flex", "cplib.flex_cp_allgather.default"),
        ("all-to-all", "_c10d_functional.all_to_all_single.default"),
        ("all-gather", GATHER),
    ],
)
def test_only_weights_are_weight_gathers(results: list[dict[str, Seen]], way: str, op: str) -> None:
    for result in results:
        seen = result[way]
        assert seen.mode == "identical", seen.why
        weights = [entry for entry in seen.skeleton if entry.weight_gather]
        (other,) = (entry for entry in seen.skeleton if not entry.weight_gather)
        assert [entry.op for entry in weights] == [GATHER] * 4
        assert other.op == op
        assert (other.groups, other.group_sizes) == ((0,), (2,))


def moved(results: list[dict[str, Seen]], **config: Any) -> dict[str, list[str]]:
    """Gathers that a rank launches earlier, as `attention` or `weight`, if matmuls take long."""
    graphs = []
    for result in results:
        graph = result["keys and values are inputs"].graph
        nodes = [
            evolve(node, cost_ns=10**6 if node.op == "aten.mm.out" else 10**5)
            for node in graph.nodes
        ]
        graphs.append(evolve(graph, nodes=tuple(nodes)))
    outcomes = oc.simulate(graphs, oc.OverlapConfig(slack_ns=0, contention=1, **config))
    found: dict[str, list[str]] = {"attention": [], "weight": []}
    for outcome in outcomes:
        assert outcome.legal
        assert outcome.committed
        assert outcome.graph is not None
        sizes = {node.name: node.sizes for node in outcome.graph.nodes}
        for gather in outcome.gathers:
            if gather.target < gather.source:
                flat = len(sizes[gather.name][0]) == 1
                found["attention" if flat else "weight"].append(gather.name)
    return found


def test_overlap_adjust_plan(results: list[dict[str, Seen]]) -> None:
    """Where keys and values are graph inputs, only this hook knows that they are no weights."""
    without = moved(results, disable_plugins=("cp_attention",))
    assert len(without["attention"]) == 2
    with_plugin = moved(results)
    assert with_plugin["attention"] == []
    assert with_plugin["weight"] != []
