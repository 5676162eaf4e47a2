"""Plugin `template`: what overlap_core must know of the ops of `mylib`.

torch is imported where it is needed and not before: whoever only lists plugins need not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core import Communication, hookimpl
from overlap_core.registry import canonical_op_name

if TYPE_CHECKING:
    import torch

    from overlap_core import Node
    from overlap_core.registry import OpRegistry

__all__ = ["overlap_classify_node", "overlap_register_ops"]

OP = "mylib::attn_cp"


@hookimpl
def overlap_register_ops(registry: OpRegistry) -> None:
    """Register every op that communicates inside, or whose arguments must fit each other."""
    registry.register(OP, materialize_inputs=even_lengths, has_internal_collective=True)


@hookimpl
def overlap_classify_node(node: Node) -> Communication | None:
    """Say what ranks have to agree on beyond op, sizes and group; None for all other ops."""
    if canonical_op_name(node.op) != OP:
        return None
    return Communication(groups=node.group or (), comparable="ring")


def even_lengths(
    x: torch.Tensor, lengths: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Arguments for a measurement, from shapes alone: every rank has as many rows.

    Args:
        x: ``(rows, width)``, noise.
        lengths: ``(ranks,)``, zeros, which the op refuses.
        group: name of the process group.
    """
    return x, lengths.new_full(lengths.shape, x.shape[0]), group
