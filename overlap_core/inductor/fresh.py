"""Making a process that has compiled and overlapped as a new one is."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from overlap_core.session import session

from .install import disable

__all__ = ["reset_process"]


def reset_process() -> None:
    """Take the pass out, forget what overlap_core learned, and what Dynamo compiled and counted.

    Ops stay declared.
    """
    disable()
    session.reset()
    torch.compiler.reset()
    counters.clear()
