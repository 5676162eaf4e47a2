"""Process groups: names in graphs, ranks behind them, and the store that carries agreement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from overlap_core.ranks.store import KeyValueStore

__all__ = ["GroupResolver", "default_store", "is_fake_world", "rank_and_world_size"]


def rank_and_world_size() -> tuple[int, int] | None:
    """This process's rank and the world's size, or None if no process group is initialized."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def is_fake_world() -> bool:
    """Whether the process group only pretends to have peers, as in single-process tests."""
    return dist.get_backend() == "fake"


def default_store() -> KeyValueStore:
    """The key-value store with which the job was initialized."""
    store: KeyValueStore = distributed_c10d._get_default_store()
    return store


class GroupResolver:
    """Ranks of groups by the names that collectives in a graph carry; remembers answers."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...] | None] = {}

    def ranks(self, name: str) -> tuple[int, ...] | None:
        """The group's ranks in the world, or None if no group has this name."""
        if name not in self._known:
            self._known[name] = self._resolve(name)
        return self._known[name]

    @staticmethod
    def _resolve(name: str) -> tuple[int, ...] | None:
        try:
            group = distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
            return tuple(dist.get_process_group_ranks(group))
        except (RuntimeError, ValueError, KeyError, LookupError):
            return None
