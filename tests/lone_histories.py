"""What can become of ranks that compile one function, together and alone, searched in a model.

In each step the inputs say which structure each rank runs. It runs what it compiled before, or
loads code from the cache, or compiles, and then follows or meets its peers, of whom some may be
late or give up midway. Then all run what they have, and none goes on before its peers come. Between
steps the job may start anew.

When a rank begins to run, while others compile still, makes no difference: what blocks ends alike
in any order, and who runs comes to no meeting. So in a step all compile first, and then all run.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import combinations, product
from typing import TYPE_CHECKING, Protocol, TypeVar

from attrs import Factory, define, evolve, field, frozen

from overlap_core.ranks.plan_file import PlanFile

from .blocking import Chain, can_end, orders, reordered, run_blocking
from .lone_compiles import Came, Compiles, Ending, Gathering

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from .blocking import Free
    from .lone_compiles import Book, Code, Compiled, Met
    from .lone_worlds import World

__all__ = ["Model", "Tally", "explore", "play"]

T = TypeVar("T")
Named = tuple[tuple[str, "Code"], ...]
"""Compiled code by structure."""

_MOST_STATES = 10_000
_USUAL = 0.4
"""How often a random history takes what comes first, beside the times when chance says so."""


class Pick(Protocol):
    """Decides what is open."""

    def __call__(self, options: Sequence[T], /) -> T: ...


@frozen(kw_only=True, cache_hash=True)
class Rank:
    """What one rank holds."""

    book: Book = ()
    met: Met = ()
    memory: Named = ()
    cache: Named = ()
    """Found again under the plan that it was compiled under."""
    has_file: bool = True
    """Its plan file is there; without one it keeps away from the cache."""

    def code(self, structure: str) -> list[Code]:
        """All that it may run for a structure without compiling; what is in memory comes first."""
        caches = (self.memory, self.cache) if self.has_file else (self.memory,)
        return list(dict.fromkeys(c for named in caches for s, c in named if s == structure))


@frozen(kw_only=True, cache_hash=True)
class State:
    """What there is between two steps."""

    ranks: tuple[Rank, ...]
    left: frozenset[Came] = frozenset()
    """What ranks that left a meeting said there, as far as somebody may come to it still."""


@frozen(kw_only=True)
class Step:
    """What came of one step."""

    story: str
    after: State | None = None
    """None: an error ended the job."""
    events: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@define
class Tally:
    """What a search has seen."""

    events: Counter[str] = Factory(Counter)
    faults: list[str] = Factory(list)
    """What must not be, with the steps that led there."""

    def add(self, step: Step, before: tuple[str, ...]) -> None:
        self.events.update(step.events)
        self.faults += ["\n  ".join((fault, *before, step.story)) for fault in step.faults]


@define(eq=False)
class Model:
    """A world with all that was asked about it so far."""

    world: World
    compiles: Compiles = field(init=False)
    _judged: dict[tuple[object, ...], bool] = field(factory=dict)
    _run: dict[tuple[Code, ...], str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.compiles = Compiles(self.world)

    @property
    def start(self) -> State:
        """Nothing was compiled yet."""
        return State(ranks=(Rank(),) * self.world.ranks)

    def advance(self, state: State, pick: Pick) -> Step:
        """One step; `pick` decides what is open."""
        kinds = ["run", "restart"] if state != self.start else ["run"]
        if pick(kinds) == "restart":
            return _restart(state)
        names = pick(self.world.valid)
        ways = [pick(_ways(rank, name)) for rank, name in zip(state.ranks, names, strict=True)]
        who = [rank for rank, way in enumerate(ways) if way == "compile"]
        found = {rank: self._compile(state, rank, names[rank]) for rank in who}
        gatherings = self._gather(state, [found[rank].came for rank in who], pick)
        for gathering in gatherings:
            for came in gathering.came:
                found[came.rank] = self._compile(state, came.rank, names[came.rank], gathering)
        codes: list[Code | None] = [
            found[rank].code if rank in found else dict(_named(state.ranks[rank], way))[name]
            for rank, (name, way) in enumerate(zip(names, ways, strict=True))
        ]
        after = self._after(state, names, found, codes, gatherings)
        story = _tell(names, ways, found, gatherings)
        return self._judge(story, after, names, ways, found, gatherings, codes)

    def _compile(
        self, state: State, rank: int, name: str, gathering: Gathering | None = None
    ) -> Compiled:
        known = state.ranks[rank]
        return self.compiles.compile(rank, name, known.book, known.met, gathering)

    def _gather(
        self,
        state: State,
        came: Sequence[Came | None],
        pick: Pick,
    ) -> list[Gathering]:
        """The meetings of a step, and how they end."""
        found = []
        for meeting in dict.fromkeys(one.meeting for one in came if one is not None):
            here = tuple(one for one in came if one is not None and one.meeting == meeting)
            ranks = {one.rank for one in here}
            gone = [one for one in state.left if one.meeting == meeting and one.rank not in ranks]
            gone.sort(key=lambda one: one.rank)
            gathering = Gathering(came=here, gone=tuple(gone))
            scopes = [self.compiles.scope_of(gathering, one.rank) for one in here]
            endings = {}
            for scope in dict.fromkeys(s.ranks for s in scopes if s is not None and not s.why):
                if ranks.issuperset(scope) and len(scope) > 1:
                    endings[scope] = pick(_endings(scope, self.compiles.steps(gathering, scope)))
            found.append(evolve(gathering, endings=tuple(endings.items())))
        return found

    def _after(
        self,
        state: State,
        names: Sequence[str],
        found: dict[int, Compiled],
        codes: Sequence[Code | None],
        gatherings: Sequence[Gathering],
    ) -> State:
        ranks = []
        for rank, (known, name, code) in enumerate(zip(state.ranks, names, codes, strict=True)):
            had_file = known.has_file
            if rank in found:
                one = found[rank]
                new = [agreed for key, agreed in one.book if (key, agreed) not in known.book]
                kept = had_file and all(agreed.lasting for agreed in new)
                known = evolve(known, book=one.book, met=one.met, has_file=kept)
            if code is not None:
                known = evolve(known, memory=_with(known.memory, name, code))
                if had_file and rank in found:
                    known = evolve(known, cache=_with(known.cache, name, code))
            ranks.append(known)
        left = {*state.left, *(came for gathering in gatherings for came in gathering.came)}
        return State(
            ranks=tuple(ranks), left=frozenset(one for one in left if _may_be_met(one, ranks))
        )

    def _judge(
        self,
        story: str,
        after: State,
        names: Sequence[str],
        ways: Sequence[str],
        found: dict[int, Compiled],
        gatherings: Sequence[Gathering],
        codes: Sequence[Code | None],
    ) -> Step:
        """What happens when all run, and whether errors had to be."""
        late = {rank for gathering in gatherings for rank in gathering.late()}
        errors = [rank for rank, one in found.items() if one.error]
        events = [*ways, *(_event(one) for one in found.values())]
        faults = [fault for one in found.values() for fault in one.faults]
        for rank in errors:
            if rank in late:
                events.append("error: a peer was late")
            elif self._has_no_order(after, rank, names[rank]):
                events.append("error: no order fits")
            else:
                faults.append(f"unjustified: rank {rank}: {found[rank].error}")
        issued = tuple(code or () for code in codes)
        if issued not in self._run:
            self._run[issued] = run_blocking(issued)
        problem = self._run[issued]
        if problem and (not errors or problem.startswith("diverges")):
            faults.append(problem)
        for rank, (name, code) in enumerate(zip(names, codes, strict=True)):
            if code is not None:
                moved = code != self.world.programs[name, rank].free.issues
                events.append("run moved" if moved else "run in program order")
        return Step(
            story=story,
            after=None if errors else after,
            events=tuple(events),
            faults=tuple(faults),
        )

    def _has_no_order(self, state: State, rank: int, name: str) -> bool:
        """Whether each order of a rank's graph fails beside something that peers may run."""
        free = self.world.programs[name, rank].free.unnamed()
        beside = [names for names in self.world.alike if names[rank] == name]
        peers = tuple(
            tuple(tuple(state.ranks[peer].code(other)) for peer, other in enumerate(names))
            for names in beside
        )
        key = (rank, name, peers)
        if key not in self._judged:
            self._judged[key] = not any(
                all(
                    self._ends(names, codes, rank, reordered(free, order))
                    for names, codes in zip(beside, peers, strict=True)
                )
                for order in orders(free.needs)
            )
        return self._judged[key]

    def _ends(
        self, names: Sequence[str], codes: Sequence[Sequence[Code]], rank: int, mine: Chain
    ) -> bool:
        """Whether ranks come to their end whichever code peers run; who has none may take any."""
        sides: list[list[Chain | Free]] = []
        for peer, (name, known) in enumerate(zip(names, codes, strict=True)):
            if peer == rank:
                sides.append([mine])
            else:
                free = self.world.programs[name, peer].free.unnamed()
                sides.append([Chain(_unnamed(code)) for code in known] or [free])
        return all(can_end(chosen) for chosen in product(*sides))


