"""Records which collectives this rank really issues, and in which order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch

from overlap_core.ranks.issued import add_listener, remove_listener, tensors_in

if TYPE_CHECKING:
    import torch.distributed as dist


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
        add_listener(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        remove_listener(self._record)
        self._active.release()

    def _record(self, name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        tensors = tensors_in(args)
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
