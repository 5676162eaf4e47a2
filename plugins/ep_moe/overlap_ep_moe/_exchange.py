"""The eager side of the ops: counts and rows travel through all-to-alls.

Collectives are issued in the functional form, which takes the group by name, since a name is all
that an op's arguments can carry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    Counts = Sequence[Sequence[int]]
    """Rows for each rank and each expert: `counts[rank][expert]`."""

__all__ = ["all_to_all", "exchange_counts", "rows_per_rank", "to_expert_order", "to_rank_order"]


def all_to_all(
    rows: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: str
) -> torch.Tensor:
    """`(sum(send), ...)` to `(sum(receive), ...)`, both in the order of the group's ranks."""
    launched = torch.ops._c10d_functional.all_to_all_single(
        rows.contiguous(), list(receive), list(send), group
    )
    received: torch.Tensor = torch.ops._c10d_functional.wait_tensor(launched)
    return received


def exchange_counts(sent: torch.Tensor, group: str) -> torch.Tensor:
    """From the rows that this rank sends to what it sends and receives.

    Args:
        sent: `(ranks, local experts)`, int64.
        group: name of the process group.

    Returns:
        `(2, ranks, local experts)`: what this rank sends to each rank's experts, and what its own
        experts receive from each rank.
    """
    ones = [1] * sent.shape[0]
    # One more than each count travels. A zero was then never sent: overlap_core is rehearsing the
    # op without communication, where all ranks send alike, so each sends this one what it keeps.
    arrived = all_to_all(sent + 1, ones, ones, group)
    own = _resolve_process_group(group).rank()  # type: ignore[arg-type]
    kept = sent[own].expand_as(sent)
    return torch.stack((sent, torch.where(arrived > 0, arrived - 1, kept)))


def rows_per_rank(counts: Counts) -> list[int]:
    """Totals over the experts, for each rank."""
    return [sum(row) for row in counts]


def to_expert_order(rows: torch.Tensor, counts: Counts) -> torch.Tensor:
    """Rows sorted by (rank, expert) to rows sorted by (expert, rank)."""
    pieces = rows.split([count for row in counts for count in row])
    experts = len(counts[0])
    return torch.cat([piece for expert in range(experts) for piece in pieces[expert::experts]])


def to_rank_order(rows: torch.Tensor, counts: Counts) -> torch.Tensor:
    """Rows sorted by (expert, rank) to rows sorted by (rank, expert)."""
    ranks = len(counts)
    pieces = rows.split([row[expert] for expert in range(len(counts[0])) for row in counts])
    return torch.cat([piece for rank in range(ranks) for piece in pieces[rank::ranks]])