class _Picker:
    """Picks in every way there is, one way after the other."""

    def __init__(self) -> None:
        self._wanted: list[int] | None = None
        self._taken: list[tuple[int, int]] = []

    def has_more(self) -> bool:
        """Begin another way, if there is one."""
        if self._wanted is None:
            self._wanted = []
            return True
        while self._taken and self._taken[-1][0] + 1 == self._taken[-1][1]:
            self._taken.pop()
        self._wanted = [which for which, _ in self._taken]
        if self._wanted:
            self._wanted[-1] += 1
        self._taken = []
        return bool(self._wanted)

    def __call__(self, options: Sequence[T], /) -> T:
        wanted = self._wanted or []
        which = wanted[len(self._taken)] if len(self._taken) < len(wanted) else 0
        self._taken.append((which, len(options)))
        return options[which]


def _unnamed(code: Code) -> Code:
    return tuple(issue.unnamed() for issue in code)


def _ways(rank: Rank, name: str) -> list[str]:
    """How a rank may come by code for a structure."""
    kept, cached = dict(rank.memory).get(name), dict(rank.cache).get(name)
    ways = [] if kept is None else ["keep"]
    if rank.has_file and cached is not None and cached != kept:
        ways.append("load")
    return [*ways, "compile"]


def _named(rank: Rank, way: str) -> Named:
    return rank.memory if way == "keep" else rank.cache


