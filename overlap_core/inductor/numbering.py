"""Numbers the captured operations, before any of Inductor's own passes moves them.

Inductor's reorderings look at one rank alone, and some follow size hints. What is left to compare
between ranks afterwards is the order in which the graph was captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch._inductor.custom_graph_pass as custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from overlap_core.session import session

from .input_kinds import mark_kinds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch.fx

__all__ = ["POSITION", "CapturedNumbering", "find_captured", "with_numbering"]

POSITION = "overlap_core_position"
"""Key in `torch.fx.Node.meta`."""

_JOINT = "joint_custom_post_pass"
_POST_GRAD = "post_grad_custom_pre_pass"
_COLLECTIVES = "_c10d_functional."
_WAIT = "_c10d_functional.wait_tensor"


class CapturedNumbering(CustomGraphPass):
    """Gives every operation of a graph its place, once for each graph.

    It is installed twice. An inference graph is numbered where joint graphs end, since
    `reorder_for_locality` comes before Inductor's first hook for graphs that are split; the two
    halves of a training graph are new graphs and numbered at that hook, so that what backward
    computes again has its place in backward.

    It changes no code, so all its instances have one identity in Inductor's caches.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Number the nodes, unless this very graph was numbered before."""
        mark_kinds(graph)
        if graph in session.kept.numbered:
            return
        for place, node in enumerate(graph.nodes):
            node.meta[POSITION] = place
        session.kept.numbered.add(graph)

    def uuid(self) -> str:
        """The same for all instances."""
        return "overlap_core.CapturedNumbering-1"


class _Chain(CustomGraphPass):
    """A user's pass and then ours, for a torch that takes one pass only."""

    def __init__(self, first: Any, second: CapturedNumbering) -> None:
        self.first = first
        self.second = second

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Run both."""
        self.first(graph)
        self.second(graph)

    def uuid(self) -> Any | None:
        """None, which keeps artifacts uncached, unless the user's pass has an identity."""
        own = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return (own, self.second.uuid()) if own else None


def with_numbering(patches: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Options that add the numbering behind the passes that a user has configured.

    Args:
        patches: options that the user gave; they win over Inductor's configuration.
        config: Inductor's configuration.
    """
    return {
        key: _behind(patches.get(key, getattr(config, key)), CapturedNumbering())
        for key in (_JOINT, _POST_GRAD)
    }


def _behind(configured: Any, numbering: CapturedNumbering) -> Any:
    if configured is None or isinstance(configured, (CapturedNumbering, _Chain)):
        return configured or numbering
    if isinstance(configured, (list, tuple)):
        others = [one for one in configured if not isinstance(one, CapturedNumbering)]
        return [*others, numbering]
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return [configured, numbering]
    return _Chain(configured, numbering)


def find_captured(inner: Any, origins: Iterable[Any]) -> int | None:
    """Place of the operation that a node of Inductor's comes from; None if it is not known.

    Args:
        inner: the node's IR, or None.
        origins: captured operations behind it; what was fused into them counts among those.
    """
    numbered = [origin for origin in origins if origin.meta.get(POSITION) is not None]
    overload = getattr(inner, "op_overload", None)
    own = [origin for origin in numbered if origin.target is overload]
    if not own and str(overload).startswith(_COLLECTIVES) and _WAIT not in str(overload):
        # An in-place kernel stands for the functional op, whose name is a little different.
        own = [
            origin
            for origin in numbered
            if str(origin.target).startswith(_COLLECTIVES) and _WAIT not in str(origin.target)
        ]
    return min((origin.meta[POSITION] for origin in own or numbered), default=None)
