"""Functions that ranks compile in two structures: what each rank's graphs are, and which fit.

A structure says what is launched in the order of the captured graph, and how Inductor orders that
on each rank. Ranks launch what is on groups of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from overlap_core.graph import restore_order
from overlap_core.host import PluginHost
from overlap_core.views import prepare

from .blocking import Free, Issue, run_blocking
from .pipeline_views import EXACT, Failing
from .small_graphs import gather, graph_of, mm, opaque, reduce_scatter, wait

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from overlap_core import Node, OverlapConfig, OverlapGraph
    from overlap_core.views import RankView

__all__ = ["GROUPS", "Launch", "Program", "Structure", "World", "random_world"]

GROUPS: Mapping[int, Mapping[str, tuple[tuple[int, ...], ...]]] = {
    2: {"world": ((0, 1),), "twin": ((0, 1),), "own": ((0,), (1,))},
    3: {
        "world": ((0, 1, 2),),
        "twin": ((0, 1, 2),),
        "own": ((0,), (1,), (2,)),
        "pair": ((0, 1), (2,)),
        "left": ((0, 1),),
        "right": ((1, 2),),
    },
    4: {
        "world": ((0, 1, 2, 3),),
        "own": ((0,), (1,), (2,), (3,)),
        "row": ((0, 1), (2, 3)),
        "column": ((0, 2), (1, 3)),
    },
}
"""By number of ranks: the process groups of each name. Who is in none of them launches nothing."""


@frozen(kw_only=True)
class Launch:
    """One operation of a structure."""

    op: str = "reduce"
    """`gather`, of a weight unless it is `fed`, `reduce`, or `exchange`, an opaque op."""
    group: str = "world"
    fed: bool = False
    """Of what was computed before, so that it is no weight gather."""
    joins: bool = True
    """What comes behind needs the result."""
    dtype: str = "bfloat16"
    size: int = 64
    of: str = ""
    """Which tensor is gathered: a rank that gathers another one meets nobody."""


@frozen(kw_only=True)
class Structure:
    """What the function is compiled to for some of its inputs."""

    launches: tuple[Launch, ...]
    more_compute: tuple[int, ...] = ()
    """By rank, matmuls at the head that only this rank has."""
    orders: Mapping[int, tuple[int, ...]] = field(factory=dict)
    """By rank: the launches as Inductor orders them there, if not as captured."""
    knows_captured: bool = True
    fault: tuple[int, str] | None = None
    """A rank on which a plugin raises for this graph, and in which hook."""


@frozen(kw_only=True)
class Program:
    """One structure on one rank."""

    view: RankView
    issues: Mapping[str, Issue]
    """What is launched, by node name, in program order."""
    free: Free
    """The same with dependencies between launches."""


@define(eq=False, kw_only=True)
class World:
    """The ranks of a job, and the function that they compile."""

    ranks: int
    structures: Mapping[str, Structure]
    settings: Mapping[str, Any] = field(factory=dict)
    """Of the configuration."""
    is_backward: bool = False

    @cached_property
    def _config(self) -> OverlapConfig:
        return evolve(EXACT, costs="analytical", warm_start=False, **self.settings)

    @cached_property
    def programs(self) -> dict[tuple[str, int], Program]:
        """By structure and rank."""
        return {
            (name, rank): self._program(structure, rank)
            for name, structure in self.structures.items()
            for rank in range(self.ranks)
        }

    @cached_property
    def valid(self) -> tuple[tuple[str, ...], ...]:
        """Which structures ranks can run beside each other in program order, one for each rank."""
        every = product(self.structures, repeat=self.ranks)
        return tuple(names for names in every if not self._problem(names))

    @cached_property
    def alike(self) -> tuple[tuple[str, ...], ...]:
        """Which have the same on each group that ranks share.

        In program order such ranks may come to their end where launches don't block each other,
        though nothing guarantees it.
        """
        found = []
        for names in product(self.structures, repeat=self.ranks):
            issued = defaultdict(list)
            for rank, name in enumerate(names):
                for issue in self.programs[name, rank].issues.values():
                    issued[issue.unnamed()].append(rank)
            if all(tuple(ranks) == issue.ranks for issue, ranks in issued.items()):
                found.append(names)
        return tuple(found)

    def _problem(self, names: Sequence[str]) -> str:
        programs = [self.programs[name, rank] for rank, name in enumerate(names)]
        return run_blocking([tuple(program.issues.values()) for program in programs])

    @cached_property
    def _hosts(self) -> dict[str, PluginHost]:
        return {}

    def _host(self, hook: str, *, active: bool) -> PluginHost:
        """Plugins are the same for all graphs and ranks; one may raise."""
        hooks = {s.fault[1] for s in self.structures.values() if s.fault is not None}
        hook = hook if active else ""
        if hook not in self._hosts:
            plugins = (Failing(hook, active=active),) if hooks else ()
            self._hosts[hook] = PluginHost.discover(self._config, plugins=plugins, installed=())
        return self._hosts[hook]

    def _program(self, structure: Structure, rank: int) -> Program:
        graph, names = self._graph(structure, rank)
        fails = structure.fault is not None and structure.fault[0] == rank
        host = self._host(structure.fault[1] if structure.fault else "", active=fails)
        view = prepare(graph, self._config, host, is_backward=self.is_backward)
        place = {node.name: spot for spot, node in enumerate(graph.nodes)}
        in_order = sorted(names, key=place.__getitem__)
        found = self._issues(rank, names)
        issues = {name: found[name] for name in in_order}
        behind = _launches_behind(graph, in_order)
        return Program(view=view, issues=issues, free=Free(tuple(issues.values()), behind))

    def _issues(self, rank: int, names: Mapping[str, Launch]) -> dict[str, Issue]:
        """Operations of a group are told apart by how many were captured before."""
        counts: dict[str, int] = {}
        found: dict[str, Issue] = {}
        for name, launch in names.items():
            ranks = self._members(launch.group, rank)
            group = f"{launch.group}{list(ranks)}"
            tag = counts.get(group, 0)
            counts[group] = tag + 1
            is_gather = launch.op == "gather"
            found[name] = Issue(
                group=group,
                ranks=ranks,
                tags=(tag,),
                what=f"{launch.op} {launch.dtype}",
                of=launch.of if is_gather else "",
                alone=not is_gather or launch.fed,
            )
        return found

    def _members(self, group: str, rank: int) -> tuple[int, ...]:
        return next((ranks for ranks in GROUPS[self.ranks][group] if rank in ranks), ())

    def _graph(self, structure: Structure, rank: int) -> tuple[OverlapGraph, dict[str, Launch]]:
        """This rank's graph, and its launches as captured."""
        more = structure.more_compute[rank] if structure.more_compute else 0
        nodes: list[Node] = [mm(f"more{i}", ns=100) for i in range(more)]
        before, outputs = "x", []
        names: dict[str, Launch] = {}
        for number, launch in enumerate(structure.launches):
            ranks = self._members(launch.group, rank)
            nodes.append(mm(f"a{number}", before))
            before = f"a{number}"
            if not ranks:
                continue
            name = f"{launch.op}_{number}"
            names[name] = launch
            node = _launch_node(launch, name, before)
            captured = number if structure.knows_captured else None
            nodes.append(evolve(node, group=launch.group, group_ranks=ranks, captured=captured))
            if launch.op == "exchange":
                before = name
                continue
            nodes.append(wait(name))
            if launch.joins:
                nodes.append(mm(f"b{number}", before, f"w.{name}"))
                before = f"b{number}"
            else:
                outputs.append(f"w.{name}")
        nodes.append(mm("end", before))
        graph = graph_of(*nodes, rank=rank, world_size=self.ranks, outputs=("end", *outputs))
        order = structure.orders.get(rank)
        if order is not None:
            place = {_number(n.name): i for i, n in enumerate(nodes) if n.name in names}
            wanted = [place[number] for number in order if number in place]
            positions = restore_order(graph.predecessors, wanted)
            if positions is None:
                raise ValueError(f"launches depend on each other otherwise than in {order}")
            graph = evolve(graph, nodes=tuple(nodes[position] for position in positions))
        return graph, names


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def _launch_node(launch: Launch, name: str, before: str) -> Node:
    sizes: dict[str, Any] = {"sizes": ((launch.size, 8),), "dtypes": (launch.dtype,)}
    if launch.op == "gather":
        return gather(name, before if launch.fed else "", ns=250, **sizes)
    if launch.op == "reduce":
        return reduce_scatter(name, before, **sizes)
    return opaque(name, before, **sizes)


