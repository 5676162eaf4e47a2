"""No history of compiles, together and alone, ends in a hang, or in an error that need not be."""

from __future__ import annotations

import logging
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from overlap_core import following, pipeline
from overlap_core.errors import DivergenceError, PluginError
from overlap_core.following import agreement_of, follow, peer_skeleton_of
from overlap_core.inductor import overlap_pass
from overlap_core.ranks import Mode

from .blocking import Chain, Free, Issue, can_end, join, orders, reordered, run_blocking
from .lone_histories import Model, Tally, explore, play
from .lone_worlds import Launch, Structure, World, random_world

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlap_core.outcome import RankOutcome
    from overlap_core.ranks import Agreement
    from overlap_core.views import RankView

SEED, HISTORIES, CHUNK, IN_ONE_WORLD = 20_261, 20_000, 500, 20
G, R, X = Launch(op="gather"), Launch(), Launch(op="exchange")
LOOSE, LOOSE_G = (evolve(launch, joins=False) for launch in (R, G))
A = (G, R, G)
"""Its second gather moves over the reduction."""
CLASSIFY, MEASURE, ADJUST = (
    f"overlap_{hook}" for hook in ("classify_node", "measure_cost", "adjust_plan")
)


def on(group: str, launch: Launch = R) -> Launch:
    return evolve(launch, group=group)


def structure(*launches: Launch, **more: Any) -> Structure:
    return Structure(launches=launches, **more)


VARIANTS: dict[str, Structure] = {
    "equal but for sizes": structure(G, evolve(R, size=32), G),
    "equal but for compute": structure(*A, more_compute=(0, 2, 1)),
    "one more on a group of one rank": structure(G, on("own"), R, G),
    "one more on a second group": structure(*A, on("twin")),
    "one more on the world": structure(*A, R),
    "one gather less": structure(G, R),
    "one reduction less": structure(G, G),
    "another program order": structure(G, G, R),
    "another order of Inductor": structure(*A, orders=dict.fromkeys(range(3), (0, 2, 1))),
    "another order of Inductor on one rank": structure(*A, orders={1: (0, 2, 1)}),
    "another dtype": structure(G, evolve(R, dtype="float32"), G),
    "a gather that is none of a weight": structure(G, R, evolve(G, fed=True)),
    "a plugin fails": structure(*A, fault=(1, CLASSIFY)),
    "costs fail": structure(*A, fault=(1, MEASURE)),
    "a policy fails": structure(*A, fault=(1, ADJUST)),
    "one more on a group of one rank, and a plugin fails": structure(
        *A, on("own"), fault=(1, CLASSIFY)
    ),
    "one more on the world, and a plugin fails": structure(*A, R, fault=(1, CLASSIFY)),
}
"""What the function is compiled to for other inputs, beside `A`."""

USUAL = ("meet", "follow", "load", "restart warm", "restart cold", "run moved")
DUE = {
    "a gather that is none of a weight": ("error: no order fits",),
    "one more on the world": ("error: a peer was late",),
}
"""What some histories must come to, or they say little."""

UNEVEN: dict[str, Structure] = {
    "one more on a pair": structure(G, on("pair"), R, G),
    "one more on a group that a rank is not in": structure(G, on("left"), R, G),
    "one more on each pair of neighbours": structure(G, on("left"), on("right"), R, G),
    "one more on a pair and on the world": structure(G, on("pair"), R, R, G),
}
"""For three ranks."""

QUICK = ("one more on the world", "one more on a pair and on the world")
"""On three ranks."""

CALLS: dict[str, Any] = {"coalesce": 1 << 20}
OTHERS: dict[str, World] = {
    "a gather of one rank between those of a call": World(
        ranks=2,
        structures={
            "A": structure(G, on("own", G), X, LOOSE_G),
            "B": structure(G, on("own", G), evolve(X, size=32), LOOSE_G),
        },
        settings=CALLS,
    ),
    "a call of gathers of one rank": World(
        ranks=2,
        structures={
            "A": structure(on("own", G), on("own", G), G),
            "B": structure(on("own", G), on("own", G)),
        },
        settings=CALLS,
    ),
    "nothing to gain in one of them": World(
        ranks=2, structures={"A": structure(R, R), "B": structure(*A)}
    ),
    "another order over groups that not all ranks have": World(
        ranks=3,
        structures={
            "A": structure(on("twin", X), on("left", X), on("right", X), on("twin", G)),
            "B": structure(
                on("twin", X), on("right", evolve(X, dtype="float32")), on("twin", G), on("left", X)
            ),
        },
    ),
    "groups of the same ranks in another order": World(
        ranks=2,
        structures={
            "A": structure(R, on("twin", LOOSE_G)),
            "B": structure(on("twin", LOOSE_G), R, orders={1: (1, 0)}),
        },
    ),
    "a plugin fails in the first one": World(
        ranks=2, structures={"A": structure(R, *A), "B": structure(*A, fault=(0, CLASSIFY))}
    ),
}
"""Worlds in which a search at random has found something."""

