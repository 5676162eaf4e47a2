"""Hypothesis strategies for graphs, and for what several ranks compile of one model.

A graph is made from a *recipe*: items such as "a gather behind a cast" or "an opaque op on another
group". Ranks share a recipe and differ by a *variation* of it, so that what is one logical
operation stays one, whatever the ranks call it and whatever they compute around it.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, field, fields, frozen
from hypothesis import strategies as st

from overlap_core.graph import Node
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.graph import OverlapGraph
    from overlap_core.testing._recipes import Item

__all__ = [
    "RankSet",
    "costs",
    "graphs",
    "rank_sets",
    "recipes",
    "size_expressions",
    "sizes",
]

SYMBOLS = ("s0", "s1", "s2", "u0")
HINTS = {"s0": 48, "s1": 7, "s2": 48, "u0": 5}
Divergence = Literal["identical", "compute", "skeleton", "count"]


def size_expressions(
    symbols: Sequence[str] = SYMBOLS, max_leaves: int = 4
) -> st.SearchStrategy[str]:
    """Texts of positive sizes over symbols: sums, products, `//` and `%` by a number, `Max`."""

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        numbers = st.integers(2, 9).map(str)
        return st.one_of(
            st.tuples(inner, st.sampled_from("+*"), inner).map(lambda p: f"({''.join(p)})"),
            st.tuples(inner, st.sampled_from(("//", "%")), numbers).map(
                lambda p: f"({''.join(p)})"
            ),
            st.tuples(inner, inner).map(lambda p: f"Max({p[0]}, {p[1]})"),
        )

    leaves = st.sampled_from(tuple(symbols)) | st.integers(1, 64).map(str)
    return st.recursive(leaves, grow, max_leaves=max_leaves)


@cache
def sizes() -> st.SearchStrategy[tuple[int | str, ...]]:
    """The dimensions of one tensor, most of them static."""
    return st.lists(
        st.sampled_from((1, 8, 64, 256)) | size_expressions(max_leaves=2), min_size=1, max_size=3
    ).map(tuple)


@cache
def costs() -> st.SearchStrategy[int | None]:
    """Nanoseconds of one node: unknown, nothing, little, much."""
    return st.none() | st.just(0) | st.integers(1, 2_000) | st.integers(10_000, 500_000)


@cache
def _references() -> st.SearchStrategy[int]:
    """Which of the buffers or nodes so far, counted from the newest."""
    return st.integers(0, 12)


@cache
def _groups() -> st.SearchStrategy[int | None]:
    """Number of a process group; None: a group that nobody named."""
    return st.sampled_from((0, 0, 0, 0, 1, 1, 2, None))


@cache
def _computes() -> st.SearchStrategy[Compute]:
    return st.builds(
        Compute,
        cost_ns=costs(),
        reads=st.lists(_references(), min_size=1, max_size=2).map(tuple),
        mutates=_seldom(),
        after=_seldom(),
        sizes=sizes(),
    )


@cache
def _seldom() -> st.SearchStrategy[int | None]:
    return st.sampled_from((None,) * 12 + tuple(range(6)))


@cache
def _gathers() -> st.SearchStrategy[Gather]:
    styles = ("direct", "cast", "cast", "pad", "shared", "bucket", "coalesced", "coalesced")
    still = ("constant", "activation", "dead", "unwaited")
    return st.builds(
        Gather,
        style=st.sampled_from(styles * 2 + still),
        group=_groups(),
        cost_ns=costs(),
        producer_ns=st.sampled_from((None, 0, 500, 3_000)),
        use_ns=costs(),
        nbytes=st.none() | st.integers(0, 4_096),
        outputs=st.integers(1, 3),
        after=_seldom(),
        early_member=st.booleans(),
        sizes=sizes(),
    )


@cache
def _items() -> st.SearchStrategy[Item]:
    collectives = st.builds(
        Collective,
        style=st.sampled_from(("reduce_scatter", "reduce_scatter", "in_place")),
        group=_groups(),
        cost_ns=costs(),
        sizes=sizes(),
    )
    opaques = st.builds(
        Opaque,
        issues=st.booleans(),
        group=_groups(),
        cost_ns=costs(),
        network_ns=st.none() | st.integers(0, 200_000),
        sizes=sizes(),
    )
    kinds: list[st.SearchStrategy[Any]] = [
        *[_gathers()] * 4,
        *[_computes()] * 4,
        *[st.builds(Wait, which=_references())] * 3,
        collectives,
        opaques,
        st.builds(MutateInput, which=_references(), from_activation=st.booleans()),
    ]
    return st.one_of(*kinds)


def recipes(max_items: int = 24, *, unknown_groups: bool = True) -> st.SearchStrategy[Recipe]:
    """What a model does, before any rank compiles it."""

    def name_groups(items: list[Any]) -> tuple[Item, ...]:
        unnamed = [getattr(item, "group", 0) is None and not unknown_groups for item in items]
        changes = [{"group": 0} if change else {} for change in unnamed]
        return tuple(evolve(i, **change) for i, change in zip(items, changes, strict=True))

    return st.builds(
        Recipe,
        items=st.lists(_items(), min_size=max_items // 3, max_size=max_items).map(name_groups),
        prompt=st.booleans(),
        shards=st.integers(1, 5),
        hints=st.just(HINTS),
    )


@st.composite
def graphs(draw: st.DrawFn, max_items: int = 24, world_size: int | None = None) -> OverlapGraph:
    """One rank's graph, in a legal program order, of a world of one to four ranks."""
    world = draw(st.integers(1, 4)) if world_size is None else world_size
    return build_graph(draw(recipes(max_items)), Variation(), 0, range(world), world)


