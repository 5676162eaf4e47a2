"""Context-parallel attention as one opaque custom op with its communication inside.

Each rank holds a part of the sequence and all heads. An all-to-all gives each rank the whole
sequence for its share of the heads; plain attention follows; a second all-to-all restores the
first layout. Inductor sees one ``FallbackKernel`` and nothing of the collectives, just as with the
context-parallel ops of model libraries.

Source: DeepSpeed-Ulysses (Jacobs et al., 2023); the code is our own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from overlap_core.registry import register_materialize_inputs

OP_NAME = "overlap_testing::ulysses_attention"
BACKWARD_OP_NAME = "overlap_testing::ulysses_attention_backward"


@torch.library.custom_op(OP_NAME, mutates_args=())
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: list[int], group: str
) -> torch.Tensor:
    """Full (non-causal) attention over a sequence that is spread over the ranks of ``group``.

    Issues two ``all_to_all_single`` on ``group``, in the same order on every rank.

    Args:
        q, k, v: ``(batch, local length, heads, head dim)``; heads must divide by the group size.
        splits: the local length of each rank of ``group``, in rank order; they may be unequal.
        group: name of the process group (``ProcessGroup.group_name``).

    Returns:
        ``(batch, local length, heads, head dim)``, contiguous.

    Raises:
        ValueError: heads don't divide by the group size.
    """
    return visible_ulysses_attention(q, k, v, splits, group)


def visible_ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: list[int], group: str
) -> torch.Tensor:
    """What ``ulysses_attention`` does, in plain code: a compiler sees both all-to-alls.

    Shapes and errors are those of ``ulysses_attention``. Forward only.
    """
    if q.shape[2] % len(splits):
        raise ValueError(
            f"{OP_NAME}: {q.shape[2]} heads don't divide by the group size {len(splits)}"
        )
    q_all, k_all, v_all = _to_heads(torch.stack((q, k, v)), splits, group)
    out = F.scaled_dot_product_attention(q_all, k_all, v_all)
    return _to_sequence(out.unsqueeze(0), q.shape[1], splits, group)[0].contiguous()


@ulysses_attention.register_fake
def _ulysses_attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: list[int], group: str
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op(BACKWARD_OP_NAME, mutates_args=())
def ulysses_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splits: list[int],
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``ulysses_attention`` in q, k and v; all ``(batch, local length, heads, dim)``.

    Recomputes the attention. Issues two ``all_to_all_single`` on ``group``. The softmax gradient is
    written out, as autograd is off inside a custom op.
    """
    moved = _to_heads(torch.stack((q, k, v, grad)), splits, group)
    q_all, k_all, v_all, grad_all = moved
    scale = 1.0 / math.sqrt(q.shape[-1])
    weights = torch.softmax((q_all @ k_all.mT) * scale, dim=-1)
    grad_v = weights.mT @ grad_all
    grad_weights = grad_all @ v_all.mT
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    grads = torch.stack((grad_scores @ k_all, grad_scores.mT @ q_all, grad_v))
    grad_q, grad_k, grad_v = _to_sequence(grads, q.shape[1], splits, group).unbind(0)
    # clone, not contiguous(): an op's outputs may not share memory.
    return grad_q.clone(), grad_k.clone(), grad_v.clone()


@ulysses_attention_backward.register_fake
def _ulysses_attention_backward_fake(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splits: list[int],
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return like(q), like(k), like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, v, ctx.splits, ctx.group = inputs
    ctx.save_for_backward(q, k, v)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v = ctx.saved_tensors
    grads = ulysses_attention_backward(grad, q, k, v, ctx.splits, ctx.group)
    return (*grads, None, None)


ulysses_attention.register_autograd(_backward, setup_context=_setup_context)


def _all_to_all(
    x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str
) -> torch.Tensor:
    # The functional form takes the group by name, which is all that an op's arguments can carry.
    sent = torch.ops._c10d_functional.all_to_all_single(
        x.contiguous(), out_splits, in_splits, group
    )
    received: torch.Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received


def _to_heads(x: torch.Tensor, splits: list[int], group: str) -> torch.Tensor:
    """``(n, batch, local length, heads, dim)`` to ``(n, batch, heads / P, total length, dim)``."""
    n, batch, length, heads, dim = x.shape
    size = len(splits)
    x = x.reshape(n, batch, length, size, heads // size, dim)
    x = x.permute(3, 2, 0, 1, 4, 5).reshape(size * length, n, batch, heads // size, dim)
    x = _all_to_all(x, splits, [length] * size, group)
    return x.permute(1, 2, 3, 0, 4)


def _to_sequence(x: torch.Tensor, length: int, splits: list[int], group: str) -> torch.Tensor:
    """``(n, batch, heads / P, total length, dim)`` to ``(n, batch, local length, heads, dim)``."""
    n, batch, heads, _total, dim = x.shape
    size = len(splits)
    x = _all_to_all(x.permute(3, 0, 1, 2, 4), [length] * size, splits, group)
    x = x.reshape(size, length, n, batch, heads, dim).permute(2, 3, 1, 0, 4, 5)
    return x.reshape(n, batch, length, size * heads, dim)


for _name in (OP_NAME, BACKWARD_OP_NAME):
    register_materialize_inputs(_name, has_internal_collective=True)
