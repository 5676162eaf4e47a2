"""What one rank has issued, in order, in a form that its peers can compare.

A rank keeps one stream for each set of groups that it shares with a peer: what it issued on those
groups, in order. A stream is hashed entry by entry. What is published says how far each stream has
come, with digests, and which entries were the last.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from overlap_core.errors import OverlapError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NOTHING_YET", "Group", "IssueOrder", "Stream", "Window", "stream_for", "window_for"]

NOTHING_YET = "(nothing yet)"

_MOST_BYTES = 8000
_MOST_MARKS = 16
_RECENT = 512
_HISTORY = 1 << 15


def _ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks in short, such as ``"0-3,8-14:2,20"`` (from-to:step)."""
    pieces, left = [], list(ranks)
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        run = 1
        while run < len(left) and left[run] - left[run - 1] == step:
            run += 1
        if run < 3:
            run = 1
            pieces.append(f"{left[0]}")
        else:
            pieces.append(f"{left[0]}-{left[run - 1]}" + (f":{step}" if step > 1 else ""))
        del left[:run]
    return ",".join(pieces)


def _has_rank(group_name: str, rank: int) -> bool:
    for piece in group_name[1 : group_name.index("]")].split(","):
        span, _, step = piece.partition(":")
        first, _, last = span.partition("-")
        if rank in range(int(first), int(last or first) + 1, int(step or 1)):
            return True
    return False


@frozen
class Group:
    """A communicator, named alike on all of its ranks.

    Attributes:
        ranks: ranks in the world, ascending.
        ordinal: tells groups of the same ranks apart, in the order in which they were created.
        name: for messages, such as ``"[0-7:2]"``, or ``"[0,1]#1"`` for the second of its ranks.
    """

    ranks: tuple[int, ...]
    ordinal: int = 0
    name: str = field(init=False)

    @name.default
    def _make_name(self) -> str:
        return f"[{_ranks_text(self.ranks)}]" + (f"#{self.ordinal}" if self.ordinal else "")


class Stream:
    """What one rank issued on some groups. Digests are of all entries up to a count."""

    def __init__(self, groups: tuple[str, ...] = ()) -> None:
        self.groups = groups
        self.count = 0
        self._digest = ""
        self._rows: list[tuple[str, str]] = []

    def fork(self, group: str) -> Stream:
        """The same past, with another group from now on."""
        other = Stream((*self.groups, group))
        other.count, other._digest, other._rows = self.count, self._digest, list(self._rows)
        return other

    def append(self, row: str) -> None:
        data = f"{self._digest}\n{row}".encode()
        self._digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        self._rows.append((row, self._digest))
        self.count += 1
        if len(self._rows) > 2 * _HISTORY:
            del self._rows[:_HISTORY]

    def digest(self, count: int) -> str | None:
        """After `count` entries; None if that is too long ago or has not happened."""
        return self._at(count)[1] if count else ""

    def row(self, position: int) -> str | None:
        return self._at(position)[0]

    def _at(self, position: int) -> tuple[str, str] | tuple[None, None]:
        index = position - 1 - (self.count - len(self._rows))
        return self._rows[index] if 0 <= index < len(self._rows) else (None, None)


