"""What ranks send each other, as JSON. Never pickles: a message is data, not code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from attrs import asdict, frozen

from .votes import Vote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Commitment", "Proposal", "decode_votes", "encode_vote"]


def _pack(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def encode_vote(vote: Vote) -> bytes:
    """A vote without its rank, so that equal votes give equal bytes."""
    data = asdict(vote)
    del data["rank"]
    return _pack(data)


def decode_votes(payloads: Sequence[bytes], scope: Sequence[int]) -> tuple[Vote, ...]:
    """The votes of a scope, in its order."""
    votes = []
    for rank, payload in zip(scope, payloads, strict=True):
        data = json.loads(payload)
        data["plugin_names"] = tuple(data["plugin_names"])
        votes.append(Vote(rank=rank, **data))
    return tuple(votes)


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

    def encode(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def decode(cls, payload: bytes) -> Commitment:
        return cls(**json.loads(payload))