def _launches_behind(graph: OverlapGraph, names: Sequence[str]) -> tuple[frozenset[int], ...]:
    """For each launch those that it depends on through what nodes read, each written once."""
    place = {name: spot for spot, name in enumerate(names)}
    behind: dict[str, frozenset[int]] = {}
    found: dict[str, frozenset[int]] = {}
    for node in graph.nodes:
        before = frozenset[int]().union(*(behind.get(b, frozenset()) for b in node.reads))
        if node.name in place:
            found[node.name] = before
            before |= {place[node.name]}
        for buffer in node.writes:
            behind[buffer] = before
    return tuple(found[name] for name in names)


_SIZES = {"row": 48, "column": 40}
"""What is equal but for its group is mixed up where Inductor swaps it on one rank."""
_OPS = ("gather", "gather", "gather", "reduce", "exchange")
_HOOKS = ("overlap_classify_node", "overlap_measure_cost", "overlap_adjust_plan")


def random_world(random: Random) -> World:
    """Two structures of which one was made of the other; all ranks can run at least one.

    Every rank communicates in both: see the test of a rank that never met.
    """
    while True:
        ranks = random.choice((2, 2, 3, 3, 4))
        launches = tuple(_random_launch(random, ranks) for _ in range(random.randint(2, 5)))
        first = Structure(launches=launches, knows_captured=random.random() < 0.5)
        second = first
        for _ in range(random.choice((1, 1, 2))):
            second = _varied(random, ranks, second)
        if random.random() < 0.2:
            first = _varied(random, ranks, first)
        coalesce = random.choice(("off", "off", 1 << 20))
        world = World(
            ranks=ranks,
            structures={"A": first, "B": second},
            settings={"coalesce": coalesce},
            is_backward=random.random() < 0.3,
        )
        try:
            communicate = all(map(_communicates, world.programs.values()))
            if communicate and any(len(set(names)) == 1 for names in world.valid):
                return world
        except ValueError:  # launches in an order that they cannot have
            continue


