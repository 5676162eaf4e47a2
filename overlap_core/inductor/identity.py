"""Which function is being compiled, in words that mean the same on every rank.

Frame numbers count what a process compiled before, which differs as soon as one rank compiles a
helper of its own. The code object of the outermost compiled function does not.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._guards import CompileContext, TracingContext

__all__ = ["identify"]

_DYNAMO = str(PurePath(torch._dynamo.__file__).parent)
_FOLDERS = 1
"""How many folders of a file's path count: ranks may have their checkouts in different places."""


def identify(inductor_graph: Any) -> str:
    """Code, direction and subgraph of the graph that is being lowered."""
    if getattr(inductor_graph, "is_backward", False):
        direction = "backward"
    elif getattr(inductor_graph, "is_inference", False):
        direction = "inference"
    else:
        direction = "forward"
    name = getattr(inductor_graph, "name", None) or "main"
    # Under another wrapper no coalesced call can be generated, so no agreement on one be followed.
    words = [compiled_code(), direction, name]
    if getattr(inductor_graph, "cpp_wrapper", False) or getattr(inductor_config, "fx_wrapper", 0):
        words.append("without_calls")
    return "/".join(words).replace(" ", "_")


def code_of(identity: str) -> str:
    """What graphs have in common that peers may run at the same time, from what `identify` said.

    A forward graph of one rank may meet an inference graph of another, which issues the same.
    """
    return identity.replace("/inference/", "/forward/")


def compiled_code() -> str:
    """Where the function is that is being compiled."""
    traced = TracingContext.get_traced_code() or ()
    if not traced:
        return f"compile-{CompileContext.current_compile_id() or 'none'}"
    # The frame itself comes first, then what was inlined, each when it was done. Dynamo wraps
    # functions whose source it can't find, and some modules, in one of its own.
    wrapped = len(traced) > 1 and traced[0].co_filename.startswith(_DYNAMO)
    code = traced[-1] if wrapped else traced[0]
    file = PurePath(code.co_filename)
    place = PurePath(*file.parts[-1 - _FOLDERS :]).as_posix().strip("/")
    return f"{place}:{code.co_firstlineno}:{code.co_qualname}"
