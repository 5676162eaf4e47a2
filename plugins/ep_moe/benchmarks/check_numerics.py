"""Checks dispatch and combine against a mixture of experts on one rank, on any number of ranks.

    torchrun --nproc-per-node 4 check_numerics.py --device cuda

prints one line for each case on rank 0 and exits with 1 if a case fails on any rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

import torch
import torch.distributed as dist
from attrs import frozen
from overlap_ep_moe import ExpertParallelMoE, mixture_of_experts

TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}
"""Largest difference, relative to the largest value of the expected tensor."""


@frozen(kw_only=True)
class Case:
    """One configuration; `tokens` are those of each rank."""

    tokens: tuple[int, ...]
    top_k: int
    capacity: int | None
    dtype: str
    few_experts: bool = False
    """All tokens prefer the same experts, so that others get none."""


def cases(world_size: int, scale: int) -> list[Case]:
    """Equal, different, and no tokens on some ranks; with and without dropped tokens."""
    counts = [
        tuple(scale for _ in range(world_size)),
        tuple(scale + 7 * rank for rank in range(world_size)),
        tuple(scale * (rank % 2 == 0) for rank in range(world_size)),
    ]
    return [
        Case(tokens=tokens, top_k=top_k, capacity=capacity, dtype=dtype, few_experts=few)
        for tokens, top_k, capacity, dtype, few in itertools.product(
            counts, (1, 2), (None, max(1, scale // 4)), TOLERANCES, (False, True)
        )
    ]


def differences(case: Case, device: torch.device, dim: int, hidden: int) -> dict[str, float]:
    """Relative difference of output and gradients on this rank, by name.

    All ranks draw the same full weights and all ranks' tokens, so that each can compute the whole
    on its own.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts, dtype = 2 * ranks, getattr(torch, case.dtype)
    draw = torch.Generator().manual_seed(sum(case.tokens) + case.top_k)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype)

    router, up, down = noise(experts, dim), noise(experts, dim, hidden), noise(experts, hidden, dim)
    router, up, down = router / dim**0.5, up / dim**0.5, down / hidden**0.5
    inputs = [noise(tokens, dim) for tokens in case.tokens]
    grads = [noise(tokens, dim) for tokens in case.tokens]
    if case.few_experts:
        router[case.top_k :] = -router[0]
        inputs = [x + 2 * router[0] for x in inputs]

    model = ExpertParallelMoE(
        dim, hidden, experts, case.top_k, capacity=case.capacity, dtype=dtype, device=device
    )
    own = slice(rank * model.local_experts, (rank + 1) * model.local_experts)
    with torch.no_grad():
        model.router.weight.copy_(router)
        model.up.copy_(up[own])
        model.down.copy_(down[own])
    x = inputs[rank].clone().requires_grad_()
    out = model(x)
    out.backward(grads[rank])

    full = [weight.clone().requires_grad_() for weight in (router, up, down)]
    tokens = [one.clone().requires_grad_() for one in inputs]
    expected = [mixture_of_experts(one, *full, case.top_k, case.capacity) for one in tokens]
    # The router's gradient is each rank's own, those of the experts are sums over ranks.
    (router_grad,) = torch.autograd.grad(
        expected[rank], full[0], grads[rank], retain_graph=True, allow_unused=True
    )
    torch.autograd.backward(expected, grads)
    pairs = {
        "out": (out, expected[rank]),
        "x": (x.grad, tokens[rank].grad),
        "router": (model.router.weight.grad, router_grad),
        "up": (model.up.grad, full[1].grad[own]),  # type: ignore[index]
        "down": (model.down.grad, full[2].grad[own]),  # type: ignore[index]
    }
    return {name: _difference(*pair) for name, pair in pairs.items()}


def _difference(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None or found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    if not found.isfinite().all():
        return float("inf")
    largest = expected.float().abs().max().clamp(min=1e-3)
    return float((found.float() - expected.float()).abs().max() / largest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=32, help="of a rank")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    failed = 0
    for case in cases(dist.get_world_size(), args.tokens):
        found = differences(case, device, args.dim, args.hidden)
        worst = torch.tensor([max(found.values())], device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        ok = float(worst) <= TOLERANCES[case.dtype]
        failed += not ok
        if dist.get_rank() == 0:
            detail = "" if ok else f"  {found}"
            print(f"{'ok  ' if ok else 'FAIL'} {float(worst):.1e} {case}{detail}", flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
