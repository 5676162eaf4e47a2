"""The ops on real ranks: equal to unsharded attention, one order of transfers, clear errors."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from overlap_cp_attention import ring_attention, ulysses_attention

from overlap_core.errors import ConfigError
from overlap_core.inductor.intercept import SilentCollectives
from overlap_core.testing import CollectiveRecorder

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = pytest.mark.ranks

ATTENTIONS = {"ulysses": ulysses_attention, "ring": ring_attention}
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "check_numerics.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("check_numerics", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # attrs looks there for the class's annotations
    spec.loader.exec_module(module)
    return module


@frozen(kw_only=True)
class Seen:
    """What one rank saw, as plain data."""

    cases: int
    off: tuple[str, ...]
    transfers: tuple[tuple[Any, ...], ...]
    """For each kind of attention, what it issued in forward and backward."""


def compare(rank: int, world_size: int) -> Seen:
    script = load_script()
    cases = script.make_cases(world_size, [torch.float32], rows=6, dim=16)
    # Another dtype means another kernel, but the same transfers.
    cases += script.make_cases(world_size, [torch.bfloat16], rows=6, dim=16)[::3]
    group = dist.group.WORLD
    assert group is not None
    off = []
    for case in cases:
        errors = script.check(case, group, "cpu")
        if script.is_off(case, errors):
            off.append(f"{case}: {errors}")
    transfers = []
    for kind in ATTENTIONS:
        case = script.Case(
            kind=kind,
            dtype=torch.float32,
            # In causal attention the first rank computes least, an empty share nothing at all.
            lengths=(5, *(3 for _ in range(world_size - 2)), 0)[:world_size],
            heads=world_size,
            kv_heads=1,
            is_causal=True,
        )
        with CollectiveRecorder() as recorder:
            script.check(case, group, "cpu")
        transfers.append(tuple(recorder.shared()))
    return Seen(cases=len(cases), off=tuple(off), transfers=tuple(transfers))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equal_to_unsharded_attention(ranks: int, pooled_ranks: RunRanks) -> None:
    results = pooled_ranks(compare, ranks)
    for seen in results:
        assert seen.cases > 40
        assert seen.off == ()
        assert seen.transfers == results[0].transfers
    ulysses, ring = results[0].transfers
    if ranks == 1:
        assert ulysses == ring == ()  # nothing that another rank would notice
    else:
        assert [row[0] for row in ulysses] == ["alltoall_base_"] * 4
        blocks = (ranks - 1) + (ranks - 1) + ranks  # forward, backward, gradients
        assert [row[0] for row in ring] == ["send", "recv_"] * blocks


def check_subgroups(rank: int, world_size: int) -> list[str]:
    """Two groups at a time, in which group ranks are not the world's."""
    script = load_script()
    group, _ = dist.new_subgroups_by_enumeration([[3, 1], [0, 2]])
    cases = script.make_cases(2, [torch.float32], rows=4, dim=8)[::3]
    errors = [(case, script.check(case, group, "cpu")) for case in cases]
    return [f"{case}: {e}" for case, e in errors if script.is_off(case, e)]


def test_groups_that_are_not_the_world(pooled_ranks: RunRanks) -> None:
    assert pooled_ranks(check_subgroups, 4) == [[]] * 4


def look_closer(rank: int, world_size: int) -> dict[str, Any]:
    """Things about two ranks that are no table of cases."""
    seen: dict[str, Any] = {}
    group = dist.group.WORLD
    assert group is not None
    for kind, attend in ATTENTIONS.items():
        seen[f"{kind} layouts"] = layouts_make_no_difference(attend, group)
        seen[f"{kind} name"] = torch.equal(
            attend(*qkv(), group=group), attend(*qkv(), group=group.group_name)
        )
        seen[f"{kind} silent"] = rehearse(kind, group.group_name) if rank == 0 else ([], [])
        seen[f"{kind} errors"] = errors(attend, group)
    return seen


def qkv(length: int = 4, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        torch.randn(1, length, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads)
    ]


def layouts_make_no_difference(attend: Any, group: dist.ProcessGroup) -> bool:
    """Transposed inputs, and the expanded gradient that `sum` gives."""
    plain = [x.requires_grad_() for x in qkv()]
    strided = [
        x.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_()
        for x in plain
    ]
    assert not any(x.is_contiguous() for x in strided)
    outs = [attend(*inputs, group=group) for inputs in (plain, strided)]
    outs[0].backward(torch.ones_like(outs[0]))
    outs[1].sum().backward()
    grads = [[x.grad for x in inputs] for inputs in (plain, strided)]
    return torch.equal(*outs) and all(map(torch.allclose, *grads))


