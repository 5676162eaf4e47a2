"""What a scheduler pass sees of the sharded model, and what the compiled model issues."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap_core.testing import (
    CollectiveRecorder,
    Transformer,
    TransformerConfig,
    example_input,
    shard_module,
)

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(180)]

ONE_BLOCK: dict[str, Any] = {"n_blocks": 1, "dim": 32, "ffn_dim": 64}
GATHER = "_c10d_functional.all_gather_into_tensor.default"
ALL_TO_ALL = "_c10d_functional.all_to_all_single.default"
ATTENTION = "overlap_testing.ulysses_attention.default"


class SeenEnough(Exception):  # noqa: N818  # not an error
    """Raised by the pass to skip code generation."""


def gathers_of_a_step(rank: int, world: int, reshard_after_forward: bool) -> tuple[int, int]:
    """Gathers of a training step through AOTAutograd's partitioner, and without it."""
    config = TransformerConfig(**ONE_BLOCK)
    model = Transformer(config, dist.group.WORLD)
    mesh = init_device_mesh("cpu", (world,))
    shard_module(model, mesh, reshard_after_forward=reshard_after_forward)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    grads = []
    counts = []
    for run in (compiled, model):
        with CollectiveRecorder() as recorder:
            run(example_input(config, [8, 8], rank)).square().sum().backward()
        counts.append(sum("gather" in seen.op for seen in recorder.collectives))
        grads.append([param.grad.to_local().clone() for param in model.parameters()])  # type: ignore[union-attr]
        model.zero_grad()
    torch.testing.assert_close(grads[0], grads[1])
    return counts[0], counts[1]


@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_reshard_after_forward_gathers_again_in_backward(
    reshard_after_forward: bool, pooled_ranks: RunRanks
) -> None:
    n_parameters = TransformerConfig(**ONE_BLOCK).n_parameters
    # All but the first: nobody asks for the gradient of the model's input.
    again = n_parameters - 1 if reshard_after_forward else 0
    counts = pooled_ranks(gathers_of_a_step, 2, reshard_after_forward, tries=3)
    assert counts == [(n_parameters + again, n_parameters)] * 2


def compiled_model(
    rank: int, world: int, config: TransformerConfig, scheduler_pass: Any, **kwargs: Any
) -> Any:
    model = Transformer(config, dist.group.WORLD)
    shard_module(model, init_device_mesh("cpu", (world,)))
    options = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [scheduler_pass],
        "fx_graph_cache": False,
    }
    return torch.compile(model, fullgraph=True, options=options, **kwargs)


def nodes_seen(
    rank: int, world: int, config: TransformerConfig, lengths: list[int], dynamic: bool
) -> list[tuple[str, list[str]]]:
    """(op, sizes of the output) of each extern node of the inference graph."""
    seen: list[tuple[str, list[str]]] = []

    def scheduler_pass(snodes: list[Any]) -> list[Any]:
        for snode in snodes:
            op = getattr(snode.node, "op_overload", None)
            if op is not None:
                try:
                    sizes = [str(size) for size in snode.node.get_size()]
                except NotImplementedError:  # outputs come apart in later nodes
                    sizes = []
                seen.append((str(op), sizes))
        raise SeenEnough

    compiled = compiled_model(
        rank, world, config, scheduler_pass, dynamic=True if dynamic else None
    )
    args = (lengths,) if dynamic else ()
    with torch.no_grad(), pytest.raises(Exception, match="SeenEnough"):
        compiled(example_input(config, lengths, rank), *args)
    return seen


@pytest.mark.parametrize("modulation", [False, True])
def test_every_parameter_is_one_gather(modulation: bool, pooled_ranks: RunRanks) -> None:
    config = TransformerConfig(**{**ONE_BLOCK, "n_blocks": 2}, modulation=modulation)
    per_rank = pooled_ranks(nodes_seen, 2, config, [8, 8], False, tries=3)
    for seen in per_rank:
        ops = [op for op, _ in seen]
        assert ops.count(GATHER) == config.n_parameters
        assert ops.count(ATTENTION) == config.n_blocks
        assert ALL_TO_ALL not in ops  # inside the opaque op


def test_symbol_names_differ_between_ranks(pooled_ranks: RunRanks) -> None:
    config = TransformerConfig(**ONE_BLOCK, opaque_attention=False)
    per_rank = pooled_ranks(nodes_seen, 2, config, [24, 23], True, tries=3)
    for rank, seen in enumerate(per_rank):
        print(
            f"rank {rank}:",
            *(f"{op} {sizes}" for op, sizes in seen if has_symbol(sizes)),
            sep="\n  ",
        )
    first, second = per_rank
    assert [op for op, _ in first] == [op for op, _ in second]
    own = [next(sizes[0] for op, sizes in seen if "mm" in op) for seen in per_rank]
    assert own[0] != own[1]
    assert all(re.fullmatch(r"s\d+", name) for name in own)
    for seen in per_rank:
        forth, back = (sizes[0] for op, sizes in seen if op == ALL_TO_ALL)
        assert set(forth.split(" + ")) == set(own)  # both symbols meet in one sum
        assert back in {f"2*{name}" for name in own}


def has_symbol(sizes: list[str]) -> bool:
    return any("s" in size for size in sizes)


def leave_alone(snodes: list[Any]) -> list[Any]:
    return snodes


def step(rank: int, world: int) -> tuple[list[Any], int]:
    """A compiled training step; what it issues, and the number of its graphs' parameters."""
    config = TransformerConfig(**ONE_BLOCK)
    compiled = compiled_model(rank, world, config, leave_alone)
    x = example_input(config, [8, 8], rank)
    with CollectiveRecorder() as recorder:
        out = compiled(x)
        out.sum().backward()
    with CollectiveRecorder() as again:
        assert torch.equal(compiled(x), out)
    assert again.shared() == recorder.shared()[: len(again.collectives)]
    return recorder.collectives, config.n_parameters


def test_recorder_sees_compiled_code_and_opaque_ops_alike_on_all_ranks(
    pooled_ranks: RunRanks,
) -> None:
    (first, n_parameters), (second, _) = pooled_ranks(step, 2, pg_timeout_s=120)
    assert first == second
    ops = [seen.op for seen in first]
    assert ops.count("alltoall_base_") == 4
    assert len(ops) == 2 * n_parameters + 4
    assert {seen.group_size for seen in first} == {2}
