"""Which graph this is, in words that mean the same on every rank."""

from __future__ import annotations

import threading
from typing import Any

from torch._guards import CompileContext

__all__ = ["GraphIdentity", "identify"]

_lock = threading.Lock()
_seen: dict[str, int] = {}

GraphIdentity = str


def identify(inductor_graph: Any) -> GraphIdentity:
    """Frame and recompile, forward, backward or inference, subgraph, and how often seen before.

    The count tells apart what compiles again under one name, such as the two lowerings of a
    backward graph or a program that resets the compiler.
    """
    compile_id = CompileContext.current_compile_id()
    if getattr(inductor_graph, "is_backward", False):
        direction = "backward"
    elif getattr(inductor_graph, "is_inference", False):
        direction = "inference"
    else:
        direction = "forward"
    name = getattr(inductor_graph, "name", None) or "main"
    base = f"{compile_id or 'none'}/{direction}/{name}".replace(" ", "_")
    with _lock:
        count = _seen[base] = _seen.get(base, -1) + 1
    return f"{base}/{count}"
