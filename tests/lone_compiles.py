"""What the pass decides when a rank of a model compiles, asked of the pass itself.

Only the store is another one: nothing waits in it. Who comes to a meeting, who is late and who
gives up midway is said beforehand.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, TypeVar

import pytest
from attrs import define, field, frozen

from overlap_core.errors import DeadlineError, DivergenceError
from overlap_core.inductor import overlap_pass
from overlap_core.inductor.job import Job
from overlap_core.inductor.overlap_pass import OverlapPass, _Sight
from overlap_core.pipeline import negotiate
from overlap_core.ranks import Agreement, Decide, GraphKey, Share, StoreExchange
from overlap_core.simulation import reach
from overlap_core.testing import assert_legal

from .blocking import Issue, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from overlap_core.inductor.job import Meeting
    from overlap_core.outcome import RankOutcome
    from overlap_core.ranks.negotiation import Protocol
    from overlap_core.ranks.store import ScopeFound
    from overlap_core.views import RankView

    from .lone_worlds import Program, World

__all__ = ["Book", "Came", "Code", "Compiled", "Compiles", "Ending", "Gathering"]

T = TypeVar("T")
Book = tuple[tuple[GraphKey, Agreement], ...]
Code = tuple[Issue, ...]
"""What compiled code issues, in order."""
Met = tuple[tuple[str, int], ...]

_FUNCTION = "model.py:1:model/forward/main"


@frozen(kw_only=True, cache_hash=True)
class Came:
    """A rank at a meeting, with what it says of its graph."""

    meeting: str
    rank: int
    structure: str
    groups: tuple[tuple[int, ...], ...]
    gathers: int | None


@frozen(kw_only=True)
class Ending:
    """How a meeting ends for the ranks of a scope that all came; by default: in time."""

    late: frozenset[int] = frozenset()
    """Ranks that stopped waiting before the last one came."""
    quitter: int | None = None
    """A rank that stops waiting for answers midway."""
    step: int = 0
    """At which exchange."""
    decides_first: bool = True
    """Whether it asks what was decided before its peers do, or after."""


@frozen(kw_only=True, cache_hash=True)
class Gathering:
    """All that came to one meeting, and how it ends."""

    came: tuple[Came, ...]
    gone: tuple[Came, ...] = ()
    """Ranks that came in an earlier step and left."""
    endings: tuple[tuple[tuple[int, ...], Ending], ...] = ()
    """By scope; in time for those that are not here."""

    def of(self, rank: int) -> Came:
        return next(came for came in self.came if came.rank == rank)

    def ending(self, scope: tuple[int, ...]) -> Ending:
        return dict(self.endings).get(scope, Ending())

    def late(self) -> frozenset[int]:
        return frozenset(rank for _, ending in self.endings for rank in ending.late)


@frozen(kw_only=True)
class Compiled:
    """What came of one compile."""

    book: Book
    met: Met
    code: Code | None = None
    """None: there is an error, or the rank waits in a meeting."""
    error: str = ""
    came: Came | None = None
    """The meeting that it comes to; None: it asks nobody."""
    faults: tuple[str, ...] = ()


class _WantsPeersError(BaseException):
    """The rank has come to a meeting, and waits."""

    def __init__(self, came: Came) -> None:
        self.came = came


@define(eq=False)
class Compiles:
    """All compiles of a world, each asked for once."""

    world: World
    _compiled: dict[tuple[object, ...], Compiled] = field(factory=dict)
    _negotiated: dict[tuple[object, ...], tuple[dict[int, RankOutcome], int]] = field(factory=dict)

    def compile(
        self, rank: int, structure: str, book: Book, met: Met, gathering: Gathering | None = None
    ) -> Compiled:
        """What a rank decides for a structure.

        Args:
            rank, structure: what is compiled where.
            book, met: what the rank remembers.
            gathering: the meeting that it comes to; None: it says that it waits there.
        """
        key = (rank, structure, book, met, gathering)
        if key not in self._compiled:
            self._compiled[key] = self._ask(rank, structure, book, met, gathering)
        return self._compiled[key]

    def scope_of(self, gathering: Gathering, rank: int) -> ScopeFound | None:
        """The ranks that one that came finds at a meeting; None: somebody is missing."""
        came = gathering.of(rank)
        try:
            return _Exchange(came.meeting, rank, gathering).find_scope(
                came.groups, (), came.gathers
            )
        except DeadlineError:
            return None

    def steps(self, gathering: Gathering, scope: tuple[int, ...]) -> int:
        """How many exchanges the negotiation of a scope has, if all are in time."""
        return self._negotiate(gathering, scope)[1]

    def _ask(
        self, rank: int, structure: str, book: Book, met: Met, gathering: Gathering | None
    ) -> Compiled:
        program = self.world.programs[structure, rank]
        view = program.view
        job = Job(_Store(), rank, self.world.ranks)
        job._met.update(met)
        found = job.agreements(view.config, view.host).book
        for key, agreement in book:
            found.add(key, agreement)

        def outcome_of(scope: tuple[int, ...]) -> RankOutcome:
            assert gathering is not None
            return self._negotiate(gathering, scope)[0][rank]

        def exchange(meeting: Meeting) -> _Exchange:
            return _Exchange(meeting.name, rank, gathering, structure, outcome_of)

        code: Code | None = None
        faults: list[str] = []
        error, came = "", None
        try:
            code, faults = _code_of(program, _decide(view, job, exchange))
        except _WantsPeersError as wants:
            came = wants.came
        except DivergenceError as divergence:
            error = str(divergence)
        except Exception as failure:  # as the pass does: program order
            code, faults = tuple(program.issues.values()), [f"the pass failed: {failure!r}"]
        if gathering is not None:
            came = gathering.of(rank)
        return Compiled(
            book=tuple(found._found.items()),
            met=tuple(sorted(job._met.items())),
            code=code,
            error=error,
            came=came,
            faults=tuple(faults),
        )

    def _negotiate(
        self, gathering: Gathering, scope: tuple[int, ...]
    ) -> tuple[dict[int, RankOutcome], int]:
        ending = gathering.ending(scope)
        views = {
            came.rank: self.world.programs[came.structure, came.rank].view
            for came in gathering.came
            if came.rank in scope and came.rank not in ending.late
        }
        structures = tuple((c.rank, c.structure) for c in gathering.came if c.rank in views)
        key = (structures, scope, ending)
        if key not in self._negotiated:
            sides = {rank: negotiate(view, scope) for rank, view in views.items()}
            self._negotiated[key] = _drive(sides, ending, silent=len(sides) < len(scope))
        return self._negotiated[key]


class _Pass(OverlapPass):
    """The pass with another way to reach peers."""

    def __init__(self, view: RankView, exchange: Callable[[Meeting], _Exchange]) -> None:
        super().__init__(view.config, view.host)
        self._meet = exchange

    def _exchange(self, job: Job, meeting: Meeting, deadline_s: float) -> StoreExchange:
        return self._meet(meeting)


def _decide(
    view: RankView, job: Job, exchange: Callable[[Meeting], _Exchange]
) -> RankOutcome | None:
    sight = _Sight(adapted=None, view=view, groups=reach(view))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_pass, "current_job", lambda: job)
        patch.setattr(overlap_pass, "identify", lambda graph: _FUNCTION)
        return _Pass(view, exchange)._decide([], sight)[1]


def _code_of(program: Program, outcome: RankOutcome | None) -> tuple[Code, list[str]]:
    """What the compiled code issues, and what is wrong with it by itself."""
    issues = program.issues
    faults: list[str] = []
    if outcome is None or not outcome.committed:
        return tuple(issues.values()), faults
    nodes = program.view.graph.nodes
    try:
        assert_legal(program.view.graph, outcome.order)
    except AssertionError as error:
        faults.append(f"illegal: {error}")
    calls = {nodes[p].name: call.launches for call in outcome.coalesced for p in call.launches}
    names = [name for name in outcome.order if name in issues]
    code = []
    while names:
        members = [nodes[position].name for position in calls.get(names[0], ())] or names[:1]
        if names[: len(members)] != members:
            faults.append(f"torn: {members} are one call, but come in {outcome.order}")
            members = names[:1]
        code.append(join([issues[name] for name in members]))
        del names[: len(members)]
    return tuple(code), faults


def _drive(
    sides: Mapping[int, Protocol[T]], ending: Ending, *, silent: bool
) -> tuple[dict[int, T], int]:
    """Results of a negotiation by rank, and how many exchanges it had.

    Args:
        sides: by rank, of those that take part.
        ending: who gives up when.
        silent: a rank of the scope says nothing, so nobody gets answers.
    """
    asked = {rank: next(side) for rank, side in sides.items()}
    results: dict[int, T] = {}
    verdict: bytes | None = None
    for step in count():
        sharing = {rank: ask for rank, ask in asked.items() if isinstance(ask, Share)}
        deciding = [rank for rank in asked if rank not in sharing]
        if ending.quitter in deciding and not ending.decides_first and len(asked) > 1:
            deciding.remove(ending.quitter)
        for rank in deciding:
            verdict = asked[rank].payload if verdict is None else verdict
            _send(sides, asked, results, rank, (verdict,))
        if not asked:
            return results, step
        answers = tuple(ask.payload for ask in sharing.values())
        complete = not silent and len(sharing) == len(sides)
        for rank in sharing:
            quits = rank == ending.quitter and step == ending.step
            _send(sides, asked, results, rank, answers if complete and not quits else None)
    raise AssertionError("a negotiation has an end")


def _send(
    sides: Mapping[int, Protocol[T]],
    asked: dict[int, Share | Decide],
    results: dict[int, T],
    rank: int,
    answer: tuple[bytes, ...] | None,
) -> None:
    """Go on with one side; None: it waited in vain."""
    try:
        if answer is None:
            asked[rank] = sides[rank].throw(DeadlineError("a rank did not answer in time"))
        else:
            asked[rank] = sides[rank].send(answer)
    except StopIteration as stop:
        results[rank] = stop.value
        del asked[rank]


class _Store:
    """A key-value store in memory."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._values[key] = value

    def get(self, key: str, /) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values[key].encode()


