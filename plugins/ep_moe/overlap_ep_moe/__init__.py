"""Plugin `ep_moe`: an expert-parallel mixture of experts whose communication overlap_core knows.

torch is imported at the first use of what needs it: whoever only lists plugins need not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._plugin import overlap_classify_node, overlap_measure_cost, overlap_register_ops

if TYPE_CHECKING:
    from .grouped import grouped_mm
    from .moe import ExpertParallelMoE
    from .ops import combine, combine_padded, dispatch, dispatch_padded
    from .reference import mixture_of_experts
    from .routing import assign_slots, expert_capacity, route, sorted_positions

__all__ = [
    "ExpertParallelMoE",
    "assign_slots",
    "combine",
    "combine_padded",
    "dispatch",
    "dispatch_padded",
    "expert_capacity",
    "grouped_mm",
    "mixture_of_experts",
    "overlap_classify_node",
    "overlap_measure_cost",
    "overlap_register_ops",
    "route",
    "sorted_positions",
]

_NEEDS_TORCH = {
    "ExpertParallelMoE": "moe",
    "assign_slots": "routing",
    "combine": "ops",
    "combine_padded": "ops",
    "dispatch": "ops",
    "dispatch_padded": "ops",
    "expert_capacity": "routing",
    "grouped_mm": "grouped",
    "mixture_of_experts": "reference",
    "route": "routing",
    "sorted_positions": "routing",
}


def __getattr__(name: str) -> Any:
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{module}", __name__), name)
