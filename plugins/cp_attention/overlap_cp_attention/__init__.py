"""Plugin `cp_attention`: context-parallel attention as custom ops, and what the core must know.

`ulysses_attention` and `ring_attention` are for models. The hooks speak for these ops and for those
of torch's own context parallelism. torch is imported when a function is asked for and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_core import Communication, hookimpl
from overlap_core.registry import canonical_op_name

from ._names import OPS, RING_BACKWARD, TORCH_OPS, ULYSSES_BACKWARD
from ._replay import backward_inputs, forward_inputs
from ._splits import split_sizes

if TYPE_CHECKING:
    from overlap_core import Cost, Node, OverlapGraph
    from overlap_core.costs import CostRequest
    from overlap_core.placement.plan import Plan
    from overlap_core.registry import OpRegistry

    from ._api import ring_attention, ulysses_attention

__all__ = [
    "overlap_adjust_plan",
    "overlap_classify_node",
    "overlap_measure_cost",
    "overlap_register_ops",
    "ring_attention",
    "split_sizes",
    "ulysses_attention",
]


@hookimpl
def overlap_register_ops(registry: OpRegistry) -> None:
    """Register this package's ops and the opaque ones of torch's context parallelism.

    Also where no model has imported the ops, so that the registry is the same on all ranks.
    """
    for op in OPS:
        backward = op in (RING_BACKWARD, ULYSSES_BACKWARD)
        registry.register(
            op,
            materialize_inputs=backward_inputs if backward else forward_inputs,
            has_internal_collective=True,
        )
    for op in TORCH_OPS:
        registry.register(op, has_internal_collective=True)


@hookimpl
def overlap_classify_node(node: Node) -> Communication | None:
    """Answer for the registered ops: they communicate on their group, and are no weight gathers."""
    if canonical_op_name(node.op) not in (*OPS, *TORCH_OPS):
        return None
    return Communication(groups=() if node.group is None else (node.group,))


@hookimpl
def overlap_measure_cost(request: CostRequest) -> Cost | None:
    """Estimate an attention op of this package, with the part of it that the network takes.

    None for every other op, and where a shape or the group is unknown.
    """
    if canonical_op_name(request.op) not in OPS:
        return None
    from ._costs import estimate

    return estimate(request)


@hookimpl
def overlap_adjust_plan(plan: Plan, graph: OverlapGraph) -> Plan | None:
    """Keep gathers of keys and values where they are, though their input be a graph input."""
    from ._kv_gathers import hold_back

    return hold_back(plan, graph)


def __getattr__(name: str) -> Any:
    """Load what needs torch at its first use: whoever only lists plugins need not wait."""
    if name not in ("ring_attention", "ulysses_attention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _api

    return getattr(_api, name)
