"""What the plugin answers when overlap_core asks. Nothing in here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core import Communication, Cost, hookimpl
from overlap_core.registry import canonical_op_name

from ._costs import estimate
from ._replay import COMMUNICATING, MATERIALIZE, NAMESPACE

if TYPE_CHECKING:
    from overlap_core import Node
    from overlap_core.costs.types import CostRequest
    from overlap_core.registry import OpRegistry

__all__ = ["overlap_classify_node", "overlap_measure_cost", "overlap_register_ops"]


@hookimpl
def overlap_register_ops(registry: OpRegistry) -> None:
    """Register all ops, so that ranks agree on them whether or not each has imported a model."""
    for op_name in sorted({*COMMUNICATING, *MATERIALIZE}):
        registry.register(op_name, MATERIALIZE.get(op_name), op_name in COMMUNICATING)


@hookimpl
def overlap_classify_node(node: Node) -> Communication | None:
    """Dispatch and combine communicate on their group; the grouped matmuls stay silent."""
    op = canonical_op_name(node.op)
    if op is None or not op.startswith(f"{NAMESPACE}::"):
        return None
    if op not in COMMUNICATING:
        return Communication(issues=False)
    return Communication(groups=() if node.group is None else (node.group,))


@hookimpl
def overlap_measure_cost(request: CostRequest) -> Cost | None:
    """Estimate this plugin's ops from shapes; None for every other op."""
    return estimate(request)
