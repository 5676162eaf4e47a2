"""The ops compute what they say, on real ranks; how `overlap_core` measures them fits too."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from video_blocks import overlap
from video_blocks.ops import attn_cp, dispatch

import overlap_core as oc
from overlap_core.testing import run_ranks


def test_it_is_installed() -> None:
    (point,) = metadata.entry_points(group="overlap_core", name="video_blocks")
    assert point.load() is overlap


def test_both_ops_are_registered_as_communicating() -> None:
    registered: dict[str, Any] = {}

    def register(name: str, **said: Any) -> None:
        registered[name] = said

    overlap.overlap_register_ops(SimpleNamespace(register=register))
    assert registered == {
        "video_blocks::attn_cp": {
            "materialize_inputs": overlap.full_lengths,
            "has_internal_collective": True,
        },
        "video_blocks::dispatch": {"has_internal_collective": True},
    }


Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def attention(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's valid rows: of the op, and of attention over the whole sequence."""
    lengths, tokens, group = [6, 3], 6, dist.group.WORLD.group_name
    torch.manual_seed(0)
    whole = torch.randn(3, 2, sum(lengths), 4, 8)
    start, length = sum(lengths[:rank]), lengths[rank]
    mine = F.pad(whole[:, :, start : start + length], (0, 0, 0, 0, 0, tokens - length), value=9.0)
    ours = attn_cp(*mine, torch.tensor(lengths), group)[:, :length]
    q, k, v = whole.transpose(2, 3)
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return ours, plain[:, start : start + length]


def there_and_back(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that were sent by uneven splits, and the same rows back."""
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 1], [3, 1])
    group = dist.group.WORLD.group_name
    mine = torch.arange(4.0)[: sum(sent), None] + 10 * rank
    there = dispatch(mine, sent, received, group)
    return there, dispatch(there, received, sent, group)


def both(rank: int, world_size: int) -> Pairs:
    """What each op computes on this rank."""
    return {"attention": attention(rank), "dispatch": there_and_back(rank)}


@pytest.fixture(scope="module")
def computed() -> list[Pairs]:
    return run_ranks(both, 2, deadline_s=300)


def test_attention_is_that_of_the_whole_sequence_without_padding(computed: list[Pairs]) -> None:
    for pairs in computed:
        ours, plain = pairs["attention"]
        torch.testing.assert_close(ours, plain)


def test_dispatch_moves_rows_and_the_reverse_brings_them_back(computed: list[Pairs]) -> None:
    (there0, back0), (there1, back1) = (pairs["dispatch"] for pairs in computed)
    assert there0.flatten().tolist() == [0.0, 10.0, 11.0]
    assert there1.flatten().tolist() == [1.0, 2.0, 3.0, 12.0]
    assert back0.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert back1.flatten().tolist() == [10.0, 11.0, 12.0]


def test_generic_lengths_are_refused_and_made_ones_are_not() -> None:
    q, lengths = torch.randn(1, 4, 2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"lengths \[0, 0\] of 4 tokens"):
        attn_cp(q, q, q, lengths, "nobody")
    args, kwargs = oc.apply_materialize_inputs(overlap.full_lengths, (q, q, q, lengths, "g"), {})
    assert args[3].tolist() == [4, 4]
    assert (args[:3], args[4], kwargs) == ((q, q, q), "g", {})