class IssueOrder:
    """The streams of one rank, and what it publishes of them.

    Ranks of the world fall into classes with the same groups in common with this rank. A class has
    one stream; a group that is used for the first time splits the classes that it cuts.
    """

    def __init__(self, rank: int, every: int) -> None:
        self._rank = rank
        self._every = every
        self._groups: dict[str, int] = {}
        self._classes: list[tuple[frozenset[int], Stream]] = []
        self._recent: deque[tuple[str, int]] = deque(maxlen=_RECENT)
        self.total = 0

    def add(self, group: Group, what: str) -> None:
        """Append an entry.

        Args:
            group: with this rank in it.
            what: the operation as all ranks of the group call it.
        """
        if group.name not in self._groups:
            self._split(group)
        self.total += 1
        self._recent.append((what, self._groups[group.name]))
        for _, stream in self._classes:
            if group.name in stream.groups:
                stream.append(f"{what} on {group.name}")

    def neighbours(self) -> dict[int, Stream]:
        """The peers to compare with, each with the stream that it shares with this rank."""
        found = {}
        for members, stream in self._classes:
            ring = sorted({*members, self._rank})
            here = ring.index(self._rank)
            for peer in (ring[here - 1], ring[(here + 1) % len(ring)]):
                found[peer] = stream
        return dict(sorted(found.items()))

    def head(self, **extra: Any) -> str:
        """Counts and digests of all streams as JSON, below 8 KiB.

        Raises:
            OverlapError: there are too many groups.
        """
        most = _MOST_MARKS
        while True:
            streams = [self._marks(most, stream) for stream in self._streams]
            text = self._encode({**extra, "streams": streams})
            if len(text) <= _MOST_BYTES:
                return text
            if not most:
                raise OverlapError(
                    f"rank {self._rank} uses {len(self._groups)} process groups, more than the "
                    f"check of the collective order can publish; use it on fewer"
                )
            most //= 2

    def recent(self, **extra: Any) -> str:
        """The last entries of this rank as JSON, as many as fit into 8 KiB."""
        rows = list(self._recent)
        counts = [{"groups": self._numbers(s), "count": s.count} for s in self._streams]
        while True:
            texts = {row: number for number, row in enumerate(dict.fromkeys(rows))}
            data = {"streams": counts, "texts": list(texts), "rows": [texts[row] for row in rows]}
            text = self._encode({**extra, **data})
            if len(text) <= _MOST_BYTES or not rows:
                return text
            rows = rows[(len(rows) + 1) // 2 :]

    def _split(self, group: Group) -> None:
        self._groups[group.name] = len(self._groups)
        inside = frozenset(group.ranks) - {self._rank}
        classes = []
        for members, stream in self._classes:
            if members & inside:
                classes.append((members & inside, stream.fork(group.name)))
            if members - inside:
                classes.append((members - inside, stream))
        known = frozenset().union(*(members for members, _ in self._classes))
        if inside - known:
            classes.append((inside - known, Stream((group.name,))))
        self._classes = classes

    @property
    def _streams(self) -> list[Stream]:
        return [stream for _, stream in self._classes]

    def _numbers(self, stream: Stream) -> list[int]:
        return [self._groups[name] for name in stream.groups]

    def _marks(self, most: int, stream: Stream) -> dict[str, Any]:
        last = stream.count // self._every
        counts = [self._every * number for number in range(max(1, last - most + 1), last + 1)]
        marks = [(count, stream.digest(count)) for count in (*counts, stream.count)]
        known = [mark for mark in marks if mark[1] is not None]
        return {"groups": self._numbers(stream), "marks": known}

    def _encode(self, data: dict[str, Any]) -> str:
        return json.dumps({**data, "groups": list(self._groups)}, separators=(",", ":"))


@frozen(kw_only=True)
class Window:
    """The last entries of a peer on the groups that it shares with a reader."""

    start: int
    """Number of entries before."""
    rows: tuple[str, ...]
    last_anywhere: str

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def row(self, position: int) -> str | None:
        index = position - 1 - self.start
        return self.rows[index] if 0 <= index < len(self.rows) else None


def stream_for(reader: int, data: dict[str, Any]) -> dict[str, Any] | None:
    """The published stream of the groups that have the reader in them."""
    shared = {number for number, name in enumerate(data["groups"]) if _has_rank(name, reader)}
    found = (stream for stream in data["streams"] if set(stream["groups"]) == shared)
    return next(found, None) if shared else None


def window_for(reader: int, data: dict[str, Any]) -> Window:
    names = data["groups"]
    texts = [f"{what} on {names[group]}" for what, group in data["texts"]]
    shared = [_has_rank(names[group], reader) for _, group in data["texts"]]
    rows = tuple(texts[number] for number in data["rows"] if shared[number])
    stream = stream_for(reader, data)
    count = stream["count"] if stream else 0
    last = texts[data["rows"][-1]] if data["rows"] else NOTHING_YET
    return Window(start=count - len(rows), rows=rows, last_anywhere=last)
