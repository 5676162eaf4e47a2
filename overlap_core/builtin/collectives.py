"""Plugin `functional_collectives`: which of torch's own ops communicate.

A communicating op that is missed can make ranks deadlock, and a silent one that is taken for
communicating only costs freedom. So in the namespaces that torch keeps for communication,
everything communicates but the ops known to be silent, and ops that a later torch adds are
covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.graph.nodes import NodeKind
from overlap_core.hookspecs import hookimpl
from overlap_core.registry import canonical_op_name, op_has_internal_collective
from overlap_core.skeleton.entries import NO_COMMUNICATION, Communication

if TYPE_CHECKING:
    from overlap_core.graph.nodes import Node

__all__ = ["overlap_classify_node"]

overlap_plugin_name = "functional_collectives"

_FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_NAMESPACES = frozenset((*_FUNCTIONAL, "c10d", "symm_mem"))

_SILENT = frozenset(
    (
        *(f"{namespace}::wait_tensor" for namespace in _FUNCTIONAL),
        "_c10d_functional::_wrap_tensor_autograd",
        "c10d::check_for_nan",
        "symm_mem::memset32_",
    )
)

# Other namespaces hold ops of both kinds.
_SINGLE_OPS = frozenset(
    (
        "_dtensor::shard_dim_alltoall",
        "torchrec::all_gather_into_tensor",
        "torchrec::all_to_all_single",
        "torchrec::reduce_scatter_tensor",
    )
)

_GATHERS = frozenset(
    f"{namespace}::all_gather_into_tensor{suffix}"
    for namespace in _FUNCTIONAL
    for suffix in ("", "_out", "_coalesced")
)


@hookimpl(trylast=True)
def overlap_classify_node(node: Node) -> Communication | None:
    """Answer for waits, torch's communication ops, and ops known to communicate inside."""
    if node.kind is NodeKind.WAIT:
        return NO_COMMUNICATION
    op = canonical_op_name(node.op)
    launches = node.kind is NodeKind.COLLECTIVE
    if not launches and op in _SILENT:
        return NO_COMMUNICATION
    if not (
        launches
        or node.issues_collective
        or op in _SINGLE_OPS
        or (op is not None and op.partition("::")[0] in _NAMESPACES)
        or op_has_internal_collective(node.op)
    ):
        return None
    return Communication(
        groups=() if node.group is None else (node.group,),
        # Only a launch that is waited for elsewhere can move; other nodes block till they end.
        gather=launches and op in _GATHERS,
    )
