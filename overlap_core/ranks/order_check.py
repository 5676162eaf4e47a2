"""Comparing the orders in which ranks issue collectives, over a key-value store.

A rank keeps one stream for each set of groups that it shares with a peer: what it issued on those
groups, in order. Two ranks that share groups must have equal streams, which covers the order on one
communicator and the order across communicators. A stream is hashed entry by entry, so ranks compare
digests at a count that both have reached, and read each other's last entries only where those
differ. Each rank looks at its neighbours alone (the next and the previous rank of each set of
groups): equality is transitive, so the traffic of a rank doesn't grow with the world.

Two keys a rank carry it, overwritten in place. Nothing here blocks inside the store.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attrs import define, frozen

from overlap_core._clock import REAL_CLOCK, Clock

from .issue_order import NOTHING_YET, Group, IssueOrder, Stream, Window, stream_for, window_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .store import KeyValueStore

__all__ = ["Divergence", "OrderComparison", "Stall"]

_AROUND = 3
_ENDED = "(ended)"


@frozen(kw_only=True)
class Divergence:
    """Two ranks issued different sequences on the groups that they share."""

    rank: int
    peer: int
    groups: tuple[str, ...]
    """The groups that both ranks are in and that this rank has used."""
    position: int
    """Of the first entry that differs, from 1, on these groups."""
    exact: bool
    """False if the first difference may lie before `position`, further back than ranks publish."""
    first: int
    """Position of the first entry in `mine` and `theirs`."""
    mine: tuple[str, ...]
    theirs: tuple[str, ...]

    def __str__(self) -> str:
        where = f"entry {self.position}" + ("" if self.exact else " or one before it")
        heads = (f"rank {self.rank}", f"rank {self.peer}")
        width = max(len(text) for text in (*self.mine, heads[0]))
        title = (
            f"ranks {self.rank} and {self.peer} issue collectives in different orders on "
            f"{_groups_text(self.groups)}: {where} differs first"
        )
        lines = [title, f"  {'entry':>8}  {heads[0]:<{width}}  {heads[1]}"]
        for number, pair in enumerate(zip(self.mine, self.theirs, strict=True), start=self.first):
            mark = ">" if number == self.position else " "
            lines.append(f"{mark} {number:>8}  {pair[0]:<{width}}  {pair[1]}")
        return "\n".join(lines)


@frozen(kw_only=True)
class Stall:
    """A rank issues nothing more while another waits for it; a hint, as it may only be slow."""

    rank: int
    peer: int
    groups: tuple[str, ...]
    issued: int
    expected: int
    """What `rank` itself has issued on these groups."""
    last: str
    """The last entry of `peer` on these groups."""
    last_anywhere: str
    """The last entry of `peer` on any of its groups."""
    waited_s: float
    answers: bool
    """Whether the process of `peer` still takes part in the check."""

    def __str__(self) -> str:
        elsewhere = self.last_anywhere != self.last
        return (
            f"rank {self.peer} has issued {self.issued} of {self.expected} on "
            f"{_groups_text(self.groups)}, and nothing in the last {self.waited_s:.1f} s, while "
            f"rank {self.rank} is ahead; last: {self.last}"
            + (f"; last on any group: {self.last_anywhere}" if elsewhere else "")
            + f"; its process {'answers' if self.answers else 'does not answer'}"
        )


def _groups_text(groups: Sequence[str]) -> str:
    return ("group " if len(groups) == 1 else "groups ") + ", ".join(groups)


@define
class _Peer:
    """What this rank knows of one neighbour."""

    agreed: int = 0
    count: int = 0
    beat: int = -1
    beat_at_s: float = 0.0
    behind_since_s: float | None = None
    my_count: int = -1
    done: bool = False
    diverged: bool = False
    stalled_at: int = -1


_EMPTY_WINDOW = Window(start=0, rows=(), last_anywhere=NOTHING_YET)


class OrderComparison:
    """One rank's side of the comparison; used from one thread.

    Args:
        store: shared by all ranks of the job.
        rank: this rank in the world.
        serial: number of this check, from 0; equal on all ranks.
        every: digests are published after each multiple of this many entries.
        deadline_s: seconds without progress of a peer after which it counts as stalled.
        clock: tells the time.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        *,
        serial: int,
        every: int,
        deadline_s: float,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._store = store
        self._rank = rank
        self._serial = serial
        self._deadline_s = deadline_s
        self._clock = clock
        self._order = IssueOrder(rank, every)
        self._peers: dict[int, _Peer] = {}
        self._seen_keys: set[str] = set()
        self._beat = 0
        self._published = -1
        self._done = False

    def add(self, group: Group, what: str) -> None:
        """Note that this rank issues `what` on `group`."""
        self._order.add(group, what)

    def close(self) -> None:
        """Nothing more will be issued."""
        self._done = True

    @property
    def settled(self) -> bool:
        """Whether this rank and its neighbours are done and all comparisons made."""
        peers = (self._peers.get(rank) for rank in self._order.neighbours())
        return self._done and all(peer and (peer.done or peer.diverged) for peer in peers)

    def poll(self) -> list[Divergence | Stall]:
        """Publish what was added, read what the neighbours published, return what is new.

        A divergence is returned once for each peer, a stall once for each count of a peer.

        Raises:
            OverlapError: there are too many groups.
        """
        self._publish()
        found = (
            self._look_at(peer, stream)
            for peer, stream in self._order.neighbours().items()
            if not self._peers.setdefault(peer, _Peer()).diverged
        )
        return [finding for finding in found if finding is not None]

    def _publish(self) -> None:
        self._beat += 1
        if self._order.total != self._published:
            # Before the head: who sees a count in the head finds its entries.
            recent = self._order.recent(serial=self._serial)
            self._store.set(self._key(self._rank, "recent"), recent)
            self._published = self._order.total
        head = self._order.head(serial=self._serial, beat=self._beat, done=self._done)
        self._store.set(self._key(self._rank, "head"), head)

    def _key(self, rank: int, part: str) -> str:
        # Two checks may overlap: a rank that is through with one starts the next one.
        return f"overlap_core/order_check/{rank}/{self._serial % 2}/{part}"

    def _read(self, rank: int, part: str) -> dict[str, Any] | None:
        """What a peer published for this check; None if nothing."""
        key = self._key(rank, part)
        if key not in self._seen_keys:
            if not self._store.check([key]):
                return None
            self._seen_keys.add(key)
        data: dict[str, Any] = json.loads(self._store.get(key))
        return data if data["serial"] == self._serial else None

    def _window(self, rank: int) -> Window:
        data = self._read(rank, "recent")
        return _EMPTY_WINDOW if data is None else window_for(self._rank, data)

    def _look_at(self, rank: int, mine: Stream) -> Divergence | Stall | None:
        peer = self._peers[rank]
        head = self._read(rank, "head")
        stream = None if head is None else stream_for(self._rank, head)
        marks = [(0, ""), *(stream["marks"] if stream else ())]
        done = head is not None and bool(head["done"])
        if head is not None and head["beat"] != peer.beat:
            peer.beat, peer.beat_at_s = head["beat"], self._clock.now()
        if self._differs(peer, rank, mine, marks, done):
            peer.diverged = True
            return self._divergence(rank, mine, peer.agreed, done)
        count = marks[-1][0]
        peer.done = done and peer.agreed == count == mine.count
        return self._stall(peer, rank, mine, count)

    def _differs(
        self, peer: _Peer, rank: int, mine: Stream, marks: list[tuple[int, str]], done: bool
    ) -> bool:
        """Whether the sequences differ, or one of them has ended early; notes what agrees."""
        idle = self._done or peer.my_count == mine.count
        peer.my_count = mine.count
        comparable = [(count, mine.digest(count), digest) for count, digest in marks]
        for count, own, theirs in reversed(comparable):
            if own is not None and own != theirs:
                return True
            if own is not None:
                peer.agreed = max(peer.agreed, count)
                break
        count = marks[-1][0]
        if count <= mine.count:
            return done and count < mine.count
        if not idle:
            return False
        # The peer is ahead, and none of its digests is for our count: look at its entries.
        window = self._window(rank)
        ended = self._done and window.start <= mine.count < window.end
        return ended or _first_difference(mine, window, peer.agreed) is not None

    def _divergence(self, rank: int, mine: Stream, agreed: int, done: bool) -> Divergence:
        window = self._window(rank)
        position = _first_difference(mine, window, agreed)
        exact = window.start <= agreed
        if position is None:
            position = min(mine.count, window.end if exact else window.start) + 1
        first = max(1, position - _AROUND)
        shown = range(first, position + _AROUND + 1)
        return Divergence(
            rank=self._rank,
            peer=rank,
            groups=tuple(sorted(mine.groups)),
            position=position,
            exact=exact,
            first=first,
            mine=tuple(_shown(mine.row(n), n, mine.count, self._done) for n in shown),
            theirs=tuple(_shown(window.row(n), n, window.end, done) for n in shown),
        )

    def _stall(self, peer: _Peer, rank: int, mine: Stream, count: int) -> Stall | None:
        now = self._clock.now()
        if count >= mine.count:
            peer.behind_since_s = None
        elif peer.behind_since_s is None or count != peer.count:
            peer.behind_since_s = now
        peer.count = count
        if peer.behind_since_s is None or peer.stalled_at == count:
            return None
        waited_s = now - peer.behind_since_s
        if waited_s < self._deadline_s:
            return None
        peer.stalled_at = count
        window = self._window(rank)
        return Stall(
            rank=self._rank,
            peer=rank,
            groups=tuple(sorted(mine.groups)),
            issued=count,
            expected=mine.count,
            last=window.rows[-1] if window.rows else NOTHING_YET,
            last_anywhere=window.last_anywhere,
            waited_s=waited_s,
            answers=peer.beat >= 0 and now - peer.beat_at_s < self._deadline_s / 2,
        )


def _first_difference(mine: Stream, window: Window, agreed: int) -> int | None:
    """Position of the first entry after `agreed` that both know and that differs."""
    for position in range(max(agreed, window.start) + 1, min(mine.count, window.end) + 1):
        own = mine.row(position)
        if own is not None and own != window.row(position):
            return position
    return None


def _shown(row: str | None, position: int, count: int, done: bool) -> str:
    if row is not None:
        return row
    if position <= count:
        return "(forgotten)"
    return _ENDED if done else NOTHING_YET