class _Exchange(StoreExchange):
    """A rank at a meeting: what others say is there already, or never will be."""

    def __init__(
        self,
        meeting: str,
        rank: int,
        gathering: Gathering | None,
        structure: str = "",
        outcome_of: Callable[[tuple[int, ...]], RankOutcome] | None = None,
    ) -> None:
        super().__init__(_Store(), rank, meeting, deadline_s=300)
        self._meeting = meeting
        self._gathering = gathering
        self._structure = structure
        self._outcome_of = outcome_of

    def find_scope(
        self,
        groups: Iterable[Sequence[int]],
        seen: Iterable[str] = (),
        gathers: int | None = None,
    ) -> ScopeFound:
        if self._gathering is None:
            came = Came(
                meeting=self._meeting,
                rank=self._rank,
                structure=self._structure,
                groups=tuple(map(tuple, groups)),
                gathers=gathers,
            )
            raise _WantsPeersError(came)
        if self._rank in self._gathering.late():
            raise DeadlineError("a rank came too late")
        for other in (*self._gathering.came, *self._gathering.gone):
            StoreExchange(self._store, other.rank, self._meeting, 1).publish_scope(
                other.groups, (), other.gathers
            )
        return super().find_scope(groups, seen, gathers)

    def run(self, protocol: Protocol[T], scope: tuple[int, ...]) -> T:
        protocol.close()
        assert self._outcome_of is not None
        return self._outcome_of(scope)  # type: ignore[return-value]

    def _wait(self, step: str, ranks: Sequence[int], done: Callable[[], bool]) -> None:
        if not done():
            raise DeadlineError(f"not all of {list(ranks)} came")