ROW, COLUMN = (
    Launch(op="gather", group=group, size=size, joins=False)
    for group, size in (("row", 48), ("column", 40))
)
MESHES = {
    "an order was restored": World(
        ranks=4,
        structures={
            "A": structure(ROW, COLUMN, orders={1: (1, 0)}),
            "B": structure(ROW, COLUMN, on("own"), orders={0: (1, 0, 2), 3: (1, 0, 2)}),
        },
    ),
    "an order was restored since no two operations look alike": World(
        ranks=4,
        structures={
            "A": structure(G, ROW, knows_captured=False),
            "B": structure(ROW, G, knows_captured=False),
        },
    ),
    "nothing was restored or moved": World(
        ranks=4,
        structures={
            "A": structure(on("column", X), evolve(ROW, joins=True), COLUMN),
            "B": structure(evolve(ROW, joins=True), on("column", X), COLUMN),
        },
    ),
}
"""Meshes on which some ranks have groups in another order, which program order bears."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the pass warns of, thousands of times."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def world(ranks: int, other: Structure) -> World:
    return World(ranks=ranks, structures={"A": structure(*A), "B": other})


def check(tally: Tally) -> None:
    print(dict(sorted(tally.events.items())))
    assert not tally.faults, f"{len(tally.faults)} faults, the first: {tally.faults[0]}"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_history_of_two_ranks(name: str) -> None:
    tally = explore(world(2, VARIANTS[name]))
    check(tally)
    for event in (*USUAL, *DUE.get(name, ())):
        assert tally.events[event], f"nothing is known of {event!r}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full])
        for name in (*VARIANTS, *UNEVEN)
    ],
)
def test_every_history_of_three_ranks(name: str) -> None:
    check(explore(world(3, {**VARIANTS, **UNEVEN}[name])))


@pytest.mark.parametrize("name", OTHERS)
def test_every_history_of_other_worlds(name: str) -> None:
    check(explore(OTHERS[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_every_history_of_a_mesh(name: str) -> None:
    check(explore(MESHES[name]))


@pytest.mark.parametrize("name", MESHES)
def test_histories_of_a_mesh(name: str) -> None:
    model, tally, random = Model(MESHES[name]), Tally(), Random(SEED)
    for _ in range(100):
        play(model, 4, random, tally)
    check(tally)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.full] if first else [])
        for first in range(0, HISTORIES, CHUNK)
    ],
)
def test_random_histories(first: int) -> None:
    """Of random structures on two to four ranks."""
    tally = Tally()
    for number in range(first, first + CHUNK, IN_ONE_WORLD):
        random = Random(f"{SEED} {number}")
        model = Model(random_world(random))
        print(f"world {number}")
        for _ in range(IN_ONE_WORLD):
            play(model, random.randint(2, 6), random, tally)
    check(tally)
    assert tally.events["follow"] > CHUNK
    assert tally.events["run moved"] > CHUNK / 2


def test_gathers_on_two_groups_that_inductor_swapped_on_one_rank() -> None:
    """Unrestored, they end in program order, and hang once one is moved over the reduction."""
    swapped = structure(R, on("row", G), on("column", G), orders={1: (0, 2, 1)})
    model = Model(World(ranks=4, structures={"B": swapped}))
    step = model.advance(model.start, lambda options: options[0])
    assert step.faults == ()


def test_a_rank_that_never_met_goes_to_another_meeting() -> None:
    """Where it had nothing to agree on before. That is refused, though all ranks compile alike."""
    right = on("right", R), on("right", LOOSE_G)
    found = explore(
        World(ranks=3, structures={"A": structure(*right), "B": structure(LOOSE_G, *right)})
    )
    assert {fault.partition(":")[0] for fault in found.faults} == {"unjustified"}


def exact_only(view: RankView, agreements: Sequence[Agreement]) -> Agreement | None:
    """Only an equal skeleton counts."""
    assert view.skeleton is not None
    mine, _ = peer_skeleton_of(view.graph, view.skeleton)
    return next((agreed for agreed in agreements if agreed.skeleton == mine), None)


def never_moved(view: RankView, outcome: RankOutcome) -> Agreement:
    """Nobody is bound."""
    return evolve(agreement_of(view, outcome), moved=False)


def give_in(view: RankView, agreement: Agreement) -> tuple[RankView, RankOutcome]:
    """Program order where the agreed one can't be had."""
    try:
        return follow(view, agreement)
    except DivergenceError:
        return follow(view, evolve(agreement, mode=Mode.ABORT))


