"""Attention of one block of queries over one block of keys, with what is needed to merge blocks.

torch's fused kernels, called below `scaled_dot_product_attention` since that one keeps the
log-sum-exp of the scores to itself. Where no fused kernel takes the tensors (float32 on a GPU, for
one) the formula is written out, and the scores take memory.

Layout in this module: queries `(batch, heads, q length, head dim)`, keys and values
`(batch, kv heads, k length, head dim)`, log-sum-exp `(batch, heads, q length)` in float32, or
float64 for float64. A causal block is square.
"""

from __future__ import annotations

import math

import torch

__all__ = ["accumulation_dtype", "attend", "attend_backward", "fold_heads", "repeat_heads"]

_aten = torch.ops.aten


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks and log-sum-exps are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the block, shaped as `q`, and the log-sum-exp of its scores."""
    k, v = (repeat_heads(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    if _is_on_cpu(q, k):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, lse
    if _has_flash(q, k, v, is_causal):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return out, lse
    return _plain(q, k, v, is_causal, scale)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the block adds to the gradients of q, k and v, in their shapes.

    `out` and `lse` are those of the whole attention, of which the block is a part.
    """
    kv_heads = k.shape[1]
    k, v = (repeat_heads(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    if _is_on_cpu(q, k):
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
    elif _has_flash(q, k, v, is_causal):
        grads = _flash_backward(grad, q, k, v, out, lse, is_causal, scale)
    else:
        grads = _plain_backward(grad, q, k, v, out, lse, is_causal, scale)
    grad_q, grad_k, grad_v = grads
    return grad_q, fold_heads(grad_k, kv_heads, 1), fold_heads(grad_v, kv_heads, 1)


def repeat_heads(x: torch.Tensor, times: int, dim: int) -> torch.Tensor:
    """Each key or value head so many times; `dim` is that of the heads."""
    return x if times == 1 else x.repeat_interleave(times, dim=dim)


def fold_heads(grad: torch.Tensor, kv_heads: int, dim: int) -> torch.Tensor:
    """Sum gradients over the repeats of each head: the adjoint of `repeat_heads`."""
    if grad.shape[dim] == kv_heads:
        return grad
    repeats: torch.Tensor = grad.unflatten(dim, (kv_heads, -1))
    return repeats.sum(dim + 1, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)


def _is_on_cpu(q: torch.Tensor, k: torch.Tensor) -> bool:
    # On empty tensors the kernel for the CPU divides by zero, which ends the process.
    return q.device.type == "cpu" and q.numel() > 0 and k.numel() > 0


def _has_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> bool:
    # The kernel itself wants multiples of 8; scaled_dot_product_attention would pad.
    if q.device.type != "cuda" or q.shape[-1] % 8:
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_causal, False)
    return bool(torch.backends.cuda.can_use_flash_attention(params))


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Without dropout the kernel reads no random state, but it asks for the tensors.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        _aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2]),
            *(0.0, is_causal, unused, unused[:1]),
            scale=scale,
        )
    )
    return grads


def _scores(q: torch.Tensor, k: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    scores = (q @ k.mT) * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = accumulation_dtype(q.dtype)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = _scores(q.to(dtype), k.to(dtype), is_causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v.to(dtype)
    return out.to(q.dtype), lse


def _plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = q.dtype
    grad, q, k, v, out = (x.to(accumulation_dtype(given)) for x in (grad, q, k, v, out))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    weights = torch.exp(_scores(q, k, is_causal, scale) - lse.unsqueeze(-1))
    grad_weights = grad @ v.mT
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
    grads = (grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad)
    return grads[0].to(given), grads[1].to(given), grads[2].to(given)
