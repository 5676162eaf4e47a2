"""Process groups, which an op's arguments can carry by name only."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["find_group", "group_name", "group_size"]


def group_name(group: dist.ProcessGroup | str) -> str:
    """The name under which a process group is registered."""
    if isinstance(group, str):
        return group
    name: str = group.group_name
    return name


def group_size(group: dist.ProcessGroup | str) -> int:
    """Number of ranks of a process group or of the group of this name."""
    return dist.get_world_size(find_group(group) if isinstance(group, str) else group)


def find_group(name: str) -> dist.ProcessGroup:
    """The process group of this name.

    Raises:
        RuntimeError: from torch, no group has this name.
    """
    # torch has no public way from a name to its group; its functional collectives use this one.
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
