"""Ranks in memory that end in every way there is, and what their reports say then."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

import overlap_core as oc
from overlap_core import following
from overlap_core.builtin.ladder import default
from overlap_core.errors import OverlapError
from overlap_core.following import agreement_of, choose_agreement, follow
from overlap_core.host import PluginHost
from overlap_core.pipeline import negotiate
from overlap_core.placement import Plan, TimelineModel
from overlap_core.ranks import (
    Commitment,
    Mode,
    ModeDecision,
    Proposal,
    Vote,
    run_in_memory,
)
from overlap_core.report import votes_in_words
from overlap_core.simulation import simulate, simulate_views
from overlap_core.skeleton import SkeletonEntry, merge_skeletons
from overlap_core.testing import graphs_for_ranks
from overlap_core.verdicts import describe_outcome
from overlap_core.views import prepare

from ..pipeline_views import EXACT, Failing, hosted, same, skewed, slower_unless_pinned, two_layers
from ..small_graphs import gather, graph_of, mm, on_ranks, opaque, wait
from .meetings import MEETINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from overlap_core import Node
    from overlap_core.outcome import RankOutcome
    from overlap_core.placement import Timeline
    from overlap_core.ranks.negotiation import Protocol
    from overlap_core.testing import GraphBuilder
    from overlap_core.views import RankView

__all__ = ["SCENARIOS"]

CALLS = evolve(EXACT, coalesce=1 << 40)


def texts(outcomes: Iterable[RankOutcome]) -> list[str]:
    """Everything that reports of these outcomes say in words."""
    found: list[str] = []
    for outcome in outcomes:
        found += [outcome.why, *outcome.notes, *(gather.why for gather in outcome.gathers)]
        found += votes_in_words(outcome.votes)
    return found


def layers(count: int, *, ns: int = 100, nbytes: int = 10) -> list[Node]:
    """Gather, wait and use of some weights behind each other."""
    nodes: list[Node] = []
    for i in range(count):
        reads = (f"w.g{i}", f"a{i - 1}" if i else "x")
        nodes += [gather(f"g{i}", ns=ns, nbytes=nbytes), wait(f"g{i}"), mm(f"a{i}", *reads)]
    return nodes


def refused(call: Callable[[], tuple[RankView, RankOutcome]]) -> list[str]:
    """What an order that cannot be followed says, raised or noted."""
    try:
        return texts([call()[1]])
    except OverlapError as error:
        return [str(error)]


# ---- gathers


def moved() -> list[str]:
    return texts(simulate_views(same(2, extra=2)))


def moved_by_one() -> list[str]:
    nodes = [mm("start", ns=500), gather("g"), wait("g"), mm("a", "start", "w.g")]
    return texts(simulate_views([hosted(graph_of(*nodes))]))


def hidden_as_it_is() -> list[str]:
    nodes = [gather("g"), mm("start", ns=500), wait("g"), mm("a", "start", "w.g")]
    return texts(simulate_views([hosted(graph_of(*nodes))]))


def at_the_head_and_too_little() -> list[str]:
    nodes = [mm("start", ns=50), *layers(2, ns=1_000)]
    return texts(simulate_views([hosted(graph_of(*nodes))]))


def nothing_earlier() -> list[str]:
    nodes = [mm("a"), mm("b", "a"), gather("g", after=("b",)), wait("g"), mm("c", "b", "w.g")]
    return texts(simulate_views([hosted(graph_of(*nodes))]))


def held_by_memory(nbytes: int, bound: int | None) -> list[str]:
    nodes = [mm("start", ns=5_000), *layers(6, ns=300, nbytes=nbytes)]
    config = evolve(EXACT, max_in_flight_bytes=bound)
    return texts(simulate_views([hosted(graph_of(*nodes), config)]))


def held_by_the_peak() -> list[str]:
    """Gathers that fit beside each other, but not beside what the compute before them needs."""
    large = mm("large", ns=50, sizes=((1 << 28,),), dtypes=("float32",))
    end = mm("end", "large", ns=50)
    nodes = [large, end, *layers(2, ns=300, nbytes=40 << 20)]
    graph = evolve(graph_of(*nodes), input_bytes=0)
    config = evolve(EXACT, max_peak_growth=0)
    return texts(simulate_views([hosted(graph, config)]))


def memory() -> list[str]:
    return [*held_by_memory(10, 19), *held_by_memory(1 << 30, None), *held_by_the_peak()]


def in_calls() -> list[str]:
    graphs = [graph_of(*layers(count)) for count in (2, 4)]
    return [text for graph in graphs for text in texts(simulate([graph], CALLS))]


def not_described() -> list[str]:
    [view] = same(1)
    decision = ModeDecision(mode=Mode.SLOT, why="for a test")
    order = tuple(range(len(view.graph.nodes)))
    broken = evolve(view, costs=())
    plan = Plan()
    return texts(
        [describe_outcome(broken, (0,), (view.vote,), decision, plan, order, committed=True)]
    )


# ---- how the mode was reached


def ladder() -> list[str]:
    vote = Vote(rank=0, can=True, fingerprint="a", skeleton="b", plugin_names=("p 1",))

    def why(*changes: dict[str, Any]) -> str:
        return default(
            tuple(evolve(vote, **{"rank": rank, **change}) for rank, change in enumerate(changes))
        ).why

    return [
        default(()).why,
        why({}),
        why({}, {}),
        why({}, {"can": False}),
        why({}, {"plugins": "x", "plugin_names": ("p 1", "q 2")}),
        why({}, {"plugins": "x"}),
        why({}, {"config": "x"}),
        why(*({"weight_gathers": rank} for rank in range(6))),
        why(*({"weight_gathers": rank % 2} for rank in range(30))),
        why({}, {"fingerprint": "x"}),
        why({}, {"fingerprint": "x", "skeleton": "y"}),
    ]


def votes() -> list[str]:
    vote = Vote(rank=0, can=True)
    return list(votes_in_words([vote, evolve(vote, rank=1, can=False)]))


def other_compute() -> list[str]:
    return texts(simulate_views(skewed({"scatter": True}, {"extra": 1, "scatter": True})))


def other_compute_in_every_way() -> list[str]:
    base = [mm("a"), *layers(1)]
    more = mm("end", "a0")
    pairs = [
        ([*base, more], base),
        ([*base, more], [*base, evolve(more, reads=("a",))]),
        (
            [*base, evolve(more, sizes=(("s0", "s1"),))],
            [*base, evolve(more, sizes=(("s0", "s0"),))],
        ),
        (
            [*base, evolve(more, op="triton_0", origins=("aten.mul.Tensor",))],
            [*base, evolve(more, op="triton_0", origins=tuple(f"aten.op{i}" for i in range(6)))],
        ),
        (
            [*base, evolve(more, op="aten.mul.Tensor")],
            [*base, evolve(more, op="aten.mul.Scalar")],
        ),
    ]
    found = []
    for nodes in pairs:
        symbols = {"s0": 4, "s1": 5}
        graphs = [
            graph_of(*each, rank=rank, symbols=symbols, outputs=())
            for rank, each in enumerate(nodes)
        ]
        found += texts(simulate_views([hosted(graph) for graph in graphs]))
    return found


def other_communication() -> list[str]:
    several = [evolve(opaque(f"o{i}", "x", group="0"), op=f"mylib::op{i}") for i in range(5)]
    graphs = [graph_of(*layers(2)), graph_of(*several, *layers(2), rank=1)]
    found = texts(simulate_views([hosted(graph) for graph in graphs]))
    found += texts(simulate_views(skewed({"scatter": True}, {})))
    found += texts(simulate_views(skewed({"gathers": 1}, {"gathers": 2})))
    return found


def sizes_that_meet_late() -> list[str]:
    def entry(size: int | str) -> tuple[SkeletonEntry, ...]:
        return (
            SkeletonEntry(
                ordinal=0, op="x", sizes=((size,),), dtypes=(), groups=(), group_sizes=(),
                weight_gather=False,
            ),
        )  # fmt: skip

    return [merge_skeletons([entry(4), entry("~"), entry(5)])[1]]


def rows_of_each_ranks_own() -> list[str]:
    def attention(*rows: int, scale: int) -> list[oc.OverlapGraph]:
        def fill(g: GraphBuilder) -> None:
            for count in rows[:: -1 if scale < 0 and g.rank else 1]:
                rows_here = count + abs(scale) * g.rank
                g.opaque("mylib::attn", "x", group="cp", sizes=(1, rows_here, 8))
            g.mm(g.gather("w"))

        return list(graphs_for_ranks(2, fill))

    def exchange(g: GraphBuilder) -> None:
        sent, received = (4 + g.rank, 4), (4, 4 + g.rank)
        y = g.all_to_all("x", sizes=(sum(received), 8), sent=sent, received=received)
        g.mm(y, g.gather("w"))

    sets = [
        attention(512, scale=128),
        attention(512, 512, scale=128),
        attention(512, 640, scale=128),
        attention(512, 100, scale=-20),
        graphs_for_ranks(2, exchange),
    ]
    return [text for graphs in sets for text in texts(simulate(graphs))]


def a_rank_that_would_lose() -> list[str]:
    views = same(2, extra=2, scatter=True)
    return texts(simulate_views([views[0], slower_unless_pinned(views[1])]))


class AgainstCalls(TimelineModel):
    """Predicts on rank 0 that calls make a step long; on rank 1 it knows nothing of them."""

    def __init__(self, graph: oc.OverlapGraph, *args: Any) -> None:
        super().__init__(graph, *args)
        self._rank = graph.rank

    def run(self, order: Sequence[int]) -> Timeline:
        if self._calls and self._rank:
            raise RuntimeError("no prediction")
        timeline = super().run(order)
        return evolve(timeline, total_ns=10**9) if self._calls else timeline


def calls_that_would_lose() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overlap_core.views.TimelineModel", AgainstCalls)
        return texts(simulate(on_ranks(graph_of(*layers(4)), 2), CALLS))


# ---- what goes wrong


def failing_policies() -> list[str]:
    views = []
    for graph in on_ranks(two_layers(), 6):
        plugin = Failing("overlap_adjust_plan", active=graph.rank > 0)
        views.append(hosted(graph, EXACT, plugin))
    return texts(simulate_views(views))


def failed_negotiation() -> list[str]:
    [view] = same(1)
    return texts(run_in_memory([negotiate(evolve(view, skeleton=None), (0,))]))


def illegal_order() -> list[str]:
    nodes = [mm("a"), gather("g", after=("a",)), wait("g"), mm("b", "a", "w.g")]
    view = hosted(graph_of(*nodes))
    assert view.frame is not None
    return texts(simulate_views([evolve(view, frame=evolve(view.frame, floors=(0,)))]))


def altered(honest: Protocol[RankOutcome], change: Callable[[Any], Any]) -> Iterator[Any]:
    """A rank's side of a protocol, whose every request is changed before its peers hear it."""
    answer = None
    while True:
        try:
            request = next(honest) if answer is None else honest.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield change(request)