def refuse(view: RankView, agreement: Agreement) -> tuple[RankView, RankOutcome]:
    raise DivergenceError("as a matter of principle")


def fit_in_by_rank(
    view: RankView, sequence: Sequence[int], calls: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """What is not agreed on comes where each rank likes it."""
    assert view.skeleton is not None
    others = [o for o in range(len(view.skeleton.entries)) if o not in sequence]
    place = 1 if view.graph.rank else len(sequence)
    return (*sequence[:place], *others, *sequence[place:])


def by_oneself(self: pipeline._Side, verdict: bytes) -> RankOutcome:
    """Each rank decides for itself what becomes of a negotiation."""
    return _close(self, self.offer or verdict)


_close = pipeline._Side.close

PLANTED: dict[str, tuple[World, list[tuple[Any, str, Any]], set[str]]] = {
    "program order for what looks new": (
        world(3, UNEVEN["one more on a pair"]),
        [
            (overlap_pass, "choose_agreement", exact_only),
            (overlap_pass, "agreement_of", never_moved),
        ],
        {"diverges"},
    ),
    "program order for what can't follow": (
        world(2, VARIANTS["a gather that is none of a weight"]),
        [(overlap_pass, "follow", give_in), (following, "_is_program_order", lambda *args: True)],
        {"diverges"},
    ),
    "errors that need not be": (
        world(2, VARIANTS["equal but for sizes"]),
        [(overlap_pass, "follow", refuse)],
        {"unjustified"},
    ),
    "ranks fit in at other places": (
        World(
            ranks=3,
            structures={
                "A": structure(G, LOOSE, G),
                "B": structure(G, LOOSE, on("pair", LOOSE), G),
            },
        ),
        [(following, "_fit_in", fit_in_by_rank)],
        {"hangs"},
    ),
    "ranks that give up decide for themselves": (
        world(2, VARIANTS["equal but for sizes"]),
        [(pipeline._Side, "close", by_oneself)],
        {"diverges"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, patches, kinds = PLANTED[name]
    for target, attribute, value in patches:
        monkeypatch.setattr(target, attribute, value)
    faults = explore(place).faults
    assert kinds <= {fault.partition(":")[0] for fault in faults}, faults[:3]
    shortest = min(faults, key=len)
    print(shortest)
    assert "\n  rank 0 " in shortest, "the steps are told"


def test_what_nobody_can_describe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the built-in plugins: then nothing is known of what peers may run beside it."""

    def fail(*args: object) -> RankView:
        raise PluginError("no luck today")

    monkeypatch.setattr(following, "estimated", fail)
    model, tally, random = Model(world(2, VARIANTS["a plugin fails"])), Tally(), Random(SEED)
    for _ in range(CHUNK):
        play(model, 4, random, tally)
    assert {fault.partition(":")[0] for fault in tally.faults} == {"unjustified"}


def issue(group: str, *tags: int, ranks: tuple[int, ...] = (0, 1), alone: bool = False) -> Issue:
    return Issue(group=group, ranks=ranks, tags=tags, what="gather", alone=alone)


def test_what_blocks() -> None:
    a, b, c = issue("w", 0), issue("w", 1), issue("v", 0)
    assert run_blocking([(a, b, c), (a, b, c)]) == ""
    assert run_blocking([(a, issue("own", 0, ranks=(0,))), (a,)]) == ""
    found = run_blocking([(a, b), (b, a)])
    assert found == "diverges: rank 0 is in gather 0 on w; rank 1 is in gather 1 on w"
    assert run_blocking([(a, c), (c, a)]).startswith("hangs: rank 0 is in gather 0 on w; rank 1")
    assert run_blocking([(a,), ()]) == "hangs: rank 0 is in gather 0 on w"
    assert run_blocking([(issue("w", 0, 1),), (a, b)]).startswith("diverges: ")


def test_what_could_end() -> None:
    a, b, c = issue("w", 0), issue("w", 1), issue("v", 0)
    nothing, first = frozenset[int](), frozenset({0})
    free = Free((a, b, c), (nothing,) * 3)
    assert can_end([free, Chain((c, b, a))])
    assert can_end([free, Chain((join([a, b]), c))])
    assert not can_end([Free((a, b, c), (nothing, first, nothing)), Chain((b, a, c))])
    assert not can_end([Free((a, b, c), (nothing, first, nothing)), Chain((join([a, b]), c))])
    assert not can_end(
        [Free((a, issue("w", 1, alone=True)), (nothing,) * 2), Chain((join([a, b]),))]
    )
    assert not can_end([free, Chain((a, b))])
    assert list(orders((nothing, first, nothing))) == [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
    assert can_end([reordered(free, (2, 0, 1)), Chain((c, join([a, b])))])
    assert not can_end([reordered(free, (0, 2, 1)), Chain((c, join([a, b])))])
