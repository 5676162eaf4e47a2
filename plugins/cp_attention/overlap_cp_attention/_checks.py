"""What both kinds of attention ask of their arguments, checked when an op runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.errors import ConfigError

from ._groups import find_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

__all__ = ["check_arguments"]


def check_arguments(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splits: Sequence[int],
    group: str,
) -> dist.ProcessGroup:
    """The process group, if the arguments of an op go together.

    The checks run on real sizes, not while a compiler traces: there they would add guards.

    Raises:
        ConfigError: shapes, dtypes or split sizes don't go together; says which and what to do.
    """
    found = find_group(group)
    if (problem := _shape_problem(q, k, v) or _split_problem(q, splits, found)) is not None:
        raise ConfigError(f"{op}: {problem}")
    return found


def _shape_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"{shapes}: expected (batch, local length, heads, head dim) each"
    if k.shape != v.shape:
        return f"{shapes}: k and v must have one shape"
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        return f"{shapes}: batch, local length and head dim must be equal in q, k and v"
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        return f"{shapes}: {q.shape[2]} query heads don't divide by {k.shape[2]} key/value heads"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        return f"q, k and v must have one dtype and device, not {kinds}"
    return None


def _split_problem(q: torch.Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> str | None:
    given = f"cp_split_sizes={list(splits)}"
    if len(splits) != group.size():
        return f"{given} has {len(splits)} entries: expected one for each of {group.size()} ranks"
    if min(splits) < 0:
        return f"{given}: a length can't be negative"
    if splits[group.rank()] != q.shape[1]:
        return (
            f"{given}, but rank {group.rank()} of the group holds {q.shape[1]} rows: pass the "
            "local length of every rank, the same list on all ranks"
        )
    return None
