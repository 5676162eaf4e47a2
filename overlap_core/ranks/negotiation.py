"""The protocol between ranks as plain steps, with no transport of its own.

A rank's side of a negotiation is a generator. It yields `Share` and is sent every rank's payload
in the order of the scope, or yields `Decide` and is sent the value that was decided for all of
them. Who drives the generator owns the transport: a key-value store between processes, or a loop
in memory over any number of ranks. A driver that cannot get an answer in time throws
`DeadlineError` into the generator.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

from attrs import frozen

from overlap_core.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

__all__ = [
    "DIGEST",
    "Decide",
    "Protocol",
    "Share",
    "first_places",
    "meet",
    "share_distinct",
    "share_explained",
]

T = TypeVar("T")

DIGEST = "/digest"
"""Ends the name of a step at which ranks mostly say the same short text."""

_NEWLINE = b"\n"
_READY, _NOT_READY = b"ready", b"not ready"
_GO, _STOP = b"go", b"stop"


@frozen
class Share:
    """Give a payload, UTF-8 text, to every rank of the scope and wait for all of theirs."""

    step: str
    payload: bytes


@frozen
class Decide:
    """Propose a value; the first one proposed by any rank of the scope stands for all."""

    step: str
    payload: bytes


if TYPE_CHECKING:
    Protocol = Generator[Share | Decide, tuple[bytes, ...], T]


def share_explained(
    step: str, payload: bytes, index: int, explain: Callable[[], bytes]
) -> Protocol[tuple[tuple[bytes, ...], dict[int, bytes]]]:
    """As `share_distinct`; the first two ranks that say different things explain themselves.

    The explanations travel with the details, in no round of their own.

    Args:
        step, payload, index: as for `share_distinct`; the payload has no newline.
        explain: called on those two ranks only; must not raise.

    Returns:
        Every rank's payload, and the explanations by place in the scope; none if all agree.
    """
    digests, speakers = yield from _share_digests(step, payload)
    if len(speakers) == 1:
        return (payload,) * len(digests), {}
    two = sorted(speakers.values())[:2]
    said = payload if index in speakers.values() else b""
    if index in two:
        said += _NEWLINE + explain()
    details = yield Share(f"{step}/detail", said)
    heads = [detail.partition(_NEWLINE) for detail in details]
    payloads = tuple(heads[speakers[digest]][0] for digest in digests)
    return payloads, {place: heads[place][2] for place in two}


def _share_digests(
    step: str, payload: bytes
) -> Protocol[tuple[tuple[bytes, ...], dict[bytes, int]]]:
    """Every rank's digest, and who speaks for each."""
    mine = hashlib.sha256(payload).hexdigest().encode()
    digests = yield Share(f"{step}{DIGEST}", mine)
    return digests, first_places(digests)


def first_places(said: Sequence[bytes]) -> dict[bytes, int]:
    """For each distinct word the place of the first who said it."""
    speakers: dict[bytes, int] = {}
    for place, word in enumerate(said):
        speakers.setdefault(word, place)
    return speakers


def share_distinct(step: str, payload: bytes, index: int) -> Protocol[tuple[bytes, ...]]:
    """Every rank's payload, sending a digest first and details only where digests differ.

    Of ranks with equal payloads only the first sends it, so what a rank sends when all agree is
    one digest, however many ranks there are.

    Args:
        step: name of the step, equal on all ranks.
        payload: what this rank says.
        index: place of this rank in the scope.
    """
    digests, speakers = yield from _share_digests(step, payload)
    if len(speakers) == 1:
        return (payload,) * len(digests)
    details = yield Share(f"{step}/detail", payload if index in speakers.values() else b"")
    return tuple(details[speakers[digest]] for digest in digests)


def meet(step: str, *, ready: bool = True) -> Protocol[bool]:
    """Come together right before what only works if all ranks do it, such as a collective.

    A word that was given can't be taken back: a peer may have seen that all are ready just before
    this rank stopped waiting. So whoever waited in vain asks what was decided, and takes part if
    somebody has gone ahead.

    Args:
        step: name of the step, equal on all ranks.
        ready: False: this rank can't, so nobody shall.

    Returns:
        Whether all ranks do it now.

    Raises:
        DeadlineError: a rank did not come, and nobody goes ahead.
    """
    missed: Exception | None = None
    try:
        words = yield Share(step, _READY if ready else _NOT_READY)
        if _NOT_READY in words:
            return False
    except Exception as error:
        missed = error
    verdict = yield Decide(f"{step}/go", _STOP if missed else _GO)
    if verdict[0] == _GO:
        return True
    raise missed or DeadlineError(f"a rank gave up on step {step!r}")
