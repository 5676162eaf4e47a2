"""Random sets of ranks: what 2 to 4 ranks compile of one model, from a seed and a number.

Process groups of all ranks, of some and of one, two pipeline stages at times, other compute, other
communication or another number of gathers on some ranks, other names, other costs and unknown
ones, bounds on memory, a policy that holds gathers back at random.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, frozen

from overlap_core import OverlapConfig, hookimpl
from overlap_core.simulation import simulate_views
from overlap_core.testing import host_with
from overlap_core.testing._recipes import (
    Collective,
    Compute,
    Gather,
    MutateInput,
    Opaque,
    Recipe,
    Variation,
    Wait,
    build_graph,
)
from overlap_core.views import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from overlap_core import OverlapGraph
    from overlap_core.host import PluginHost
    from overlap_core.outcome import RankOutcome
    from overlap_core.placement import Plan
    from overlap_core.testing._recipes import Item

__all__ = ["RandomHoldBack", "RankSet", "make_set", "run_set"]

Divergence = Literal["identical", "compute", "skeleton", "count"]

_SYMBOLS = ("s0", "s1", "s2", "u0")
_HINTS = {"s0": 48, "s1": 7, "s2": 48, "u0": 5}
_DIMS = (1, 8, 64, 256, "s0", "s1", "(s0+s1)", "(s1+s2)", "(s2*2)", "(u0//2)", "Max(s0, s2)")
_MOVING = ("direct", "cast", "cast", "pad", "shared", "bucket", "coalesced", "coalesced")
_STILL = ("constant", "activation", "dead", "unwaited")
_CONFIGS = tuple(
    OverlapConfig(contention=contention, slack_ns=slack_ns, max_in_flight_bytes=bound)
    for contention, slack_ns in ((1, 0), (1.5, 50_000), (3, 20_000), (1000, 10**9))
    for bound in (None, None, 1, 2_000, 6_000)
)


class RandomHoldBack:
    """A policy that holds gathers back, on each rank others: the ranks have to agree anyway."""

    overlap_plugin_name = "random_hold_back"

    @hookimpl
    def overlap_adjust_plan(self, plan: Plan, graph: OverlapGraph) -> Plan:
        random = Random(f"{graph.rank}/{len(graph.nodes)}")
        placements = [
            evolve(p, boundary=random.randint(p.boundary, p.original)) for p in plan.placements
        ]
        for index, (before, after) in enumerate(pairwise(list(placements)), start=1):
            if after.boundary < before.boundary:
                placements[index] = evolve(after, boundary=after.original)
        return evolve(plan, placements=tuple(placements))


@frozen(kw_only=True)
class RankSet:
    """What the ranks of a job compile, and with which configuration."""

    graphs: tuple[OverlapGraph, ...] = field(repr=False)
    """By rank."""
    divergence: Divergence
    """How much the ranks of a stage differ at most."""
    config: OverlapConfig
    holds_back: bool
    """Whether `RandomHoldBack` takes part."""


def make_set(seed: int, number: int) -> RankSet:
    """One set; equal for equal arguments."""
    random = Random(f"{seed}/{number}")
    world = random.randint(2, 4)
    divergence: Divergence = random.choice(
        ("identical", "compute", "compute", "skeleton", "skeleton", "count")
    )
    cut = random.randint(1, world - 1) if random.random() < 0.2 else world
    stages = [stage for stage in (range(cut), range(cut, world)) if stage]
    graphs: list[OverlapGraph] = []
    for stage in stages:
        # Communication on a group that nobody named could reach the other stage.
        recipe = _recipe(random, named=len(stages) > 1)
        graphs += _graphs_of_stage(random, recipe, tuple(stage), world, divergence)
    return RankSet(
        graphs=tuple(graphs),
        divergence=divergence,
        config=random.choice(_CONFIGS),
        holds_back=random.random() < 0.15,
    )


def _graphs_of_stage(
    random: Random, recipe: Recipe, stage: tuple[int, ...], world: int, divergence: Divergence
) -> Iterator[OverlapGraph]:
    recipes = dict.fromkeys(stage, recipe)
    some = tuple(sorted(random.sample(stage, random.randint(1, len(stage)))))
    if divergence == "skeleton":
        recipes = _other_skeletons(random, recipe, stage, some)
    elif divergence == "count":
        more = evolve(_gather(random), style=random.choice(("direct", "cast", "coalesced")))
        place = random.randint(0, len(recipe.items))
        recipes |= dict.fromkeys(some, _with_item(recipe, place, evolve(more, group=3)))
    mesh = _mesh(random, stage)
    for rank in stage:
        variation = Variation(salt=random.choice(("", f"r{rank}_")))
        if divergence != "identical":
            variation = _variation(random, recipes[rank], variation)
        graph = build_graph(recipes[rank], variation, rank, stage, world)
        yield _with_groups(graph, {"1": mesh[rank], "3": some})


def _with_groups(graph: OverlapGraph, ranks: Mapping[str, tuple[int, ...]]) -> OverlapGraph:
    """The graph with other ranks in some of its groups, by number."""
    nodes = tuple(
        evolve(node, group_ranks=ranks[node.group[-1]])
        if node.group is not None and node.group[-1] in ranks
        else node
        for node in graph.nodes
    )
    return evolve(graph, nodes=nodes)


def _mesh(random: Random, stage: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The ranks of group 1 on each rank: all of the stage, or every other one, or neighbors."""
    half = len(stage) // 2
    parts = random.choice(((stage,), (stage[::2], stage[1::2]), (stage[:half], stage[half:])))
    return {rank: part for part in parts for rank in part}


