"""Where a rank would launch its gathers, one known case each. Times are nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from overlap_core import Node, OverlapConfig
from overlap_core.costs import resolve_costs
from overlap_core.placement import (
    PeakBound,
    Plan,
    TimelineModel,
    Verdict,
    align,
    build_frame,
    build_memory,
    propose,
    rebuild_order,
)

from ..small_graphs import cast, gather, graph_of, mm, opaque, reduce_scatter, skeleton_of, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

EXACT = OverlapConfig(contention=1, slack_ns=0)


class Placed:
    """What one rank proposes for a few nodes, and what it is predicted to take."""

    def __init__(
        self,
        *nodes: Node,
        config: OverlapConfig = EXACT,
        pinned: bool = False,
        peak_bytes: int | None = None,
    ) -> None:
        graph = graph_of(*nodes)
        peak = None
        if peak_bytes is not None:
            peak = PeakBound(memory=build_memory(graph), nbytes=peak_bytes, growth_bytes=0)
        skeleton = skeleton_of(graph)
        costs = resolve_costs(graph, lambda request: None)
        frame = build_frame(graph, skeleton)
        self.frame = frame
        self.plan = propose(graph, skeleton, frame, costs, config, pinned=pinned, peak=peak)
        order = rebuild_order(frame, [p.boundary for p in self.plan.placements])
        self.order = " ".join(nodes[p].name for p in order)
        model = TimelineModel(graph, skeleton, costs)
        self.exposed_ns = {
            nodes[p].name: ns for p, ns in sorted(model.run(order).exposed_ns.items())
        }
        self.verdicts = {p.gather: p.verdict for p in self.plan.placements}


def layers(count: int, ns: int = 100, gather_ns: int = 100) -> list[Node]:
    """Gather, wait and matmul, `count` times."""
    nodes: list[Node] = []
    before = "x"
    for i in range(count):
        nodes += [
            gather(f"g{i}", ns=gather_ns),
            wait(f"g{i}"),
            mm(f"a{i}", before, f"w.g{i}", ns=ns),
        ]
        before = f"a{i}"
    return nodes


def test_a_gather_starts_as_late_as_compute_still_covers_it() -> None:
    """300 ns of compute for 100 ns of gather: only the last matmul is needed."""
    placed = Placed(mm("a"), mm("b"), mm("c"), gather("g"), wait("g"), mm("d", "w.g"))
    assert placed.order == "a b g c w.g d"
    assert placed.exposed_ns == {}
    assert placed.verdicts == {"g": Verdict.HIDDEN}


def test_contention_and_slack_start_it_earlier() -> None:
    nodes = (mm("a"), mm("b"), mm("c"), gather("g"), wait("g"), mm("d", "w.g"))
    assert Placed(*nodes, config=evolve(EXACT, contention=1.5)).order.startswith("a g b c")
    assert Placed(*nodes, config=evolve(EXACT, slack_ns=150)).order.startswith("g a b c")


def test_time_counts_and_not_the_number_of_nodes() -> None:
    short = [mm(f"s{i}", ns=1) for i in range(50)]
    placed = Placed(mm("long", ns=100), *short, gather("g"), wait("g"), mm("d", "w.g"))
    assert placed.order.startswith("g long s0")
    placed = Placed(*short, mm("long", ns=100), gather("g"), wait("g"), mm("d", "w.g"))
    assert placed.order.endswith("s49 g long w.g d")


def test_compute_that_lies_between_launch_and_wait_already_is_used_first() -> None:
    placed = Placed(mm("a"), mm("b"), gather("g"), mm("c"), wait("g"), mm("d", "w.g"))
    assert placed.order == "a b g c w.g d"


def test_one_window_serves_one_gather() -> None:
    """100 ns of gather behind each 100 ns of compute: every gather moves up by one layer."""
    placed = Placed(*layers(4))
    assert placed.order == "g0 w.g0 g1 a0 w.g1 g2 a1 w.g2 g3 a2 w.g3 a3"
    assert placed.exposed_ns == {"g0": 100}
    assert placed.verdicts["g0"] is Verdict.COMPUTE_LIMITED
    assert placed.verdicts["g3"] is Verdict.HIDDEN


def test_a_chain_of_short_layers_backs_up_to_the_head() -> None:
    """Too little compute everywhere: all start at once, and the sum is what stays exposed."""
    placed = Placed(*layers(3, ns=40))
    assert placed.order.startswith("g0 g1 g2 w.g0")
    assert sum(placed.exposed_ns.values()) == 300 - 40 - 40


def test_what_a_long_kernel_leaves_over_serves_a_gather_before_its_end() -> None:
    """Kernel `long` covers both gathers, one after the other; the second needs 100 of its 250."""
    placed = Placed(
        mm("long", ns=250), gather("g"), gather("h"), wait("g"), wait("h"), mm("b", "w.g", "w.h")
    )
    assert placed.order == "g h long w.g w.h b"
    assert placed.exposed_ns == {}


def test_what_a_long_kernel_leaves_over_is_lost_for_a_gather_that_is_needed_before() -> None:
    """`g` is waited for before `long` begins, so the room that `h` leaves there is no use to it."""
    nodes = (
        mm("a", ns=30),
        gather("g"),
        wait("g"),
        mm("long", "w.g", ns=250),
        gather("h"),
        wait("h"),
        mm("b", "w.h"),
    )
    placed = Placed(*nodes)
    assert placed.order == "g a w.g h long w.h b"
    assert placed.exposed_ns == {"g": 70}


def test_nothing_hides_at_the_head_of_the_graph() -> None:
    placed = Placed(gather("g"), wait("g"), mm("a", "w.g"))
    assert placed.order == "g w.g a"
    assert placed.verdicts == {"g": Verdict.COMPUTE_LIMITED}


def test_a_gather_is_never_launched_later_than_in_program_order() -> None:
    nodes = (gather("g"), mm("a", ns=5000), wait("g"), mm("b", "w.g"))
    assert Placed(*nodes).order == "g a w.g b"


def test_producers_come_along_and_floors_hold() -> None:
    nodes = (mm("a"), mm("b"), cast("c", "shard"), gather("g", "c"), wait("g"), mm("d", "w.g"))
    assert Placed(*nodes).order == "a c g b w.g d"
    held = (mm("a"), mm("b"), mm("e"), gather("g", after=("b",), ns=900), wait("g"), mm("d", "w.g"))
    placed = Placed(*held)
    assert placed.order == "a b g e w.g d"
    assert placed.plan.placements[0].floor == 2


def test_an_opaque_op_on_the_same_group_is_no_window_and_no_obstacle() -> None:
    """The gather must be done before the op starts, or start after it: it needs the queue."""
    attention = opaque("attn", "a", ns=300, group="0")
    placed = Placed(mm("a"), attention, gather("g"), wait("g"), mm("d", "attn", "w.g"))
    assert placed.order == "g a attn w.g d"
    assert placed.exposed_ns == {}
    behind = Placed(
        mm("a", ns=10), attention, mm("b", ns=150), gather("g"), wait("g"), mm("d", "b", "w.g")
    )
    assert behind.order == "a attn g b w.g d"


def test_an_opaque_op_on_another_group_hides_with_the_part_that_leaves_the_network_alone() -> None:
    def order(network_ns: int | None) -> str:
        attention = opaque("attn", "a", ns=150, group="1", network_ns=network_ns)
        nodes = (mm("a"), attention, gather("g"), wait("g"), mm("d", "attn", "w.g"))
        return Placed(*nodes).order

    assert order(50) == "a g attn w.g d"
    assert order(51) == "g a attn w.g d"
    assert order(None) == "g a attn w.g d"  # half of it


def test_a_gather_does_not_queue_behind_a_reduce_scatter() -> None:
    """Launched right after the reduce-scatter it would start 500 late; before it, it is in time."""
    nodes = (
        mm("a", ns=200),
        reduce_scatter("r", "a", ns=500),
        mm("b", "a", ns=150),
        gather("g"),
        wait("g"),
        mm("c", "b", "w.g", ns=600),
        wait("r"),
        mm("d", "c", "w.r"),
    )
    placed = Placed(*nodes)
    assert placed.exposed_ns == {}
    assert placed.order.index("g") < placed.order.index("r")
    other = [evolve(n, group="1") if n.name == "r" else n for n in nodes]
    assert Placed(*other).order.startswith("a r g b w.g")


def test_a_collective_that_is_awaited_at_once_is_no_queue() -> None:
    """The stream blocks until it is done, so a gather behind it starts in time."""
    nodes = (
        mm("a", ns=1_000),
        reduce_scatter("r", "a", ns=300),
        wait("r"),
        mm("b", "w.r", ns=1_000),
        gather("g", ns=900),
        wait("g"),
        mm("c", "b", "w.g"),
    )
    placed = Placed(*nodes)
    assert placed.order == "a r w.r g b w.g c"
    assert placed.exposed_ns == {"r": 300}


def test_gathers_of_two_groups_share_the_network_and_keep_their_order() -> None:
    nodes = (
        mm("a", ns=200),
        gather("g", group="0"),
        gather("h", group="1"),
        wait("g"),
        wait("h"),
        mm("b", "w.g", "w.h"),
    )
    placed = Placed(*nodes)
    assert placed.order == "g h a w.g w.h b"
    assert placed.exposed_ns == {}


def test_memory_in_flight_holds_a_gather_back_until_the_one_before_is_used() -> None:
    nodes = layers(3, ns=100, gather_ns=150)
    free = Placed(*nodes)
    assert free.order.startswith("g0 g1 w.g0 g2")
    bound = Placed(*nodes, config=evolve(EXACT, max_in_flight_bytes=19))
    assert bound.order == "g0 w.g0 g1 a0 w.g1 g2 a1 w.g2 a2"
    assert bound.verdicts["g2"] is Verdict.MEMORY_LIMITED
    # A gather that does not fit at all is as early as no other is in flight.
    assert Placed(*nodes, config=evolve(EXACT, max_in_flight_bytes=1)).order == bound.order
    unknown = [evolve(n, nbytes=None) for n in nodes]
    assert Placed(*unknown, config=evolve(EXACT, max_in_flight_bytes=1)).order == free.order


def test_a_gather_is_held_where_it_would_raise_the_peak_of_memory() -> None:
    """What b makes and c reads takes 40 bytes, the gather 10."""
    nodes = (
        mm("a", ns=1_000),
        evolve(mm("b", "a"), sizes=((10,),), dtypes=("float32",)),
        mm("c", "b", ns=60),
        mm("d", ns=10),
        gather("g"),
        wait("g"),
        mm("e", "w.g"),
    )
    assert Placed(*nodes).order == "a g b c d w.g e"
    assert Placed(*nodes, peak_bytes=50).order == "a g b c d w.g e"
    for nbytes in (49, 40):
        held = Placed(*nodes, peak_bytes=nbytes)
        assert held.order == "a b c g d w.g e"
        assert held.verdicts == {"g": Verdict.MEMORY_LIMITED}
        assert held.exposed_ns == {"g": 90}
    # What program order allocates cannot be less.
    assert Placed(*nodes, peak_bytes=9).order == "a b c d g w.g e"


def test_gathers_that_are_in_flight_together_count_together() -> None:
    nodes = (mm("a", ns=150), gather("g"), gather("h"), wait("g"), mm("b", "w.g", ns=10))
    nodes = (*nodes, wait("h"), mm("c", "w.h"))
    assert Placed(*nodes).order == "g h a w.g b w.h c"
    # In program order both are allocated at once too, but not while a runs.
    assert Placed(*nodes, peak_bytes=20).order == "g h a w.g b w.h c"
    assert Placed(*nodes, peak_bytes=19).order == "a g h w.g b w.h c"


def test_a_gather_that_was_raised_takes_no_memory_where_it_is_not_launched() -> None:
    """r is placed first and has to follow q, which fits late only; p fits where r no longer is."""
    large = evolve(mm("m2", ns=1_000), sizes=((25,),), dtypes=("float32",))
    nodes = [mm("m0", ns=1_000), mm("m1", ns=1_000), large, mm("m3", "m2", ns=1_000)]
    nodes.append(mm("m4", ns=100))
    for name, nbytes in (("p", 10), ("q", 60), ("r", 10)):
        nodes += [gather(name, ns=900, nbytes=nbytes), wait(name)]
        nodes.append(mm(f"u{name}", f"w.{name}", ns=10))
    assert Placed(*nodes).order.startswith("m0 p m1 q m2 r m3 m4 w.p")
    placed = Placed(*nodes, peak_bytes=115)
    assert placed.order.startswith("m0 m1 m2 p m3 q r m4 w.p")
    assert placed.verdicts["p"] is Verdict.HIDDEN
    assert placed.verdicts["q"] is placed.verdicts["r"] is Verdict.MEMORY_LIMITED


def test_pinned_stays_behind_the_communication_that_it_follows() -> None:
    nodes = (
        mm("a"),
        mm("b"),
        reduce_scatter("r", "b"),
        mm("c"),
        mm("d"),
        gather("g", ns=900),
        wait("g"),
        wait("r"),
        mm("e", "w.r", "w.g"),
    )
    assert Placed(*nodes).order.startswith("g a b r")
    pinned = Placed(*nodes, pinned=True)
    assert pinned.order.startswith("a b r g c d")
    assert pinned.verdicts == {"g": Verdict.PINNED}


def test_many_uses_of_the_group_and_no_room_between_them() -> None:
    """However many stretches are too short, the gather goes into the longest one it looked at."""
    nodes: list[Node] = [mm("head", ns=1000)]
    for i in range(6):
        nodes += [opaque(f"o{i}", "head", ns=10, group="0"), mm(f"m{i}", ns=60 if i == 3 else 20)]
    nodes += [gather("g", ns=50), wait("g"), mm("end", "w.g")]
    assert " o3 g m3 " in Placed(*nodes).order


def _uses_of_the_group(count: int, lengths: Sequence[int]) -> list[Node]:
    """A gather behind many short uses of its own group, with little compute between them."""
    nodes: list[Node] = [mm("head", ns=5000)]
    for i in range(count):
        nodes += [
            opaque(f"o{i}", "head", ns=10, group="0"),
            mm(f"m{i}", ns=lengths[i % len(lengths)]),
        ]
    return [*nodes, gather("g", ns=900), wait("g"), mm("end", "w.g")]


@pytest.mark.parametrize(
    "nodes",
    [layers(5, ns=70), _uses_of_the_group(30, [50]), _uses_of_the_group(30, [20, 30, 40, 50, 60])],
)
def test_placing_twice_is_placing_once(nodes: list[Node]) -> None:
    graph = graph_of(*nodes)
    first = Placed(*nodes)
    again = Placed(*(nodes[graph.index[name]] for name in first.order.split()))
    assert again.order == first.order


def test_aligning_raises_what_a_predecessor_overtook() -> None:
    placed = Placed(*layers(3))
    first, second, third = placed.plan.placements
    later = Plan(placements=(first, evolve(second, boundary=third.boundary + 1), third))
    assert [p.boundary for p in align(later, placed.frame).placements] == [
        first.boundary,
        third.boundary + 1,
        third.boundary + 1,
    ]
