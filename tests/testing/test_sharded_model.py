"""The sharded, context-parallel model computes what the plain one computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlap_core.errors import ConfigError
from overlap_core.testing import (
    CollectiveRecorder,
    Diverge,
    Transformer,
    TransformerConfig,
    check_same_state,
    example_input,
    shard_module,
    ulysses_attention,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

SMALL = {"n_blocks": 2, "dim": 32, "ffn_dim": 50}


def full_gradient(param: nn.Parameter) -> torch.Tensor:
    grad: DTensor = param.grad  # type: ignore[assignment]
    return grad.full_tensor()


def model_against_plain(rank: int, world: int, lengths: list[int], kwargs: dict[str, bool]) -> int:
    """Forward and gradients, with uneven lengths; returns the number of collectives."""
    config = TransformerConfig(**SMALL, modulation=True)  # type: ignore[arg-type]
    plain = Transformer(config)
    model = Transformer(config, dist.group.WORLD)
    check_same_state(model)
    # Sums, as every rank's loss covers its own part of the sequence only.
    shard_module(model, init_device_mesh("cpu", (world,)), reduce_op="sum", **kwargs)  # type: ignore[arg-type]
    with CollectiveRecorder() as recorder:
        out = model(example_input(config, lengths, rank), lengths)
        out.square().sum().backward()
    whole = torch.cat([example_input(config, lengths, r) for r in range(world)], dim=1)
    expected = plain(whole)
    expected.square().sum().backward()
    start = sum(lengths[:rank])
    torch.testing.assert_close(out, expected[:, start : start + lengths[rank]])
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_gradient(a), b.grad, msg=lambda m, n=name: f"{n}: {m}")
    return len(recorder.collectives)


@pytest.mark.parametrize(
    ("lengths", "reshard_after_forward"),
    [([4, 4], False), ([5, 3], True), ([3, 1, 2, 4], False)],
)
def test_equals_the_plain_model(
    lengths: list[int], reshard_after_forward: bool, pooled_ranks: RunRanks
) -> None:
    kwargs = {"reshard_after_forward": reshard_after_forward}
    counts = pooled_ranks(model_against_plain, len(lengths), lengths, kwargs)
    n_parameters = 2 * 9 + 3
    assert counts == [2 * n_parameters + 2 * 4] * len(lengths)


def attention_against_sdpa(rank: int, world: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(2, sum(lengths), 4, 8, requires_grad=True) for _ in range(3)]
    grad = torch.randn(2, sum(lengths), 4, 8)
    start = sum(lengths[:rank])
    mine = slice(start, start + lengths[rank])
    parts = [t.detach()[:, mine].requires_grad_() for t in whole]
    out = ulysses_attention(*parts, lengths, dist.group.WORLD.group_name)
    out.backward(grad[:, mine])
    expected = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in whole))
    expected = expected.transpose(1, 2)
    expected.backward(grad)
    torch.testing.assert_close(out, expected[:, mine])
    for part, full in zip(parts, whole, strict=True):
        assert full.grad is not None
        torch.testing.assert_close(part.grad, full.grad[:, mine])


@pytest.mark.parametrize("lengths", [[6], [4, 4], [5, 2], [3, 1, 0, 4]])
def test_attention_op_equals_plain_attention(lengths: list[int], pooled_ranks: RunRanks) -> None:
    pooled_ranks(attention_against_sdpa, len(lengths), lengths)


def op_check(rank: int, world: int) -> None:
    qkv = [torch.randn(1, 5 - rank, 4, 8, requires_grad=True) for _ in range(3)]
    args = (*qkv, [5, 4], dist.group.WORLD.group_name)
    torch.library.opcheck(ulysses_attention, args, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(ValueError, match="3 heads don't divide by the group size 2"):
        ulysses_attention(*(t[:, :, :3] for t in qkv), *args[3:])


def test_attention_op_is_a_well_formed_custom_op(pooled_ranks: RunRanks) -> None:
    pooled_ranks(op_check, 2, tries=3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.odd = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x)) * self.scale
        return out @ self.odd.repeat(2, 1)


def tied_uneven_and_scalar(rank: int, world: int) -> None:
    torch.manual_seed(0)
    plain, model = Tied(), Tied()
    model.load_state_dict(plain.state_dict())
    shard_module(model, init_device_mesh("cpu", (world,)))
    assert isinstance(model.first, nn.Linear)
    assert model.first._parameters["weight"] is model.second._parameters["weight"]
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    x = torch.randn(2, 6)
    model(x).sum().backward()
    plain(x).sum().backward()  # the same loss on all ranks: the average is this gradient
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_gradient(a), b.grad)
    with pytest.raises(ConfigError, match=r"'scale' of module '' is already a DTensor"):
        shard_module(model, init_device_mesh("cpu", (world,)))
    with pytest.raises(ConfigError, match="one dimension, not of 2"):
        shard_module(plain, init_device_mesh("cpu", (world, 1)))


def test_tied_uneven_and_scalar_parameters(pooled_ranks: RunRanks) -> None:
    pooled_ranks(tied_uneven_and_scalar, 2, tries=3)


def param_dtype(rank: int, world: int) -> tuple[str, str, list[tuple[str, ...]]]:
    model = nn.Linear(4, 4, bias=False)
    shard_module(model, init_device_mesh("cpu", (world,)), param_dtype=torch.bfloat16)
    with CollectiveRecorder() as recorder:
        out = model(torch.ones(1, 4, dtype=torch.bfloat16))
        out.sum().backward()
    grad = model._parameters["weight"].grad  # type: ignore[union-attr]
    return str(out.dtype), str(grad.dtype), [seen.dtypes for seen in recorder.collectives]  # type: ignore[union-attr]


def test_parameters_are_cast_before_the_gather(pooled_ranks: RunRanks) -> None:
    half = ("bfloat16", "bfloat16")
    expected = ("torch.bfloat16", "torch.float32", [half, half])
    assert pooled_ranks(param_dtype, 2, tries=3) == [expected, expected]


def unequal_state(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    with pytest.raises(RuntimeError) as raised:
        check_same_state(nn.Linear(2, 2))
    return str(raised.value)


def test_unequal_states_are_refused_on_every_rank(pooled_ranks: RunRanks) -> None:
    messages = pooled_ranks(unequal_state, 2, tries=3)
    assert messages[0].startswith("the full parameters on ranks [1] differ from those on rank 0")
    assert len(set(messages)) == 1


def diverging(rank: int, world: int, diverge: Diverge) -> tuple[int, list[object], str]:
    config = TransformerConfig(**SMALL, diverge=diverge)  # type: ignore[arg-type]
    model = Transformer(config, dist.group.WORLD)
    digest = check_same_state(model)
    shard_module(model, init_device_mesh("cpu", (world,)))
    with CollectiveRecorder() as recorder:
        model(example_input(config, [4, 4], rank)).sum().backward()
    return len(recorder.collectives), list(recorder.shared()), digest


@pytest.mark.parametrize(
    ("diverge", "extra"), [("none", 0), ("compute", 0), ("skeleton", 4), ("count", 1)]
)
def test_diverging_ranks_agree_on_what_they_share(
    diverge: Diverge, extra: int, pooled_ranks: RunRanks
) -> None:
    first, last = pooled_ranks(diverging, 2, diverge, tries=3)
    assert last[0] - first[0] == extra
    assert first[1:] == last[1:]
