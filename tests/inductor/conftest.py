"""A pretended world of four ranks, and a way to look at a graph as the pass gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import frozen
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap_core as oc
from overlap_core.inductor.adapter import AdaptedGraph, adapt
from overlap_core.inductor.groups import rank_and_world_size
from overlap_core.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANK, WORLD_SIZE = 1, 4


class Stop(BaseException):
    """Ends a compile in the pass, before code generation; no handler of errors swallows it."""


@frozen
class Captured:
    """What the pass was given."""

    snodes: list[Any]
    adapted: AdaptedGraph
    seen: Any
    """What `look` returned while the compile was still going on."""

    @property
    def graph(self) -> oc.OverlapGraph:
        return self.adapted.graph

    def node(self, op: str, which: int = 0) -> oc.Node:
        return [node for node in self.graph.nodes if op in node.op][which]

    def snode(self, node: oc.Node) -> Any:
        return self.snodes[self.graph.index[node.name]]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    session.reset()
    yield
    oc.disable()
    torch._dynamo.reset()
    session.reset()


@pytest.fixture
def fake_world() -> Iterator[None]:
    """Rank 1 of 4; collectives compile like real ones, and peers always agree."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gather(fake_world: None) -> Callable[[torch.Tensor], torch.Tensor]:
    """An all-gather along dimension 0 over the world, waited for."""

    def all_gather(shard: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_gather_tensor(shard, 0, dist.group.WORLD))

    return all_gather


@pytest.fixture
def model(gather: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Products, each with a weight that is gathered right before it."""

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.sin(x @ gather(weight))
        return x

    return run


@pytest.fixture
def arguments() -> tuple[torch.Tensor, ...]:
    """Activations and the shards of four weights, for `model`."""
    return (torch.randn(256, 32), *(torch.randn(8, 32) for _ in range(4)))


@pytest.fixture
def capture(fake_world: None) -> Callable[..., list[Captured]]:
    """Compile a call up to the pass and return each graph that reaches it.

    `capture(fn, *args, look=None, patches={}, through=0, **compile_options)`: the first
    `through` graphs are compiled to the end, the next one ends the compile.
    """

    def run(
        fn: Callable[..., Any],
        *args: Any,
        look: Callable[[list[Any]], Any] | None = None,
        patches: dict[str, Any] | None = None,
        through: int = 0,
        **options: Any,
    ) -> list[Captured]:
        found: list[Captured] = []

        def spy(snodes: list[Any]) -> list[Any]:
            world = rank_and_world_size()
            assert world is not None
            adapted = adapt(snodes, V.graph, *world)
            found.append(Captured(list(snodes), adapted, look(snodes) if look else None))
            if len(found) > through:
                raise Stop
            return snodes

        settings = {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": [spy],
            "fx_graph_cache": False,
            **(patches or {}),
        }
        with inductor_config.patch(settings), pytest.raises(Stop):
            torch.compile(fn, fullgraph=True, **options)(*args)
        return found

    return run
