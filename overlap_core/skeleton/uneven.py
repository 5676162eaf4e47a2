"""Static sizes that ranks may have each their own: those that a rank's share of the rows decides.

With symbolic sizes such ranks compile one graph. Where each rank's sizes are constants (uneven
context parallelism at a fixed resolution), these are as little a difference as symbols are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.registry import canonical_op_name

from .skeleton import SYMBOLIC

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    Values = Sequence[Collection[int | str]]
    """By dimension of one output, the size on each rank."""

__all__ = ["conflicts", "is_exchange", "may_differ"]

_OF_TORCH = frozenset(
    {
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "c10d",
        "c10d_functional",
        "symm_mem",
        "torchrec",
    }
)
"""Namespaces of collectives, most of which need equal sizes on all ranks."""

_EXCHANGES = frozenset({"all_to_all_single", "alltoall_base_"})
"""Those that give each rank as many rows as its peers send it."""


def is_exchange(op: str) -> bool:
    """Whether an op is one of torch's all-to-alls that take split sizes."""
    namespace, _, name = (canonical_op_name(op) or "").partition("::")
    return namespace in _OF_TORCH and name in _EXCHANGES


def conflicts(values: Values) -> list[int]:
    """The dimensions that are static on several ranks, and not the same."""
    return [dim for dim, found in enumerate(values) if len({*found} - {SYMBOLIC}) > 1]


def may_differ(op: str, outputs: Sequence[Values]) -> bool:
    """Whether static sizes in which ranks differ can be their own shares of the same rows.

    Of torch's all-to-alls the first dimension can. Torch's other collectives need equal sizes on
    all ranks. What an op communicates inside nobody sees; ranks may differ in one dimension of each
    of its outputs. The last of several dimensions counts features, and may differ only if another
    output shows the same sizes as its rows.

    Args:
        op: that all ranks call.
        outputs: for each output the sizes on each rank, by dimension.
    """
    found = [conflicts(values) for values in outputs]
    if not any(found):
        return True
    namespace, _, name = (canonical_op_name(op) or "").partition("::")
    if not name:
        return False
    if namespace in _OF_TORCH:
        return name in _EXCHANGES and all(dims in ([], [0]) for dims in found)
    if any(len(dims) > 1 for dims in found):
        return False
    own = [(values, dims[0]) for values, dims in zip(outputs, found, strict=True) if dims]
    # Where ranks also differ in what is symbolic, more than their shares is different.
    if any(sum(len({*sizes}) > 1 for sizes in values) > 1 for values, _ in own):
        return False
    rows = [tuple(values[dim]) for values, dim in own if dim < max(1, len(values) - 1)]
    return all(tuple(values[dim]) in rows for values, dim in own)