def forged(step: str, payload: bytes) -> list[str]:
    """Two ranks, of which the second says something else at one step."""

    def lie(request: Any) -> Any:
        if request.step == f"{step}/digest":
            return evolve(request, payload=hashlib.sha256(payload).hexdigest().encode())
        return evolve(request, payload=payload) if request.step == f"{step}/detail" else request

    first, second = (negotiate(view, (0, 1)) for view in same(2))
    return texts(run_in_memory([first, altered(second, lie)])[:1])


def ranks_that_disagree() -> list[str]:
    return [
        *forged("proposal/first", Proposal(mode="identical", can=True, units=(1,)).encode()),
        *forged("proposal/first", Proposal(mode="slot", can=True, units=(0, 0)).encode()),
        *forged("commit/first", Commitment(ok=True, plan="another").encode()),
    ]


# ---- orders of communication that had parted


def in_order(rank: int, *names: str, **changes: dict[str, Any]) -> oc.OverlapGraph:
    """Two equal gathers and an op on one group, as captured, in another order."""
    captured = ("a", "g0", "w.g0", "b", "g1", "op", "w.g1", "c")
    made = (
        mm("a"), gather("g0"), wait("g0"), mm("b", "a", "w.g0"), gather("g1"),
        opaque("op", "b", group="0"), wait("g1"), mm("c", "op", "w.g1"),
    )  # fmt: skip
    places = {node.name: evolve(node, captured=i) for i, node in enumerate(made)}
    for name, change in changes.items():
        places[name] = evolve(places[name], **change)
    return graph_of(*(places[name] for name in names or captured), rank=rank, outputs=("c",))


