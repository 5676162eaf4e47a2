"""What both kinds of attention tell torch about their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.library import CustomOpDef  # type: ignore[attr-defined,unused-ignore]

__all__ = ["connect", "fake_gradients"]


def connect(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Make `backward` the gradient of `forward`, and say what both return while tracing.

    `forward` takes `(q, k, v, cp_split_sizes, group, is_causal, scale)` and returns `(out, lse)`;
    `backward` takes `(grad, q, k, v, out, lse, ...)` and returns the gradients of q, k and v.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        q, k, v, *ctx.settings = inputs
        ctx.save_for_backward(q, k, v, *output)

    def differentiate(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
        grads = backward(grad, *ctx.saved_tensors, *ctx.settings)
        return (*grads, *(None for _ in ctx.settings))

    forward.register_autograd(differentiate, setup_context=setup_context)
    backward.register_fake(fake_gradients)


def fake_gradients(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous tensors in the shapes of q, k and v."""
    grad_q, grad_k, grad_v = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    return grad_q, grad_k, grad_v