def _communicates(program: Program) -> bool:
    return any(len(issue.ranks) > 1 for issue in program.issues.values())


def _random_launch(random: Random, ranks: int) -> Launch:
    groups = tuple(GROUPS[ranks])
    group = random.choice(("world",) * len(groups) + groups)
    return Launch(
        op=random.choice(_OPS),
        group=group,
        size=_SIZES.get(group, 64),
        of=f"w{random.randrange(1000)}",
        fed=random.random() < 0.15,
        joins=random.random() < 0.6,
    )


def _swaps_equals(launches: Sequence[Launch], order: Sequence[int]) -> bool:
    """Whether nobody could say which of two operations is which."""
    looks = [(one.op, one.group, one.dtype) for one in launches]
    return any(a > b and looks[a] == looks[b] for a, b in combinations(order, 2))


def _varied(random: Random, ranks: int, structure: Structure) -> Structure:
    """The structure with one change."""
    launches = list(structure.launches)
    which = random.randrange(len(launches))
    change = random.choice(
        ("more", "more", "less", "launch", "order", "order", "place", "compute", "fault")
    )
    if change == "more":
        launches.insert(which, _random_launch(random, ranks))
    elif change == "less" and len(launches) > 1:
        del launches[which]
    elif change == "launch":
        values: tuple[dict[str, Any], ...] = (
            {"fed": not launches[which].fed},
            {"dtype": "float32"},
            {"size": 32},
        )
        launches[which] = evolve(launches[which], **random.choice(values))
    elif change == "place":
        launches.insert(random.randrange(len(launches)), launches.pop(which))
    structure = evolve(structure, launches=tuple(launches), orders={})
    if change == "order":
        orders = {}
        for rank in range(ranks):
            numbers = list(range(len(launches)))
            number = numbers.pop(which)
            numbers.insert(random.randrange(len(launches)), number)
            swaps = not structure.knows_captured and _swaps_equals(launches, numbers)
            if random.random() < 0.6 and not swaps:
                orders[rank] = tuple(numbers)
        return evolve(structure, orders=orders)
    if change == "compute":
        more = tuple(random.randrange(3) for _ in range(ranks))
        return evolve(structure, more_compute=more)
    if change == "fault":
        return evolve(structure, fault=(random.randrange(ranks), random.choice(_HOOKS)))
    return structure