@frozen(kw_only=True)
class RankSet:
    """The graphs of all ranks of a job."""

    graphs: tuple[OverlapGraph, ...] = field(repr=False)
    """By rank."""
    stages: tuple[tuple[int, ...], ...]
    """Ranks that compile one recipe; ranks of other stages never communicate with them."""
    divergence: Divergence
    """How much the ranks of the first stage differ at most; the other stages' are identical."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis shows of a counterexample: one line a node, defaults left out."""
        lines = [f"RankSet: {self.divergence}, stages {self.stages}"]
        for graph in self.graphs:
            lines.append(f"  rank {graph.rank} of {graph.world_size}, outputs {graph.outputs}")
            for node in graph.nodes:
                words = [f"{a.name}={getattr(node, a.name)!r}" for a in fields(Node)[1:]]
                defaults = [f"{a.name}={a.default!r}" for a in fields(Node)[1:]]
                shown = [w for w, default in zip(words, defaults, strict=True) if w != default]
                lines.append(f"    {node.name}: {', '.join(shown)}")
        printer.text("\n".join(lines))


@st.composite
def rank_sets(
    draw: st.DrawFn,
    divergence: Divergence | None = None,
    max_items: int = 16,
    max_ranks: int = 5,
) -> RankSet:
    """The graphs of one to `max_ranks` ranks, in one pipeline stage or several."""
    kinds: tuple[Divergence, ...] = ("identical", "compute", "compute", "skeleton", "count")
    kind = draw(st.sampled_from(kinds)) if divergence is None else divergence
    fewest = 1 if kind == "identical" else 2
    world = draw(st.integers(fewest, max(fewest, max_ranks)))
    first = draw(st.integers(fewest, world))
    stages = [tuple(range(first))]
    if first < world:
        stages.append(tuple(range(first, world)))
    found: list[OverlapGraph] = []
    for number, ranks in enumerate(stages):
        # Communication on a group that nobody named could reach the other stage.
        recipe = draw(recipes(max_items, unknown_groups=len(stages) == 1))
        for rank in ranks:
            variation = Variation(salt=f"r{rank}_" if draw(st.booleans()) else "")
            if number == 0 and kind != "identical":
                variation = draw(_variations(recipe, variation))
                if rank and kind == "skeleton":
                    recipe = draw(_other_skeletons(recipe))
                elif rank == first - 1 and kind == "count":
                    recipe = evolve(recipe, items=(*recipe.items, draw(_weight_gathers())))
            found.append(build_graph(recipe, variation, rank, ranks, world))
    return RankSet(graphs=tuple(found), stages=tuple(stages), divergence=kind)


@st.composite
def _variations(draw: st.DrawFn, recipe: Recipe, base: Variation) -> Variation:
    """Other compute around the same communication, under other names."""
    places = st.integers(0, len(recipe.items))
    computes = [i for i, item in enumerate(recipe.items) if isinstance(item, Compute)]
    dropped = draw(st.sets(st.sampled_from(computes), max_size=3)) if computes else set()
    extra = draw(st.lists(st.tuples(places, _computes()), max_size=3))
    # Some ranks specialize a dimension; the value is the same wherever it is static.
    static = draw(st.sets(st.sampled_from(SYMBOLS), max_size=2))
    names = draw(st.permutations((*SYMBOLS, "s90", "s91")))
    return evolve(
        base,
        extra=tuple(extra),
        dropped=frozenset(dropped),
        stretch=draw(st.sampled_from((1.0, 1.0, 0.25, 3.0))),
        static=frozenset(static),
        symbols=dict(zip(SYMBOLS, names, strict=False)),
    )


@cache
def _weight_gathers() -> st.SearchStrategy[Gather]:
    styles = st.sampled_from(("direct", "cast", "coalesced"))
    return st.builds(lambda gather, style: evolve(gather, style=style), _gathers(), styles)


@st.composite
def _other_skeletons(draw: st.DrawFn, recipe: Recipe) -> Recipe:
    """One communicating item more, less, or in another place; as many weight gathers.

    Where launches that tell themselves apart have another place, one order can be restored.
    """
    items = list(recipe.items)
    fixed = {i: item for i, item in enumerate(items) if isinstance(item, (Collective, Opaque))}
    change = draw(st.sampled_from(("add", "drop", "move", "resize", "swap")))
    launches = [i for i, item in enumerate(items) if isinstance(item, Gather) or i in fixed]
    if change == "swap" and len(launches) > 1:
        one, other = draw(st.sampled_from(list(pairwise(launches))))
        items[one], items[other] = items[other], items[one]
        return evolve(recipe, items=tuple(items))
    if change == "add" or not fixed:
        collective = Collective(style="in_place", group=0, cost_ns=20_000, sizes=(3, 5))
        items.insert(draw(st.integers(0, len(items))), collective)
        return evolve(recipe, items=tuple(items))
    place = draw(st.sampled_from(sorted(fixed)))
    item = fixed[place]
    del items[place]
    if change == "move":
        items.insert(draw(st.integers(0, len(items))), item)
    elif change == "resize":
        items.insert(draw(st.integers(0, len(items))), evolve(item, sizes=(11, 13)))
    return evolve(recipe, items=tuple(items))