ACROSS = ("a", "g0", "w.g0", "b", "op", "g1", "w.g1", "c")
SWAPPED = ("a", "g1", "g0", "w.g0", "b", "op", "w.g1", "c")


class Aborts:
    """A ladder that never moves anything."""

    overlap_plugin_name = "aborts"

    @oc.hookimpl
    def overlap_choose_mode(self, votes: tuple[Vote, ...]) -> ModeDecision:
        return ModeDecision(mode=Mode.ABORT, why="not today")


def orders_that_parted() -> list[str]:
    held = in_order(1, *SWAPPED, g0={"after": ("g1",)})
    return [
        *texts(simulate([in_order(0), in_order(1, *ACROSS)], EXACT)),
        *texts(simulate([in_order(0), in_order(1, *ACROSS, g1={"after": ("op",)})], EXACT)),
        *texts(simulate([in_order(0), held], EXACT)),
    ]


def restored_only() -> list[str]:
    config = evolve(EXACT, mode_ladder="aborts")
    return texts(simulate([in_order(0), in_order(1, *ACROSS)], config, [Aborts()]))


def parted_and_left_so() -> list[str]:
    """A verdict for program order, though ranks had found a common one."""

    def refuse(request: Any) -> Any:
        if request.step == "decision":
            return evolve(request, payload=b"keep the other rank said so")
        return request

    views = [hosted(in_order(0)), hosted(in_order(1, *ACROSS))]
    return texts(run_in_memory([altered(negotiate(v, (0, 1)), refuse) for v in views]))


