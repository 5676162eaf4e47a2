"""Plugins with one fault in one hook, and one call of each hook."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from overlap_core import Node, NodeKind, OverlapGraph, hookimpl, hookspecs
from overlap_core.costs import CostRequest
from overlap_core.placement import Plan
from overlap_core.ranks import Vote
from overlap_core.testing import tensor_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from overlap_core.host import PluginHost

__all__ = ["ASK", "HOOKS", "blocking", "faulty", "ladder_for"]

_NODE = Node(name="op7", kind=NodeKind.OPAQUE, op="gossip.mix.default")
_REQUEST = CostRequest(kind="opaque", op="ringlib.attn.default", node="op7")
_GRAPH = OverlapGraph(nodes=(_NODE,), rank=1, world_size=2)

ASK: dict[str, Callable[[PluginHost], Any]] = {
    "overlap_register_ops": lambda host: host.register_ops(),
    "overlap_classify_node": lambda host: host.classify(_NODE),
    "overlap_materialize_inputs": lambda host: host.materialize("packed::attn", (), {}),
    "overlap_realize_tensor": lambda host: host.realize_tensor(tensor_spec(4, 2, dtype="bool")),
    "overlap_measure_cost": lambda host: host.measure_cost(_REQUEST),
    "overlap_choose_mode": lambda host: host.choose_mode((Vote(rank=0, can=True),)),
    "overlap_adjust_plan": lambda host: host.adjust_plan(Plan(), _GRAPH),
    "overlap_report_section": lambda host: host.report_sections("a report"),
}
"""By hook: makes a host call it once."""

HOOKS = tuple(ASK)


def faulty(hook: str, act: Callable[..., Any], *more: str) -> Any:
    """The plugin `faulty` 1.0, whose only hook hands its arguments to a function.

    Args:
        hook: its name.
        act: what to do with the hook's arguments.
        more: names of arguments that the hook doesn't have.
    """
    names = [*inspect.signature(getattr(hookspecs, hook)).parameters, *more]
    arguments = ", ".join(names)
    space: dict[str, Any] = {"act": act}
    exec(f"def {hook}(self, {arguments}): return act({arguments})", space)
    body = {
        hook: hookimpl(space[hook]),
        "overlap_plugin_name": "faulty",
        "overlap_plugin_version": "1.0",
    }
    return type("Faulty", (), body)()


def ladder_for(hook: str) -> str:
    """The ladder to configure so that a hook of the plugin `faulty` is called."""
    return "faulty" if hook == "overlap_choose_mode" else "default"


@contextmanager
def blocking() -> Iterator[Callable[..., None]]:
    """A function that returns when the block ends, and not before."""
    end = threading.Event()
    try:
        yield lambda *_: end.wait() and None
    finally:
        end.set()
