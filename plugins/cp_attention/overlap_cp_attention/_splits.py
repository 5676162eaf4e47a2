"""How a sequence is divided among ranks."""

from __future__ import annotations

from overlap_core.errors import ConfigError

__all__ = ["split_sizes"]


def split_sizes(total: int, ranks: int) -> list[int]:
    """Rows of each rank, in rank order, for a sequence of `total` rows over `ranks` ranks.

    As even as it can be: lengths differ by one at most, the longer ones come first, and with
    fewer rows than ranks the last ranks have none.

    Raises:
        ConfigError: `total` is negative, or `ranks` is not positive.
    """
    if total < 0 or ranks < 1:
        raise ConfigError(
            f"split_sizes(total={total}, ranks={ranks}): expected at least 0 rows and 1 rank"
        )
    each, left = divmod(total, ranks)
    return [each + (rank < left) for rank in range(ranks)]