def _other_skeletons(
    random: Random, recipe: Recipe, stage: tuple[int, ...], some: tuple[int, ...]
) -> dict[int, Recipe]:
    """Recipes for the ranks of a stage, of which some communicate in another way.

    Half of them run (what is added is on a group of those ranks alone), the others would hang or
    mix up data as they are, and then the pass may do nothing, or restore one order.
    """
    same = dict.fromkeys(stage, recipe)
    place = random.randint(0, len(recipe.items))
    if random.random() < 0.5:
        extra = random.choice((_collective(random), evolve(_opaque(random), issues=True)))
        return same | dict.fromkeys(some, _with_item(recipe, place, evolve(extra, group=3)))
    items = list(recipe.items)
    fixed = [i for i, item in enumerate(items) if isinstance(item, (Collective, Opaque))]
    if not fixed or random.random() < 0.3:
        more = evolve(_collective(random), group=0)
        return same | {some[0]: _with_item(recipe, place, more)}
    where = random.choice(fixed)
    # With four dimensions it is like no other, whatever sizes turn out to be symbolic.
    chosen = evolve(items[where], sizes=(3, 5, 7, 9))  # type: ignore[arg-type]
    items[where] = chosen
    same = dict.fromkeys(stage, evolve(recipe, items=tuple(items)))
    change = random.choice(("drop", "move", "move", "resize"))
    if change == "resize":
        items[where] = evolve(chosen, sizes=(3, 5, 7, 11))  # type: ignore[arg-type]
    else:
        del items[where]
    if change == "move":
        items.insert(random.randint(0, len(items)), chosen)
    return same | {some[0]: evolve(recipe, items=tuple(items))}


def _with_item(recipe: Recipe, place: int, item: Item) -> Recipe:
    return evolve(recipe, items=(*recipe.items[:place], item, *recipe.items[place:]))


def _variation(random: Random, recipe: Recipe, base: Variation) -> Variation:
    computes = [i for i, item in enumerate(recipe.items) if isinstance(item, Compute)]
    dropped = random.sample(computes, random.randint(0, min(3, len(computes))))
    places = [random.randint(0, len(recipe.items)) for _ in range(random.randint(0, 3))]
    names = random.sample((*_SYMBOLS, "s90", "s91"), len(_SYMBOLS))
    return evolve(
        base,
        extra=tuple((place, _compute(random)) for place in places),
        dropped=frozenset(dropped),
        stretch=random.choice((1.0, 1.0, 0.25, 3.0)),
        static=frozenset(random.sample(_SYMBOLS, random.choice((0, 0, 1, 2)))),
        symbols=dict(zip(_SYMBOLS, names, strict=True)),
    )


def _recipe(random: Random, *, named: bool) -> Recipe:
    makers: tuple[Callable[[Random], Item], ...] = (
        *[_gather] * 4,
        *[_compute] * 4,
        *[lambda random: Wait(which=random.randint(0, 12))] * 3,
        _collective,
        _opaque,
        _mutation,
    )
    items = [random.choice(makers)(random) for _ in range(random.randint(5, 16))]
    if named:
        unnamed = (Gather, Collective, Opaque)
        items = [
            evolve(item, group=0) if isinstance(item, unnamed) and item.group is None else item
            for item in items
        ]
    return Recipe(
        items=tuple(items),
        prompt=random.random() < 0.5,
        shards=random.randint(1, 5),
        hints=_HINTS,
    )


def _compute(random: Random) -> Compute:
    return Compute(
        cost_ns=_cost(random),
        reads=tuple(random.randint(0, 12) for _ in range(random.randint(1, 2))),
        mutates=_seldom(random),
        after=_seldom(random),
        sizes=_sizes(random),
    )


def _gather(random: Random) -> Gather:
    return Gather(
        style=random.choice(_MOVING if random.random() < 0.8 else _STILL),
        group=_group(random),
        cost_ns=_cost(random),
        producer_ns=random.choice((None, 0, 500, 3_000)),
        use_ns=_cost(random),
        nbytes=random.choice((None, random.randint(0, 4_096))),
        outputs=random.randint(1, 3),
        after=_seldom(random),
        early_member=random.random() < 0.5,
        sizes=_sizes(random),
    )


def _collective(random: Random) -> Collective:
    style = random.choice(("reduce_scatter", "reduce_scatter", "in_place"))
    return Collective(
        style=style, group=_group(random), cost_ns=_cost(random), sizes=_sizes(random)
    )


def _opaque(random: Random) -> Opaque:
    return Opaque(
        issues=random.random() < 0.6,
        group=_group(random),
        cost_ns=_cost(random),
        network_ns=random.choice((None, random.randint(0, 200_000))),
        sizes=_sizes(random),
    )


def _mutation(random: Random) -> MutateInput:
    return MutateInput(which=random.randint(0, 12), from_activation=random.random() < 0.5)


def _cost(random: Random) -> int | None:
    return random.choice((None, 0, random.randint(1, 2_000), random.randint(10_000, 500_000)))


def _seldom(random: Random) -> int | None:
    return random.randint(0, 5) if random.random() < 0.3 else None


def _group(random: Random) -> int | None:
    """All ranks (0), those of the mesh (1), this one alone (2), or one that nobody named."""
    return random.choice((0, 0, 0, 0, 1, 1, 1, 2, None))


def _sizes(random: Random) -> tuple[int | str, ...]:
    return tuple(random.choice(_DIMS) for _ in range(random.randint(1, 3)))


@cache
def _host(config: OverlapConfig, holds_back: bool) -> PluginHost:
    return host_with(*([RandomHoldBack()] if holds_back else []), config=config)


def run_set(ranks: RankSet) -> tuple[RankOutcome, ...]:
    """One outcome a rank."""
    host = _host(ranks.config, ranks.holds_back)
    return simulate_views([prepare(graph, ranks.config, host) for graph in ranks.graphs])
