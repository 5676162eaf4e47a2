"""The functions that a model calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._groups import group_name, group_size
from ._ring import ring
from ._ulysses import ulysses

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

__all__ = ["ring_attention", "ulysses_attention"]


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | str,
    cp_split_sizes: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention over a sequence that is spread over the ranks of `group`, by all-to-alls.

    Each rank computes its share of the heads over the whole sequence. Differentiable, and one
    opaque op under `torch.compile`. Every rank of `group` must call it, in the same order.

    Args:
        q: `(batch, local length, heads, head dim)`; heads must divide by the group size.
        k, v: `(batch, local length, kv heads, head dim)`. Query heads must divide by kv heads.
            If those don't divide by the group size they are repeated until they do.
        group: context-parallel process group, or its name.
        cp_split_sizes: rows of each rank in group order, the same list on every rank, 0 allowed;
            None: every rank has as many as this one.
        is_causal: a query sees keys up to its own place in the whole sequence.
        scale: of the scores; None: `1 / sqrt(head dim)`.

    Returns:
        `(batch, local length, heads, head dim)`, contiguous.

    Raises:
        ConfigError: when it runs; shapes, dtypes, heads or split sizes don't go together.
    """
    return _call(ulysses, q, k, v, group, cp_split_sizes, is_causal, scale)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | str,
    cp_split_sizes: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention over a sequence that is spread over the ranks of `group`, around a ring.

    Each rank keeps its queries and sees the keys and values of one rank after another, the next
    ones arriving meanwhile. Any number of heads will do; otherwise arguments, result and errors
    are those of `ulysses_attention`.
    """
    return _call(ring, q, k, v, group, cp_split_sizes, is_causal, scale)


def _call(
    op: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | str,
    cp_split_sizes: Sequence[int] | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if cp_split_sizes is None:
        cp_split_sizes = [q.shape[1]] * group_size(group)
    out, _lse = op(q, k, v, list(cp_split_sizes), group_name(group), is_causal, scale)
    result: torch.Tensor = out
    return result
