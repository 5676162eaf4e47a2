"""What ranks send each other, as JSON. Never pickles: a message is data, not code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import asdict, frozen

from .votes import Vote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Commitment", "Proposal", "decode_each", "decode_votes", "encode_vote"]

T = TypeVar("T")


def _pack(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def encode_vote(vote: Vote) -> bytes:
    """A vote without its rank, so that equal votes give equal bytes."""
    data = asdict(vote)
    del data["rank"]
    return _pack(data)


def decode_votes(payloads: Sequence[bytes], scope: Sequence[int]) -> tuple[Vote, ...]:
    """The votes of a scope, in its order."""

    def decode(payload: bytes) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(payload)
        return {**data, "plugin_names": tuple(data["plugin_names"])}

    rows = decode_each(payloads, decode)
    return tuple(Vote(rank=rank, **data) for rank, data in zip(scope, rows, strict=True))


def decode_each(payloads: Sequence[bytes], decode: Callable[[bytes], T]) -> list[T]:
    """Decode each distinct payload once; ranks that said the same share the result."""
    found: dict[bytes, T] = {}
    for payload in payloads:
        if payload not in found:
            found[payload] = decode(payload)
    return [found[payload] for payload in payloads]


@frozen(kw_only=True)
class Proposal:
    """Where one rank would launch each gather, in slots or boundaries."""

    mode: str
    can: bool
    why: str = ""
    units: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def decode(cls, payload: bytes) -> Proposal:
        data = json.loads(payload)
        data["units"] = tuple(data["units"])
        return cls(**data)


@frozen(kw_only=True)
class Commitment:
    """One rank's last word: its rebuilt order is legal, and what it would commit."""

    ok: bool
    why: str = ""
    slower: bool = False
    """Not ok only because the order is predicted to expose more than program order."""
    plan: str = ""
    """Digest of the mode, the agreed units and the sequence of communication."""
    order: str = ""
    """Digest of the whole order by position, where graphs are equal."""

    def encode(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def decode(cls, payload: bytes) -> Commitment:
        return cls(**json.loads(payload))
