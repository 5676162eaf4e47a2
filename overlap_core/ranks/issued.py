"""Hearing every operation that this process issues through `torch.distributed`.

Each goes through a dispatcher op ``c10d::*``, whoever issues it: eager code, a custom op's own
Python, or the C++ behind ``_c10d_functional`` that compiled code calls. A kernel for those ops'
``BackendSelect`` key, which is in every call's key set and which c10d itself leaves free, tells
listeners and redispatches to the backend. So nothing changes about how a model is traced or
compiled, unlike under a ``TorchDispatchMode`` (under which Dynamo doesn't compile). Kernels are
there only while somebody listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from overlap_core.session import session

__all__ = ["Listener", "add_listener", "remove_listener", "tensors_in"]

# Ops of c10d that communicate, as far as this torch has them; waits and barriers' bookkeeping are
# not among them.
_OPS = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "recv_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)

_BACKENDS = torch.DispatchKeySet(torch.DispatchKey.CPU) | torch.DispatchKeySet(
    torch.DispatchKey.CUDA
)

Listener = Callable[[str, dist.ProcessGroup, tuple[Any, ...]], None]
"""Called with the name of the c10d op, the process group and all arguments, on the thread that
issues the op, before the backend is called."""


def add_listener(listener: Listener) -> None:
    """Have `listener` called for every operation from now on."""
    kept = session.kept
    with session.lock:
        kept.listeners = (*kept.listeners, listener)
        if kept.listening is None:
            kept.listening = torch.library.Library("c10d", "IMPL")
            for name in _OPS:
                packet = getattr(torch.ops.c10d, name, None)
                if packet is not None:
                    _register(kept.listening, name, packet.default)


def remove_listener(listener: Listener) -> None:
    """Undo one `add_listener`; the last one takes the kernels out again.

    Raises:
        ValueError: it does not listen.
    """
    kept = session.kept
    with session.lock:
        left = list(kept.listeners)
        left.remove(listener)
        kept.listeners = tuple(left)
        if not left:
            kept.listening = None  # its finalizer takes our kernels out


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _register(library: Any, name: str, op: Any) -> None:
    names = [argument.name for argument in op._schema.arguments]
    group_at = names.index("process_group")

    def tell_and_call(keyset: Any, *args: Any) -> Any:
        group = dist.ProcessGroup.unbox(args[group_at])
        for listener in session.kept.listeners:
            listener(name, group, args)
        # redispatch gives up the GIL, as gloo's threads need it to free tensors.
        return op.redispatch(keyset & _BACKENDS, *args)

    library.impl(name, tell_and_call, "BackendSelect", with_keyset=True)
