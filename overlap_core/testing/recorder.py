"""Records which collectives this rank really issues, and in which order.

Every collective of ``torch.distributed`` goes through a dispatcher op ``c10d::*``, whoever issues
it: eager code, a custom op's own Python, or the C++ behind ``_c10d_functional`` that compiled code
calls. The recorder registers a kernel for those ops' ``BackendSelect`` key, which is in every
call's key set and which c10d itself leaves free, records, and redispatches to the backend. So it
changes nothing about how a model is traced or compiled, unlike a ``TorchDispatchMode`` (under
which Dynamo doesn't compile).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@attrs.frozen
class RecordedCollective:
    """One collective as issued on this rank; equal on all ranks of its group if shapes are.

    Attributes:
        op: name of the c10d op, such as ``"_allgather_base_"``.
        group_size: number of ranks.
        group_ordinal: the group, in order of first appearance in this recording (group names are
            each rank's own).
        shapes, dtypes: of the tensor arguments, outputs before inputs where the op has both.
    """

    op: str
    group_size: int
    group_ordinal: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the first tensor argument; 0 without tensors."""
        return torch.Size(self.shapes[0]).numel() if self.shapes else 0


class CollectiveRecorder:
    """``with CollectiveRecorder() as recorder: ...`` then ``recorder.collectives``.

    Works for gloo and NCCL, eager and compiled code, functional collectives and collectives inside
    opaque custom ops. One recorder at a time in a process.

    Raises:
        RuntimeError: on entry, when another recorder is active.
    """

    _active = threading.Lock()

    def __init__(self) -> None:
        self._seen: list[RecordedCollective] = []
        self._groups: dict[str, int] = {}
        self._library: Any = None

    @property
    def collectives(self) -> list[RecordedCollective]:
        """What was issued so far, in order."""
        return list(self._seen)

    def shared(self) -> list[tuple[str, int, int, tuple[str, ...]]]:
        """What must be equal on all ranks: ``(op, group size, group ordinal, dtypes)``, in order.

        Leaves out collectives on groups of one rank, which concern nobody else, and shapes, which
        differ where lengths do. Groups are numbered by first appearance among what is left.
        """
        numbers: dict[int, int] = {}
        rows = []
        for seen in self._seen:
            if seen.group_size > 1:
                number = numbers.setdefault(seen.group_ordinal, len(numbers))
                rows.append((seen.op, seen.group_size, number, seen.dtypes))
        return rows

    def __enter__(self) -> CollectiveRecorder:
        if not self._active.acquire(blocking=False):
            raise RuntimeError("another CollectiveRecorder is active in this process")
        self._library = torch.library.Library("c10d", "IMPL")
        for name in _OPS:
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                self._register(name, packet.default)
        return self

    def __exit__(self, *_: object) -> None:
        self._library = None  # its finalizer takes our kernels out again
        self._active.release()

    def _register(self, name: str, op: Any) -> None:
        def record_and_call(keyset: Any, *args: Any) -> Any:
            self._record(name, args)
            # redispatch gives up the GIL, as gloo's threads need it to free tensors.
            return op.redispatch(keyset & _BACKENDS, *args)

        self._library.impl(name, record_and_call, "BackendSelect", with_keyset=True)

    def _record(self, name: str, args: tuple[Any, ...]) -> None:
        group = _group(args)
        tensors = list(_tensors(args))
        ordinal = self._groups.setdefault(group.group_name, len(self._groups))
        self._seen.append(
            RecordedCollective(
                op=name,
                group_size=group.size(),
                group_ordinal=ordinal,
                shapes=tuple(tuple(t.shape) for t in tensors),
                dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
            )
        )


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group: dist.ProcessGroup = dist.ProcessGroup.unbox(arg)
            return group
    raise TypeError("a c10d op without a process group")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
