"""Telling peers that this process goes on without overlap, so that they don't wait for it.

Nothing here raises: whoever goes on without overlap goes on.
"""

from __future__ import annotations

import logging

from overlap_core.errors import OverlapError
from overlap_core.session import session

from .job import current_job

__all__ = ["failure_in_words", "go_without", "overlap_again", "tell_peers"]

logger = logging.getLogger(__name__)


def go_without(why: str) -> None:
    """Remember why this process installs no pass, and tell its peers, if they are known by now.

    `tell_peers` tells those of jobs that begin later.
    """
    session.kept.off = why
    tell_peers(why)


def overlap_again() -> None:
    """Take back what `go_without` said."""
    session.kept.off = ""
    tell_peers("")


def tell_peers(why: str) -> None:
    """Tell the ranks of the job that is going on now; once, as long as the reason stays.

    Args:
        why: the reason; empty: this rank overlaps, whatever it said before.
    """
    try:
        job = session.learned.job
        if not why and (job is None or not job.is_off):
            return
        job = current_job()
        if job is not None and job.world_size > 1:
            job.say_off(why)
    except Exception as error:  # peers that don't hear of it wait until their deadline
        logger.warning(
            "peers cannot be told whether this rank overlaps: %s: %s", type(error).__name__, error
        )


def failure_in_words(error: Exception) -> str:
    """What went wrong, for peers: our own errors say it all, of others the kind is said too."""
    return str(error) if isinstance(error, OverlapError) else f"{type(error).__name__}: {error}"
