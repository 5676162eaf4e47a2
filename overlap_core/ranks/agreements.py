"""What ranks agreed on, remembered for as long as the job runs.

Who compiles a function again (a new shape, a new guard) may have peers that go on with their old
graphs. What they share with these must therefore keep the agreed order of communication, and can do
so alone, since the agreement says all that peers notice.
"""

from __future__ import annotations

import threading

from attrs import field, frozen

from .peer_skeleton import PeerSkeleton
from .votes import Mode  # noqa: TC001  cattrs reads the annotations

__all__ = ["Agreement", "AgreementBook", "GraphKey"]


def _ints(values: object) -> tuple[int, ...]:
    return tuple(values)  # type: ignore[arg-type]


def _rows_of_ints(values: object) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_ints, values))  # type: ignore[call-overload]


@frozen(kw_only=True, order=True)
class GraphKey:
    """Which graphs share an agreement."""

    code: str
    """The compiled function, and what it is compiled for: forward, backward or inference."""
    structure: str
    """Digest of what is the same on all ranks, see `PeerSkeleton.digest`."""
    groups: str
    """Digest of the ranks behind the skeleton's groups, which are each rank's own."""


@frozen(kw_only=True)
class Agreement:
    """What was decided for all graphs of one key."""

    mode: Mode
    why: str
    scope: tuple[int, ...] = field(default=(), converter=_ints)
    """The ranks that decided, ascending."""
    skeleton: PeerSkeleton = field(factory=PeerSkeleton)
    """What peers notice of this rank's graph, in captured order if that is known."""
    sequence: tuple[int, ...] = field(default=(), converter=_ints)
    """Ordinals of those entries in the committed order; empty: as in program order."""
    calls: tuple[tuple[int, ...], ...] = field(default=(), converter=_rows_of_ints)
    """Ordinals of the entries of each coalesced call, in order."""
    moved: bool = False
    """Whether this rank's communication is another one than in program order."""
    lasting: bool = True
    """False: decided because a rank was late or failed, so it holds for this run only."""


class AgreementBook:
    """Agreements by key. The first one of a key stands."""

    def __init__(self) -> None:
        self._found: dict[GraphKey, Agreement] = {}
        self._lock = threading.Lock()

    def get(self, key: GraphKey) -> Agreement | None:
        with self._lock:
            return self._found.get(key)

    def of(self, code: str | None) -> tuple[Agreement, ...]:
        """All that was agreed on for one function, or for any, the oldest first."""
        with self._lock:
            return tuple(one for key, one in self._found.items() if code in (None, key.code))

    def add(self, key: GraphKey, agreement: Agreement) -> Agreement:
        """Remember an agreement; returns the one that stands."""
        with self._lock:
            return self._found.setdefault(key, agreement)
