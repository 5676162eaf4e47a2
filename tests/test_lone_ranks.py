"""A rank that compiles alone keeps to what its peers run, on real ranks.

Each job runs a sequence of calls twice: without the pass, and with it, where ranks compile some of
them alone. No deadline is short enough to be waited out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import overlap_core as oc

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

OPS = torch.ops._c10d_functional
LONG = {"deadline_s": 300.0, "recompile_deadline_s": 300.0}


def define_exchange() -> Any:
    """An op that communicates inside."""
    if not hasattr(torch.ops.lone, "exchange"):

        @oc.register_custom_op("lone::exchange", has_internal_collective=True)
        def exchange(x: torch.Tensor) -> torch.Tensor:
            out = x.clone()
            dist.all_reduce(out)
            return out

        exchange.register_fake(torch.empty_like)
        exchange.register_autograd(lambda ctx, grad: torch.ops.lone.exchange(grad))
    return torch.ops.lone.exchange


def wait(tensor: torch.Tensor) -> torch.Tensor:
    return OPS.wait_tensor(tensor)


def gather(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return wait(OPS.all_gather_into_tensor(shard, group.size(), group.group_name))


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return wait(OPS.all_reduce(x, "sum", group.group_name))


def groups_of(size: int, world_size: int) -> list[dist.ProcessGroup]:
    """Groups of neighbours, which every rank must make."""
    starts = range(0, world_size, size)
    return [dist.new_group(list(range(start, start + size))) for start in starts]


def run(model: Callable[..., torch.Tensor], x: torch.Tensor, *more: Any) -> list[float]:
    """The result and the gradient of a call."""
    x = x.detach().requires_grad_(x.is_floating_point())
    out = model(x, *more)
    out.sum().backward()
    return [out.sum().item(), x.grad.sum().item()]


def compare(
    make: Callable[..., Callable[..., torch.Tensor]],
    calls: list[tuple[Any, ...]],
    **config: Any,
) -> dict[str, Any]:
    """Run the calls as they are and compiled; what the ranks saw."""
    options = oc.inductor_options(oc.OverlapConfig(costs="analytical", **{**LONG, **config}))
    model = make()
    plain = [run(model, *call) for call in calls]
    compiled = torch.compile(model, fullgraph=True, options=options)
    found = [run(compiled, *call) for call in calls]
    return {
        "equal": found == plain,
        "reports": [(str(r.mode), r.hoisted, r.notes, r.why) for r in oc.reports()],
        "orders": [
            [r.graph.nodes[r.graph.index[name]].op.rpartition(".")[0] for name in r.collectives]
            for r in oc.reports()
        ],
    }


def one_more_all_reduce(rank: int, world_size: int, own: int) -> dict[str, Any]:
    exchange = define_exchange()
    mine = groups_of(own, world_size)[rank // own]
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64 // world_size)[:, :].t().contiguous() for _ in range(2))

    def make() -> Callable[..., torch.Tensor]:
        def model(x: torch.Tensor, extra: bool) -> torch.Tensor:
            world = dist.group.WORLD
            x = x @ gather(a, world)
            if extra:
                x = all_reduce(x, mine)
            x = exchange(x) @ x
            return x @ gather(b, world)

        return model

    x = torch.randn(64, 64)
    alone = rank >= world_size - own
    return compare(make, [(x, False), (x, alone)])


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_more_collective_on_a_group_of_its_own(pooled_ranks: RunRanks, world_size: int) -> None:
    found = pooled_ranks(one_more_all_reduce, world_size, world_size // 2, deadline_s=90)
    print(found)
    assert all(one["equal"] for one in found)