def rehearse(kind: str, group: str) -> tuple[list[str], list[str]]:
    """One rank alone, its communication held back: forward and backward end at once."""
    op = getattr(torch.ops.overlap_cp, f"{kind}_attention")
    backward = getattr(torch.ops.overlap_cp, f"{kind}_attention_backward")
    q, k, v = qkv()
    with torch.no_grad(), SilentCollectives() as forward_issued:
        out, lse = op(q, k, v, [4, 4], group, False, None)
    with torch.no_grad(), SilentCollectives() as backward_issued:
        backward(out, q, k, v, out, lse, [4, 4], group, False, None)
    return forward_issued.issued, backward_issued.issued


def errors(attend: Any, group: dist.ProcessGroup) -> list[str]:
    """Messages; none of these calls gets as far as to communicate."""
    q, k, v = qkv()
    calls = [
        ((q, k[..., :4], v), {}),
        ((q[:, :2], k, v), {}),
        ((q[:, :, :3], k, v), {}),
        ((q, k.double(), v), {}),
        ((q[0], k, v), {}),
        ((q, k, v), {"cp_split_sizes": [4]}),
        ((q, k, v), {"cp_split_sizes": [5, 5]}),
        ((q, k, v), {"cp_split_sizes": [-1, 4]}),
    ]
    if attend is ulysses_attention:
        calls.append((qkv(heads=3, kv_heads=3), {}))
    messages = []
    for args, kwargs in calls:
        with pytest.raises(ConfigError) as caught:
            attend(*args, group=group, **kwargs)
        messages.append(str(caught.value))
    return messages


def test_closer(pooled_ranks: RunRanks) -> None:
    first, second = pooled_ranks(look_closer, 2)
    for kind in ATTENTIONS:
        assert first[f"{kind} layouts"]
        assert second[f"{kind} layouts"]
        assert first[f"{kind} name"]
        messages = first[f"{kind} errors"]
        for message, words in zip(
            messages,
            (
                "k and v must have one shape",
                "batch, local length and head dim must be equal",
                "3 query heads don't divide by 2 key/value heads",
                "one dtype and device",
                r"expected (batch, local length, heads, head dim)",
                "expected one for each of 2 ranks",
                "holds 4 rows",
                "can't be negative",
                "3 query heads don't divide by the group size 2",
            ),
            strict=False,
        ):
            assert words in message
            assert message.startswith(f"overlap_cp::{kind}_attention: ")
    exchange = "_c10d_functional.all_to_all_single.default"
    assert first["ulysses silent"] == ([exchange] * 2, [exchange] * 2)
    pair = ["c10d.send.default", "c10d.recv_.default"]
    assert first["ring silent"] == (pair, pair * 3)


def check_registration(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    """torch's own checks of schema, fake implementation and gradients, also in dynamic shapes."""
    group = dist.group.WORLD
    assert group is not None
    results = {}
    for kind in ATTENTIONS:
        op = getattr(torch.ops.overlap_cp, f"{kind}_attention").default
        backward = getattr(torch.ops.overlap_cp, f"{kind}_attention_backward").default
        inputs = [x.requires_grad_() for x in qkv(length=6)]
        more = ([6], group.group_name, True, 0.25)
        results[kind] = torch.library.opcheck(op, (*inputs, *more))
        q, k, v = (x.detach() for x in inputs)
        with torch.no_grad():
            out, lse = op(q, k, v, *more)
        results[f"{kind} backward"] = torch.library.opcheck(
            backward, (out.clone(), q, k, v, out, lse, *more)
        )
    return results


def test_torch_accepts_the_ops_in_dynamic_shapes(pooled_ranks: RunRanks) -> None:
    (results,) = pooled_ranks(check_registration, 1)
    assert len(results) == 4
    for outcome in results.values():
        assert outcome["test_aot_dispatch_dynamic"] == "SUCCESS"
        assert set(outcome.values()) == {"SUCCESS"}


def test_the_script_reports_each_case() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, *launcher, "--nproc-per-node=1", str(SCRIPT), "--rows=3", "--dim=8"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    *cases, summary = done.stdout.splitlines()
    assert all(line.startswith("ok  ") for line in cases)
    assert summary == f"{len(cases)} of {len(cases)} cases are within tolerance"
