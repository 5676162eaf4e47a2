"""What a collective asks of its peers: ranks replay together only what fits together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from .groups import GroupResolver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["describe_call", "find_exchange", "is_one_sided", "is_uneven", "name_of"]

_ONE_SIDED = frozenset({"isend", "irecv", "batch_p2p_ops"})
"""Functional ops of which each rank issues another one, or with another peer."""
_ROOTS = ("root_rank", "src")
_SENDS = frozenset({"send", "recv_", "recv_any_source_", *_ONE_SIDED})
"""Ops whose `src` is a peer of one rank and no root of all."""
_EXCHANGES = frozenset({"all_to_all_single", "alltoall_base_"})
_OF_THE_ROOT = frozenset({("gather_", "output_tensors"), ("scatter_", "input_tensors")})
_PIECES = frozenset({"alltoall_", "allgather_", "reduce_scatter_", "gather_", "scatter_"})
"""In their lists each tensor is another rank's piece."""


def is_one_sided(op_name: str) -> bool:
    """Whether ranks cannot replay an op together, by its qualified name: `_c10d_functional::isend`.

    An op that sends and receives inside can be replayed: its ranks call it all.
    """
    namespace, _, name = op_name.partition("::")
    return namespace.startswith("_c10d_functional") and name in _ONE_SIDED


def describe_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """An op with what must be equal on its ranks: the shapes of its tensors, and the root."""
    named = _named(func, args, kwargs)
    # Only the root has a list of what it gathers or scatters.
    told = [v for k, v in named.items() if (name_of(func), k) not in _OF_THE_ROOT]
    shapes = [
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for value in tree_leaves(told)
        if isinstance(value, torch.Tensor)
    ]
    roots = [] if name_of(func) in _SENDS else [f"{k}={named[k]}" for k in _ROOTS if k in named]
    return f"{func}({', '.join([*shapes, *roots])})"


def find_exchange(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Of an all-to-all whose pieces differ in size, what its peers have to fit.

    Returns:
        The ranks of its group, this one's place among them, the rows received from and sent to
        each of them; None for anything else.
    """
    named = _named(func, args, kwargs)
    received, sent = named.get("output_split_sizes") or [], named.get("input_split_sizes") or []
    if name_of(func) not in _EXCHANGES or len({*received, *sent}) <= 1:
        return None
    ranks = list(_ranks(named.get("group_name", named.get("process_group"))))
    taken, given = (
        len(named[key]) // len(ranks) if isinstance(named.get(key), torch.Tensor) else 0
        for key in ("output", "input")
    )
    return [
        ranks,
        ranks.index(dist.get_rank()),
        [*map(int, received)] or [taken] * len(ranks),
        [*map(int, sent)] or [given] * len(ranks),
    ]


def is_uneven(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether lists of tensors, a piece for each rank, hold different sizes."""
    if name_of(func) not in _PIECES:
        return False
    return any(_differs(value) for value in _named(func, args, kwargs).values())


def _differs(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    if any(isinstance(part, (list, tuple)) for part in value):
        return any(map(_differs, value))
    return len({tuple(part.shape) for part in value if isinstance(part, torch.Tensor)}) > 1


def _ranks(group: Any) -> tuple[int, ...]:
    """Of a group by its name or itself, also in the form in which ops get it; empty: unknown."""
    if isinstance(group, str):
        return GroupResolver().ranks(group) or ()
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def name_of(func: Any) -> str:
    """The name of an op without its namespace and overload."""
    name: str = func._schema.name.partition("::")[2]
    return name


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
