"""What each rank says of its graph before anybody votes, and whether it can be negotiated about."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import asdict, frozen

from .notices import name_ranks, off_in_words
from .scopes import one_sided

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ScopeFound", "ScopeSaid", "why_apart"]

_UNKNOWN = {"overlap_core": ""}
"""Runs something that does not say what it is."""


@frozen(kw_only=True)
class ScopeFound:
    """Who negotiates about one graph."""

    ranks: tuple[int, ...]
    """Ascending."""
    why: str
    """Why they cannot negotiate: one of them runs another version or goes on without overlap,
    communicates with another whose graph knows nothing of it, or has no weight gather where others
    have some. Empty: they can."""
    seen: tuple[str, ...]
    """Ops that a rank of the scope saw communicating without a declaration, sorted."""


@frozen(kw_only=True)
class ScopeSaid:
    """What one rank publishes of its graph before anybody votes.

    Of all that ranks exchange, this is what a rank of another version reads first. `software` is
    in the message of every version; what else is in it may only be read by an equal one.
    """

    groups: Sequence[Sequence[int]]
    seen: Sequence[str]
    gathers: int | None
    off: str = ""
    """Why this rank goes on without overlap. Empty: it does not."""
    software: Mapping[str, str]
    """Versions by name, of which ranks must run the same. An empty one is unknown."""

    def encode(self) -> str:
        """As JSON."""
        return json.dumps({**asdict(self), "groups": [_pack(ranks) for ranks in self.groups]})

    @classmethod
    def decode(cls, payload: bytes, software: Mapping[str, str]) -> ScopeSaid:
        """What a peer published; of one of another version only which one that is.

        Args:
            payload: what it wrote, in whatever version.
            software: what this rank runs.
        """
        with contextlib.suppress(Exception):  # another version may write anything
            data = json.loads(payload)
            theirs = {str(name): str(one) for name, one in data["software"].items()}
            if theirs == software:
                groups = [_unpack(ranks) for ranks in data["groups"]]
                return cls(**{**data, "groups": groups})
            return cls(groups=(), seen=(), gathers=None, software=theirs)
        return cls(groups=(), seen=(), gathers=None, software=_UNKNOWN)


def _pack(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks of a group; those of a mesh come in even steps, however many there are."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1:
        return {"first": ranks[0], "last": ranks[-1], "step": steps.pop()}
    return list(ranks)


def _unpack(ranks: list[int] | dict[str, int]) -> list[int]:
    if isinstance(ranks, dict):
        return list(range(ranks["first"], ranks["last"] + 1, ranks["step"]))
    return ranks


def why_apart(known: Mapping[int, ScopeSaid]) -> str:
    """Why the ranks of a scope cannot negotiate; empty if they can."""
    if versions := _other_versions(known):
        return versions
    off = {rank: said.off for rank, said in sorted(known.items()) if said.off}
    if off:
        return off_in_words(off)
    pair = one_sided({rank: said.groups for rank, said in known.items()})
    if pair is not None:
        return (
            f"rank {pair[0]} communicates with rank {pair[1]} in this graph, but rank "
            f"{pair[1]} does not communicate with rank {pair[0]}"
        )
    without = [rank for rank, said in sorted(known.items()) if said.gathers == 0]
    if without and len(without) < len(known):
        return f"different numbers of weight gathers: {name_ranks(without)}: 0"
    return ""


def _other_versions(known: Mapping[int, ScopeSaid]) -> str:
    """The first rank that runs something else than the lowest one, on each side."""
    ranks = sorted(known)
    first = ranks[0]
    for rank in ranks[1:]:
        mine, theirs = known[first].software, known[rank].software
        if mine == theirs:
            continue
        both = sorted(mine.keys() & theirs.keys())
        names = [name for name in both if mine[name] != theirs[name]] or [*_UNKNOWN]
        return f"rank {first} runs {_say(mine, names)}, rank {rank} {_say(theirs, names)}"
    return ""


def _say(software: Mapping[str, str], names: Sequence[str]) -> str:
    return " and ".join(f"{name} {software.get(name) or '(unknown version)'}" for name in names)
