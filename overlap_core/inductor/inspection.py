"""What `overlap-core doctor` asks of torch's compiler; nothing here is decided or changed."""

from __future__ import annotations

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from .overlap_pass import OverlapPass
from .versions import SIMPLE_OVERLAP_KEY

__all__ = ["compiler_switches", "configured_passes"]

_INDUCTOR_KEYS = (
    "aten_distributed_optimizations.enable_overlap_scheduling",
    "cpp_wrapper",
    "deterministic",
    "fx_graph_cache",
    "fx_graph_remote_cache",
    SIMPLE_OVERLAP_KEY,
    "triton.cudagraphs",
)
_ELSEWHERE = (
    (functorch_config, "enable_autograd_cache"),
    (torch.compiler.config, "force_disable_caches"),
    (dynamo_config, "suppress_errors"),
)


def compiler_switches() -> dict[str, bool]:
    """Switches of torch's compiler as they are set in this thread now.

    Returns:
        By name. Those that this torch doesn't have are left out.
    """
    known = inductor_config.get_config_copy()
    found = {key: bool(known[key]) for key in _INDUCTOR_KEYS if key in known}
    if torch.are_deterministic_algorithms_enabled():
        found["deterministic"] = True
    for config, name in _ELSEWHERE:
        if hasattr(config, name):
            found[name] = bool(getattr(config, name))
    return dict(sorted(found.items()))


def configured_passes() -> tuple[str, ...]:
    """Names of the reorder passes that a user has configured and that run before ours."""
    if not inductor_config.reorder_for_compute_comm_overlap:
        return ()
    passes = inductor_config.reorder_for_compute_comm_overlap_passes
    return tuple(_name(one) for one in passes if not isinstance(one, OverlapPass))


def _name(one: object) -> str:
    if isinstance(one, str):
        return one
    named = one if hasattr(one, "__qualname__") else type(one)
    return f"{named.__module__}.{named.__qualname__}"
