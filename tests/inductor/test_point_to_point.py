"""Sends, receives and barriers in a graph are communication like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

import overlap_core as oc
from overlap_core import NodeKind

from ..small_graphs import gather as gather_node
from ..small_graphs import graph_of, mm, on_ranks, opaque, wait

if TYPE_CHECKING:
    from collections.abc import Callable


def send(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.isend(x, 0, 0, "0"))


def receive(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.irecv(x, 0, 0, "0"))


def batch(x: torch.Tensor) -> torch.Tensor:
    [out] = torch.ops._c10d_functional.batch_p2p_ops(["isend"], [0], [0], [x], "0")
    return torch.ops._c10d_functional.wait_tensor(out)


POINT_TO_POINT = {"isend": send, "irecv": receive, "batch_p2p_ops": batch}


@pytest.mark.parametrize("name", POINT_TO_POINT)
def test_point_to_point_ops_are_entries(
    capture: Callable[..., list[Any]], gather: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    if not hasattr(torch.ops._c10d_functional, name):
        pytest.skip(f"this torch has no _c10d_functional.{name}")

    def model(x: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        done = POINT_TO_POINT[name](x + 1)
        return done, x @ gather(shard)

    [captured] = capture(model, torch.randn(32, 32), torch.randn(8, 32))
    entries = oc.skeleton(captured.graph)
    assert [name in entry.op for entry in entries] == [True, False]
    assert not entries[0].weight_gather
    assert entries[1].weight_gather


@pytest.mark.parametrize("op", [f"_c10d_functional.{n}.default" for n in ("isend", "irecv")])
@pytest.mark.parametrize("kind", [NodeKind.OPAQUE, NodeKind.COMPUTE])
def test_they_are_entries_as_plain_fallback_kernels_too(op: str, kind: NodeKind) -> None:
    """As on a torch that has no lowering for them; gathers pass them on all ranks or on none."""
    start, end = mm("a", ns=500), mm("b", "w.g", "a", ns=500)
    other = evolve(opaque("p", "a", group="0"), kind=kind, op=op, issues_collective=False)
    ranks = on_ranks(graph_of(start, other, gather_node("g"), wait("g"), end), 2)
    assert op in [entry.op for entry in oc.skeleton(ranks[0])]
    assert [outcome.collectives for outcome in oc.simulate(ranks)] == [("g", "p"), ("g", "p")]
    without = evolve(ranks[1], nodes=tuple(n for n in ranks[1].nodes if n.name != "p"))
    pinned = oc.simulate([ranks[0], without])
    assert {str(outcome.mode) for outcome in pinned} == {"pinned"}
    assert pinned[0].collectives == ("p", "g")
