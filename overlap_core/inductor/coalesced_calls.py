"""What generated code calls: several gathers as one, with one wait for all of them.

The functional op of torch does the same, but each of its outputs has to be waited for by a call
of its own through the dispatcher, and that is host time which a step may not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_core._marks import CALL_WAIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Work

__all__ = ["PendingCall", "all_gather_coalesced"]


class PendingCall:
    """A call in flight. It holds its tensors alive until it was waited for."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def wait(self) -> None:
        """Make the outputs readable on the current stream; again and again, it does so once."""
        if torch.autograd._profiler_enabled():  # a trace shows where the host waits
            with torch.profiler.record_function(CALL_WAIT):
                self._finish()
        else:
            self._finish()

    def _finish(self) -> None:
        work = self._work
        if work is not None:
            self._work = None
            work.wait()


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group_name: str
) -> PendingCall:
    """Gather each shard along dimension 0 into its output; no copy is made.

    Args:
        outputs: contiguous, `(ranks * d0, ...)` for a shard of shape `(d0, ...)`, all of one dtype.
        shards: contiguous, of equal shapes on all ranks.
        group_name: of the process group, as the functional collectives of the graph name it.
    """
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    return PendingCall(group.allgather_into_tensor_coalesced([*outputs], [*shards]))