def _with(named: Named, name: str, code: Code) -> Named:
    return tuple(sorted({**dict(named), name: code}.items()))


def _endings(scope: tuple[int, ...], steps: int) -> list[Ending]:
    """All ways in which a meeting to which all come may end; the last one to come is in time."""
    late = [
        Ending(late=frozenset(ranks))
        for count in range(1, len(scope))
        for ranks in combinations(scope, count)
    ]
    midway = [
        Ending(quitter=rank, step=step, decides_first=first)
        for rank in scope
        for step in range(steps)
        for first in (True, False)
    ]
    return [Ending(), *late, *midway]


def _may_be_met(came: Came, ranks: Sequence[Rank]) -> bool:
    """Whether another rank may still come to a meeting."""
    name, _, number = came.meeting.removeprefix("1/").rpartition("/")
    return any(
        dict(rank.met).get(name, 0) <= int(number)
        for other, rank in enumerate(ranks)
        if other != came.rank
    )


def _restart(state: State) -> Step:
    """All processes start anew; as they were, if all hold files that say the same."""
    held = Counter(
        item
        for rank in state.ranks
        for item in PlanFile(name="", header={}, agreements=rank.book).shared().items()
    )
    warm = all(rank.has_file for rank in state.ranks) and all(
        count == len(scope) for (scope, _), count in held.items()
    )
    ranks = [Rank(book=rank.book, cache=rank.cache) if warm else Rank() for rank in state.ranks]
    what = f"restart {'warm' if warm else 'cold'}"
    return Step(story=what, after=State(ranks=tuple(ranks)), events=(what,))


def _event(one: Compiled) -> str:
    if one.error:
        return "diverging" if one.came is None else "diverging after a meeting"
    return "follow" if one.came is None else "meet"


def _tell(
    names: Sequence[str],
    ways: Sequence[str],
    found: dict[int, Compiled],
    gatherings: Sequence[Gathering],
) -> str:
    words = []
    for rank, (name, way) in enumerate(zip(names, ways, strict=True)):
        words.append(
            f"rank {rank} {way}s {name}" + (f" ({_event(found[rank])})" if rank in found else "")
        )
    for gathering in gatherings:
        words += [
            f"scope {scope} ends {ending}"
            for scope, ending in gathering.endings
            if ending != Ending()
        ]
    return "; ".join(words)


def explore(world: World) -> Tally:
    """Every history of any length: from each state that can be reached, each step is taken once.

    Raises:
        AssertionError: there is no end of states, as when ranks forget what they decided.
    """
    model, tally = Model(world), Tally()
    reached: dict[State, tuple[str, ...]] = {model.start: ()}
    waiting = deque(reached)
    while waiting:
        state = waiting.popleft()
        picker = _Picker()
        while picker.has_more():
            step = model.advance(state, picker)
            tally.add(step, reached[state])
            if step.after is not None and step.after not in reached:
                reached[step.after] = (*reached[state], step.story)
                assert len(reached) <= _MOST_STATES, "\n  ".join(reached[step.after])
                waiting.append(step.after)
    tally.events["state"] = len(reached)
    return tally


def play(model: Model, steps: int, random: Random, tally: Tally) -> None:
    """One history at random. What is picked more often is what comes first: all in time."""

    def pick(options: Sequence[T]) -> T:
        return options[0] if random.random() < _USUAL else random.choice(options)

    state = model.start
    story: tuple[str, ...] = ()
    for _ in range(steps):
        step = model.advance(state, pick)
        tally.add(step, story)
        if step.after is None:
            return
        state, story = step.after, (*story, step.story)
