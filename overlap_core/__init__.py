"""Hides FSDP weight all-gathers behind compute, on every rank alike, or leaves the graph alone."""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from .config import OverlapConfig
from .costs import Cost
from .errors import OverlapError
from .graph import Node, NodeKind, OverlapGraph
from .hookspecs import hookimpl
from .registry import (
    apply_materialize_inputs,
    get_materialize_inputs_hook,
    op_has_internal_collective,
    register_custom_op,
    register_materialize_inputs,
)
from .simulation import simulate
from .skeleton import Communication, SkeletonEntry, fingerprint

if TYPE_CHECKING:
    from .inductor import disable, enable, enabled, inductor_options
    from .inductor.order_check import check_collective_order
    from .report import reports

__all__ = [
    "Communication",
    "Cost",
    "Node",
    "NodeKind",
    "OverlapConfig",
    "OverlapError",
    "OverlapGraph",
    "SkeletonEntry",
    "apply_materialize_inputs",
    "check_collective_order",
    "disable",
    "enable",
    "enabled",
    "fingerprint",
    "get_materialize_inputs_hook",
    "hookimpl",
    "inductor_options",
    "op_has_internal_collective",
    "register_custom_op",
    "register_materialize_inputs",
    "reports",
    "simulate",
    "skeleton",
]

__version__ = _version("overlap-core")

_NEEDS_TORCH = {
    "check_collective_order": "inductor.order_check",
    "disable": "inductor",
    "enable": "inductor",
    "enabled": "inductor",
    "inductor_options": "inductor",
    "reports": "report",
}


def skeleton(graph: OverlapGraph) -> tuple[SkeletonEntry, ...]:
    """The graph's launches of communication in program order, as ranks compare them.

    The installed plugins and registered ops say which nodes communicate.

    Raises:
        PluginError: a plugin cannot be loaded, or fails to classify a node.
    """
    from .host import PluginHost
    from .skeleton import build_skeleton

    host = PluginHost.discover(OverlapConfig())
    return build_skeleton(graph, host.classify).entries


def __getattr__(name: str) -> Any:
    """Load what needs torch at its first use, so that the command line starts fast."""
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NEEDS_TORCH})
