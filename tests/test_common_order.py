"""Ranks that come with the same communication in different orders, and leave with one."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

import overlap_core as oc
from overlap_core.errors import DeadlineError
from overlap_core.pipeline import negotiate
from overlap_core.placement import Timeline, TimelineModel
from overlap_core.ranks import Decide, Mode, ModeDecision
from overlap_core.simulation import simulate, simulate_views
from overlap_core.testing import assert_legal
from overlap_core.testing.strategies import RankSet, rank_sets

from .oracles import issues_communication
from .pipeline_views import EXACT, hosted
from .small_graphs import gather, graph_of, mm, opaque, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core import Node, OverlapGraph
    from overlap_core.outcome import RankOutcome
    from overlap_core.views import RankView

CAPTURED = ("a", "g0", "w.g0", "b", "g1", "op", "w.g1", "c")
"""Two gathers on one group, and between the second one and its use an opaque op on another."""


def nodes(extra: int = 0) -> dict[str, Node]:
    found = [
        mm("a"),
        gather("g0"),
        wait("g0"),
        mm("b", "a", "w.g0"),
        gather("g1"),
        opaque("op", "b", group="0"),
        wait("g1"),
        mm("c", "op", "w.g1"),
        *(mm(f"extra{i}") for i in range(extra)),
    ]
    return {node.name: node for node in found}


def rank_graph(
    rank: int, order: Sequence[str] = CAPTURED, *, known: bool = True, **changes: Any
) -> OverlapGraph:
    """The nodes of `CAPTURED` in another order; `changes` by node name with `.` left out."""
    by_name = nodes(sum(name.startswith("extra") for name in order))
    for name, change in changes.items():
        by_name[name] = evolve(by_name[name], **change)
    if known:
        places = {name: place for place, name in enumerate(CAPTURED)}
        by_name = {
            name: evolve(node, captured=places.get(name, 100 + len(name)))
            for name, node in by_name.items()
        }
    return graph_of(*(by_name[name] for name in order), rank=rank, outputs=("c",))


def moved(first: str, behind: str) -> list[str]:
    """`CAPTURED` with one node behind another."""
    order = [name for name in CAPTURED if name != first]
    order.insert(order.index(behind) + 1, first)
    return order


def sequence(outcome: RankOutcome) -> list[str]:
    """Names are the same on all ranks here, so they say which operation meets which."""
    assert outcome.graph is not None
    assert_legal(outcome.graph, outcome.order)
    issuing = {node.name for node in outcome.graph.nodes if issues_communication(node)}
    found = [name for name in outcome.order if name in issuing]
    assert found == list(outcome.collectives)
    return found


def is_noted(outcome: RankOutcome) -> bool:
    return any("one order was restored on all of them" in note for note in outcome.notes)


def run(*graphs: OverlapGraph, plugins: Sequence[object] = ()) -> tuple[RankOutcome, ...]:
    outcomes = simulate(graphs, EXACT, plugins)
    assert len({(o.mode, o.why, o.committed) for o in outcomes}) == 1
    return outcomes


ACROSS = moved("g1", "op")


def test_a_gather_that_crossed_an_opaque_op_on_one_rank_is_put_back() -> None:
    first, second = run(rank_graph(0), rank_graph(1, ACROSS))
    assert sequence(first) == sequence(second) == ["g0", "g1", "op"]
    assert first.mode is Mode.IDENTICAL
    assert first.committed
    assert is_noted(first)
    assert is_noted(second)


def test_other_compute_beside_leaves_them_in_slot() -> None:
    first, second = run(rank_graph(0), rank_graph(1, ["extra0", *ACROSS]))
    assert first.mode is Mode.SLOT
    assert "first difference" not in first.why, "the first one is what was restored"
    assert sequence(first) == sequence(second) == ["g0", "g1", "op"]
    assert [g.slot for g in first.gathers] == [g.slot for g in second.gathers]


def test_places_are_told_in_the_order_that_the_rank_came_with() -> None:
    _, second = run(rank_graph(0), rank_graph(1, ACROSS))
    program = [node.name for node in second.graph.nodes] if second.graph else []
    assert program == ACROSS
    for found in second.gathers:
        assert found.source == program.index(found.name)
        assert found.target == second.order.index(found.name)


SWAPPED = ["a", "g1", *(name for name in CAPTURED if name not in ("a", "g1"))]
"""Both gathers have one shape, so the skeletons match place by place."""


def test_equal_gathers_swapped_on_one_rank_do_not_carry_each_others_weights() -> None:
    outcomes = run(rank_graph(0), rank_graph(1, SWAPPED))
    assert [entry.node for entry in outcomes[0].skeleton] == ["g0", "g1", "op"]
    assert [entry.node for entry in outcomes[1].skeleton] == ["g1", "g0", "op"]
    assert outcomes[0].skeleton == outcomes[1].skeleton
    assert sequence(outcomes[0]) == sequence(outcomes[1]) == ["g0", "g1", "op"]
    assert all(map(is_noted, outcomes))


@pytest.mark.parametrize("order", [ACROSS, SWAPPED])
def test_what_moved_alike_on_all_ranks_stays(order: list[str]) -> None:
    first, second = run(rank_graph(0, order), rank_graph(1, order))
    assert first.mode is Mode.IDENTICAL
    assert sequence(first) == sequence(second)
    assert not first.notes
    for group in first.gathers:  # gathers still go earlier, from where they came
        assert group.target <= group.source == order.index(group.name)


def test_orders_that_differ_in_nothing_that_meets_stay() -> None:
    """Told apart by their sizes, the operations match as they are, whatever was captured."""
    changes = {"g1": {"sizes": ((7, 8),)}}
    first, second = rank_graph(0, **changes), rank_graph(1, **changes)
    turned = {"g0": 90, "g1": 80}
    renumbered = [evolve(n, captured=turned.get(n.name, n.captured)) for n in second.nodes]
    outcomes = run(first, evolve(second, nodes=tuple(renumbered)))
    assert outcomes[0].mode is Mode.IDENTICAL
    assert not outcomes[0].notes


def test_an_illegal_order_is_not_restored_and_named(caplog: pytest.LogCaptureFixture) -> None:
    held = rank_graph(1, ACROSS, g1={"after": ("op",)})
    outcomes = run(rank_graph(0), held)
    for outcome in outcomes:
        assert outcome.mode is Mode.PINNED
        program = [node.name for node in outcome.graph.nodes] if outcome.graph else []
        names = [name for name in program if name in ("g0", "g1", "op")]
        assert sequence(outcome) == names
        [note] = outcome.notes
        assert note.startswith(
            "two operations will meet in the wrong order: "
            "_c10d_functional.all_gather_into_tensor.default [64x8] bfloat16 on the group of "
            "ranks 0, 1 (node 'g1' on rank 0, 'g1' on rank 1) comes before mylib::attn_cp [] on "
            "the group of ranks 0, 1 (node 'op' on rank 0, 'op' on rank 1) on rank 0, and behind"
        )
        assert "reorder_for_locality=False" in note
        assert "two operations will meet in the wrong order" in outcome.why
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1


def test_equal_gathers_that_stay_swapped_are_never_taken_for_alike() -> None:
    held = rank_graph(1, SWAPPED, g0={"after": ("g1",)})
    outcomes = run(rank_graph(0), held)
    assert outcomes[0].mode is Mode.PINNED
    assert "equal operations come in different orders" in outcomes[0].why
    assert "two operations will meet in the wrong order" in outcomes[0].notes[0]
    assert sequence(outcomes[1]) == ["g1", "g0", "op"]


def test_without_captured_places_operations_of_one_kind_each_can_be_told_apart() -> None:
    changes = {"g1": {"sizes": ((7, 8),)}}
    for known in ((False, False), (True, False)):
        graphs = [rank_graph(0, known=known[0], **changes)]
        graphs.append(rank_graph(1, ACROSS, known=known[1], **changes))
        first, second = run(*graphs)
        assert first.mode is Mode.IDENTICAL
        assert sequence(first) == sequence(second) == ["g0", "g1", "op"]
        assert is_noted(first)


def test_without_captured_places_the_first_order_that_is_legal_everywhere_is_taken() -> None:
    changes = {"g1": {"sizes": ((7, 8),)}}
    graphs = [
        rank_graph(0, known=False, **changes),
        rank_graph(1, ACROSS, known=False, g1={"after": ("op",), **changes["g1"]}),
    ]
    first, second = run(*graphs)
    assert sequence(first) == sequence(second) == ["g0", "op", "g1"]


def test_without_captured_places_equal_operations_are_not_guessed() -> None:
    outcomes = run(rank_graph(0, known=False), rank_graph(1, ACROSS, known=False))
    assert outcomes[0].mode is Mode.PINNED
    assert "two operations will meet in the wrong order" in outcomes[0].notes[0]


def test_gathers_on_two_groups_that_a_symbol_makes_alike_are_not_swapped() -> None:
    """Either could be the other: the groups have the same ranks, and `s0` hides what is 1."""

    def swapped(rank: int) -> OverlapGraph:
        pair = [
            evolve(gather("a", sizes=(("s0",),), group="g1"), captured=0),
            evolve(gather("b", sizes=((1,),), group="g0"), captured=1),
        ]
        rest = [wait("a"), wait("b"), mm("c", "w.a", "w.b")]
        behind = [evolve(node, captured=2 + i) for i, node in enumerate(rest)]
        found = [*pair[:: -1 if rank else 1], *behind]
        return graph_of(*found, rank=rank, symbols={"s0": 4})

    outcomes = simulate([swapped(0), swapped(1)])
    assert [sequence(outcome) for outcome in outcomes] == [["a", "b"]] * 2
    assert all(map(is_noted, outcomes))


def test_a_mesh_whose_ranks_captured_its_groups_otherwise_stays_as_it_is() -> None:
    """Program order is one on all ranks; taking the captured ones would close a cycle of four."""
    rows = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    columns = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}

    def on(rank: int) -> OverlapGraph:
        first, second = (1, 0) if rank in (1, 2) else (0, 1)
        return graph_of(
            mm("a"),
            evolve(gather("A", group="row"), captured=first, group_ranks=rows[rank]),
            evolve(gather("B", group="column"), captured=second, group_ranks=columns[rank]),
            wait("A"),
            mm("b", "a", "w.A"),
            wait("B"),
            mm("c", "b", "w.B"),
            rank=rank,
            world_size=4,
        )

    outcomes = simulate([on(rank) for rank in range(4)], config=EXACT)
    assert [sequence(outcome) for outcome in outcomes] == [["A", "B"]] * 4
    assert not any(map(is_noted, outcomes))


def test_other_communication_on_one_rank_alone_crosses_nothing() -> None:
    alone = evolve(opaque("alone", "b", group="own"), group_ranks=(1,))
    base = rank_graph(1)
    more = graph_of(*base.nodes[:4], alone, *base.nodes[4:], rank=1, outputs=("c",))
    outcomes = run(rank_graph(0), more)
    assert outcomes[0].mode is Mode.PINNED
    assert not outcomes[0].notes


class Fails:
    """Raises once gathers have been placed."""

    overlap_plugin_name = "fails"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @oc.hookimpl
    def overlap_adjust_plan(self, plan: oc.Plan, graph: OverlapGraph) -> None:
        if graph.rank == self.rank:
            raise RuntimeError("cannot bear it")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_placement_that_fails_does_not_lead_back_to_orders_that_had_parted(rank: int) -> None:
    first, second = run(rank_graph(0), rank_graph(1, ACROSS), plugins=[Fails(rank)])
    assert first.committed
    assert first.mode is Mode.PINNED
    assert first.why.startswith("one order of communication was restored, no gather moved: ")
    assert "cannot bear it" in first.why
    assert sequence(first) == sequence(second) == ["g0", "g1", "op"]
    assert list(first.order) == list(CAPTURED)
    assert is_noted(second)


class AlwaysAborts:
    """A ladder that never moves anything."""

    overlap_plugin_name = "always_aborts"

    @oc.hookimpl
    def overlap_choose_mode(self, votes: tuple[oc.Vote, ...]) -> ModeDecision:
        return ModeDecision(mode=Mode.ABORT, why="not today")


def test_a_ladder_that_aborts_still_leaves_one_order() -> None:
    config = oc.OverlapConfig(mode_ladder="always_aborts")
    graphs = [rank_graph(0), rank_graph(1, ACROSS)]
    first, second = simulate(graphs, config, [AlwaysAborts()])
    assert (first.mode, first.committed) == (Mode.PINNED, True)
    assert first.why == "one order of communication was restored, no gather moved: not today"
    assert first.notes[0].endswith(
        "one order was restored on all of them, and nothing was moved beyond it: the mode is "
        "pinned and not abort, because the order that is committed is not program order"
    )
    assert sequence(first) == sequence(second) == ["g0", "g1", "op"]
    same = simulate([rank_graph(0), rank_graph(1)], config, [AlwaysAborts()])
    assert (same[0].mode, same[0].committed) == (Mode.ABORT, False)


class Pessimist(TimelineModel):
    """Predicts a loss for every order but program order."""

    program_order = Timeline(exposed_ns={}, total_ns=0)

    def run(self, order: Sequence[int]) -> Timeline:
        """One nanosecond more for each node that is not in its place."""
        worse = sum(place != position for place, position in enumerate(order))
        return Timeline(exposed_ns=dict.fromkeys(order, worse), total_ns=worse)


def test_a_loss_is_measured_against_the_restored_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap_core.views.TimelineModel", Pessimist)
    views = [hosted(rank_graph(0)), hosted(rank_graph(1, ACROSS))]
    first, second = simulate_views(views)
    assert first.committed
    assert "more would be exposed" in first.why
    assert sequence(first) == sequence(second) == ["g0", "g1", "op"]


def until(view: RankView, step: str, peers: list[RankView]) -> list[Any]:
    """The protocols of all ranks, each waiting at the first step of a name."""
    protocols = [negotiate(one, (0, 1)) for one in (view, *peers)]
    requests = [next(protocol) for protocol in protocols]
    while requests[0].step != step:
        payloads = tuple(request.payload for request in requests)
        requests = [protocol.send(payloads) for protocol in protocols]
    return protocols


def finish(protocol: Any, verdict: bytes) -> RankOutcome:
    with pytest.raises(StopIteration) as stop:
        protocol.send((verdict,))
    outcome: RankOutcome = stop.value.value
    return outcome


def test_a_peer_that_is_lost_after_the_agreement_does_not_undo_it() -> None:
    """Nor does it matter that one rank never heard what the other one answered."""
    views = [hosted(rank_graph(0)), hosted(rank_graph(1, ACROSS))]
    protocols = until(views[0], "order/restored/digest", views[1:])
    deaf = protocols[1].throw(DeadlineError("rank 0 is late"))
    assert isinstance(deaf, Decide)
    assert deaf.payload == b"late rank 0 is late"
    protocols = until(views[0], "proposal/first/digest", views[1:])
    wish = protocols[0].throw(DeadlineError("rank 1 is late"))
    assert isinstance(wish, Decide)
    protocols[1] = until(views[0], "order/restored/digest", views[1:])[1]
    protocols[1].throw(DeadlineError("rank 0 is late"))
    outcomes = [finish(protocol, wish.payload) for protocol in protocols]
    assert [sequence(outcome) for outcome in outcomes] == [["g0", "g1", "op"]] * 2
    assert all(outcome.committed for outcome in outcomes)
    assert {outcome.why for outcome in outcomes} == {
        "one order of communication was restored, no gather moved: rank 1 is late"
    }


def test_program_orders_that_parted_are_kept_aloud(caplog: pytest.LogCaptureFixture) -> None:
    views = [hosted(rank_graph(0)), hosted(rank_graph(1, ACROSS))]
    protocols = until(views[0], "proposal/first/digest", views[1:])
    for protocol in protocols:
        protocol.throw(DeadlineError("somebody is late"))
    outcomes = [finish(protocol, b"keep somebody is late") for protocol in protocols]
    for outcome in outcomes:
        assert (outcome.mode, outcome.committed) == (Mode.ABORT, False)
        assert "comes in different orders on the ranks, and stays so" in outcome.notes[0]
    assert caplog.text.count("and stays so") == 1


def shuffle(graph: OverlapGraph, choose: Any) -> OverlapGraph:
    """The graph in a random legal order, each node with its place of before."""
    needed = [len(before) for before in graph.predecessors]
    ready = [position for position, count in enumerate(needed) if not count]
    order: list[int] = []
    while ready:
        position = ready.pop(choose(len(ready)))
        order.append(position)
        for later in graph.successors[position]:
            needed[later] -= 1
            if not needed[later]:
                ready.append(later)
    return evolve(graph, nodes=tuple(evolve(graph.nodes[p], captured=p) for p in order))


@given(rank_sets("compute") | rank_sets("identical"), st.data())
def test_whatever_happened_to_the_captured_order_ranks_end_with_one(
    ranks: RankSet, data: st.DataObject
) -> None:
    def choose(count: int) -> int:
        # Most nodes keep their order, so that some skeletons match and some do not.
        return data.draw(st.integers(0, count - 1)) if count > 1 else 0

    shuffled = [shuffle(graph, choose) for graph in ranks.graphs]
    outcomes = simulate(shuffled)
    by_scope = itertools.groupby(outcomes, key=lambda outcome: outcome.scope)
    for _, scope in by_scope:
        found = set()
        for outcome in scope:
            event(f"{outcome.mode}, {'restored' if is_noted(outcome) else 'as it came'}")
            assert outcome.graph is not None
            assert_legal(outcome.graph, outcome.order)
            issuing = [n for n in outcome.graph.nodes if issues_communication(n)]
            issuing.sort(key=lambda node: node.captured or 0)
            ordinal = {node.name: number for number, node in enumerate(issuing)}
            found.add(tuple(ordinal[name] for name in outcome.order if name in ordinal))
        assert len(found) == 1
