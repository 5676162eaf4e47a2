"""Context-parallel attention against unsharded attention, on the ranks of a process group.

    torchrun --nproc-per-node 2 benchmarks/check_numerics.py
    torchrun --nproc-per-node 2 benchmarks/check_numerics.py --device cuda

Rank 0 prints one line a case: the largest errors of output and gradients over all ranks, each
relative to the largest value of its float64 reference. The exit status is 1 if a case is off.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

import torch
import torch.distributed as dist
from attrs import frozen
from overlap_cp_attention import ring_attention, split_sizes, ulysses_attention
from torch.nn import functional as F

ATTENTIONS = {"ulysses": ulysses_attention, "ring": ring_attention}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""A few units in the last place of each dtype."""


@frozen(kw_only=True)
class Case:
    """One attention; lengths are by rank."""

    kind: str
    dtype: torch.dtype
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    is_causal: bool
    scale: float | None = None
    dim: int = 16
    batch: int = 2

    def __str__(self) -> str:
        return (
            f"{self.kind:7} {str(self.dtype).removeprefix('torch.'):8} lengths {self.lengths} "
            f"heads {self.heads}/{self.kv_heads} {'causal' if self.is_causal else 'full'}"
            f"{'' if self.scale is None else f' scale {self.scale}'}"
        )


def make_cases(ranks: int, dtypes: list[torch.dtype], rows: int, dim: int) -> list[Case]:
    """Even, uneven and empty shares; as many key/value heads as queries, fewer, one."""
    uneven = tuple(rows + rank * rows // 3 for rank in reversed(range(ranks)))
    shares = {
        (rows,) * ranks: None,
        uneven: None,
        tuple(split_sizes(rows * ranks + 1, ranks)): 0.3,
        (*(0 for _ in range(ranks - 1)), rows): None,
        (rows, *(1 for _ in range(ranks - 1))): None,
    }
    heads = ((8, 8), (8, 4), (8, 1), (12, 3))
    return [
        Case(
            kind=kind,
            dtype=dtype,
            lengths=lengths,
            heads=q_heads,
            kv_heads=kv_heads,
            is_causal=causal,
            scale=scale,
            dim=dim,
        )
        for kind, dtype, causal in itertools.product(ATTENTIONS, dtypes, (False, True))
        for (lengths, scale), (q_heads, kv_heads) in itertools.product(shares.items(), heads)
    ]


def check(case: Case, group: dist.ProcessGroup, device: str) -> dict[str, float]:
    """Largest relative errors on this rank, of the output and of each gradient."""
    generator = torch.Generator().manual_seed(0)
    total = sum(case.lengths)
    whole = [
        torch.randn(case.batch, total, heads, case.dim, generator=generator)
        .to(case.dtype)
        .to(device)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    expected = _unsharded(case, whole)
    start, end = (sum(case.lengths[: group.rank() + more]) for more in (0, 1))
    q, k, v = (x[:, start:end].clone().requires_grad_() for x in whole[:3])
    out = ATTENTIONS[case.kind](
        *(q, k, v),
        group=group,
        cp_split_sizes=case.lengths,
        is_causal=case.is_causal,
        scale=case.scale,
    )
    out.backward(whole[3][:, start:end])
    return {
        name: _error(got, reference[:, start:end], reference)
        for name, got, reference in zip(
            ("out", "grad_q", "grad_k", "grad_v"),
            (out, q.grad, k.grad, v.grad),
            expected,
            strict=True,
        )
    }


def _unsharded(case: Case, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in whole[:3])
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=case.is_causal, scale=case.scale, enable_gqa=True
    )
    out.backward(whole[3].double().transpose(1, 2))
    return [x.detach().transpose(1, 2) for x in (out, q.grad, k.grad, v.grad) if x is not None]


def _error(got: torch.Tensor | None, expected: torch.Tensor, whole: torch.Tensor) -> float:
    if got is None or got.shape != expected.shape:
        return float("inf")
    if not got.isfinite().all():
        return float("nan")
    difference = (got.double() - expected).abs()
    return (difference.max() / whole.abs().max()).item() if difference.numel() else 0.0


def is_off(case: Case, errors: dict[str, float]) -> bool:
    """Whether an error is past the tolerance of the dtype, or no number."""
    return not all(error <= TOLERANCES[case.dtype] for error in errors.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=12, help="of the even share of a rank")
    parser.add_argument("--dim", type=int, default=16, help="of a head")
    options = parser.parse_args()
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    group = dist.group.WORLD
    assert group is not None
    cases = make_cases(group.size(), list(TOLERANCES), options.rows, options.dim)
    bad = 0
    for case in cases:
        errors = check(case, group, device)
        # nan would be lost in a maximum over ranks
        row = torch.tensor(list(errors.values()), device=device).nan_to_num(nan=float("inf"))
        dist.all_reduce(row, dist.ReduceOp.MAX)
        errors = dict(zip(errors, row.tolist(), strict=True))
        off = is_off(case, errors)
        bad += off
        if group.rank() == 0:
            text = "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
            print(f"{'OFF' if off else 'ok '} {case}: {text}", flush=True)
    if group.rank() == 0:
        print(f"{len(cases) - bad} of {len(cases)} cases are within tolerance")
    dist.destroy_process_group()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