# ---- graphs that are compiled alone


def following_alone() -> list[str]:
    views, two = same(2, scatter=True), same(2)
    view = views[0]
    slot = agreement_of(view, simulate_views(views)[0])
    slot = evolve(slot, mode=Mode.SLOT, why="the ranks said so", sequence=(0, 1, 2))
    found = refused(lambda: follow(view, slot))
    found += refused(lambda: follow(evolve(view, skeleton=None, fault="too hot"), slot))
    found += refused(lambda: follow(view, agreement_of(two[0], simulate_views(two)[0])))
    raising = hosted(view.graph, EXACT, Failing("overlap_adjust_plan", active=True))
    found += refused(lambda: follow(raising, slot))
    for changes in (
        {"sequence": (1, 0, 2)},
        {"sequence": (0,)},
        {"sequence": (0, 2, 1), "mode": Mode.ABORT},
        {"calls": ((0, 1),)},
    ):
        found += refused(lambda changes=changes: follow(view, evolve(slot, **changes)))
    return found


def following_two_at_once() -> list[str]:
    views = same(2, scatter=True)
    agreement = agreement_of(views[0], simulate_views(views)[0])
    both = [evolve(agreement, sequence=order) for order in ((0, 1, 2), (0, 2, 1))]
    with pytest.raises(OverlapError) as error:
        choose_agreement(views[0], both)
    return [str(error.value)]


def following_into_calls() -> list[str]:
    host = PluginHost.discover(CALLS)
    graph, other = on_ranks(graph_of(*layers(2)), 2)
    view = prepare(graph, CALLS, host)
    agreement = agreement_of(view, simulate_views([view, prepare(other, CALLS, host)])[0])
    alone = prepare(graph, CALLS, host, keep_alone=frozenset({"g1"}))
    nodes = [evolve(n, after=("a0",)) if n.name == "g1" else n for n in graph.nodes]
    apart = prepare(evolve(graph, nodes=tuple(nodes)), CALLS, host)
    return [text for one in (alone, apart) for text in refused(lambda: follow(one, agreement))]  # noqa: B023


def following_what_is_not_legal() -> list[str]:
    nodes = [mm("a"), gather("g", after=("a",)), wait("g"), mm("b", "a", "w.g")]
    view = hosted(graph_of(*nodes))
    assert view.frame is not None
    broken = evolve(view, frame=evolve(view.frame, floors=(0,)))
    [gathers] = same(1, scatter=True)
    found = []
    for one, wanted, pinned in ((broken, (0,), False), (gathers, (0, 2, 1), True)):
        with pytest.raises(OverlapError) as error:
            following._place(one, wanted, pinned=pinned)
        found.append(str(error.value))
    return found


SCENARIOS: tuple[Callable[[], list[str]], ...] = (
    moved, moved_by_one, hidden_as_it_is, at_the_head_and_too_little, nothing_earlier, memory,
    in_calls, not_described, ladder, votes, other_compute, other_compute_in_every_way,
    other_communication, sizes_that_meet_late, rows_of_each_ranks_own, a_rank_that_would_lose,
    calls_that_would_lose,
    failing_policies, failed_negotiation, illegal_order, ranks_that_disagree, orders_that_parted,
    restored_only, parted_and_left_so, following_alone, following_two_at_once,
    following_into_calls, following_what_is_not_legal, *MEETINGS,
)  # fmt: skip
"""Each returns what reports say; together they say every sentence that there is."""
