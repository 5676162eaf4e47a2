"""A ring of ranks: each sends to the next one and receives from the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ring", "Transfer"]


@frozen(kw_only=True)
class Transfer:
    """A message on its way in, and one on its way out."""

    sent: torch.Tensor
    """Kept until the end: the backend only has its address."""
    received: torch.Tensor
    works: tuple[dist.Work | None, ...]

    def wait(self) -> torch.Tensor:
        """What was received. Both directions are done by then, as the compute stream sees it."""
        for work in self.works:
            # NCCL makes no work of an empty batch: the case while the pass rehearses the op.
            if work is not None:
                work.wait()
        return self.received


@frozen(kw_only=True)
class Ring:
    """Where blocks are, and how they move, for one rank of a group.

    At step `s` rank `r` holds the block of rank `r - s`. All ranks issue the same transfers in the
    same order, also those that have nothing to compute, so no order of arrival can block.
    """

    group: dist.ProcessGroup
    splits: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.splits)

    def owner(self, step: int) -> int:
        """The rank that the block held at a step belongs to."""
        return (self.group.rank() - step) % self.size

    def rows(self, step: int) -> int:
        """Rows in the message of a block: an empty block travels as one row that nobody reads."""
        return max(self.splits[self.owner(step)], 1)

    def pass_on(self, block: torch.Tensor, step: int) -> Transfer:
        """Send the block held at a step to the next rank; receive what is held a step later.

        The block is `(n, batch, rows, heads, dim)`.
        """
        shape = (*block.shape[:2], self.rows(step + 1), *block.shape[3:])
        sent, received = block.contiguous(), block.new_empty(shape)
        place = self.group.rank()
        before, after = (place - 1) % self.size, (place + 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )
        return Transfer(sent=sent, received=received, works=tuple(works))
