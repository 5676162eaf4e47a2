"""Running real ops in the middle of a compile."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["eager_world"]


@contextmanager
def eager_world() -> Iterator[None]:
    """No gradients, no fake tensors, no tracing context; random state is put back afterwards.

    The Python dispatcher, which is on while Inductor lowers, keeps the interpreter's lock
    while an op runs; a wait for gloo, whose threads need the lock, would never end.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        unset_fake_temporarily(),
        tracing(None),
        no_python_dispatcher(),
    ):
        yield
