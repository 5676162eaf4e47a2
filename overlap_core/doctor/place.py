"""This process's place in its job, as torchrun tells it, and the job's key-value store."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import frozen

from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

__all__ = ["JobPlace", "connect", "find_job", "first_line", "is_in_job"]

_RANK, _WORLD_SIZE, _ADDRESS, _PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


@frozen(kw_only=True)
class JobPlace:
    """What torchrun tells a process of its job."""

    rank: int
    world_size: int
    address: str
    port: int
    agent_store: bool
    """Whether torchrun hosts the store; otherwise rank 0 does."""
    attempt: str
    """Which start of the job this is, where torchrun starts it again after a failure."""


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Whether somebody started this process as a rank of a job."""
    return bool(environ.get(_RANK) or environ.get(_WORLD_SIZE))


def find_job(environ: Mapping[str, str]) -> JobPlace | Finding:
    """This process's place in the job, or what is wrong with the variables that say it."""
    lacking = [n for n in (_RANK, _WORLD_SIZE, _ADDRESS, _PORT) if not environ.get(n)]
    if lacking:
        return _incomplete(f"the environment names a job, but not its {', '.join(lacking)}")
    try:
        rank, world_size, port = (int(environ[n]) for n in (_RANK, _WORLD_SIZE, _PORT))
    except ValueError as error:
        return _incomplete(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}")
    if not (0 <= rank < world_size and 0 < port < 1 << 16):
        return _incomplete(f"RANK={rank}, WORLD_SIZE={world_size}, MASTER_PORT={port} is no place")
    return JobPlace(
        rank=rank,
        world_size=world_size,
        address=environ[_ADDRESS],
        port=port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _incomplete(what: str) -> Finding:
    return Finding(
        kind="job-incomplete",
        what=what,
        do="start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    )


def connect(place: JobPlace, timeout_s: float) -> Store | Finding:
    """The job's store, or why it cannot be reached. Waits for no other rank than its host."""
    from torch.distributed import TCPStore

    hosts = place.rank == 0 and not place.agent_store
    try:
        return TCPStore(
            place.address,
            place.port,
            place.world_size,
            hosts,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError, OSError) as error:
        return Finding(
            kind="store-unreachable",
            what=f"rank {place.rank} cannot {'host' if hosts else 'reach'} the job's store at "
            f"{place.address}:{place.port}: {first_line(error)}",
            do="look at MASTER_ADDR, MASTER_PORT, the process that hosts it, and firewalls",
        )


def first_line(error: Exception) -> str:
    """An error of torch's without the stack of its C++ part."""
    return str(error).partition("\n")[0]
