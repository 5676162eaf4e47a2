"""Which gathers become one call: partitions, and what holds for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st

from overlap_core import OverlapConfig, simulate
from overlap_core.coalescing import Choice, choose_labels, decode_labels, encode_labels
from overlap_core.costs import Machine
from overlap_core.errors import ConfigError, DivergenceError
from overlap_core.following import agreement_of, follow
from overlap_core.hookspecs import hookimpl
from overlap_core.host import PluginHost
from overlap_core.placement import (
    Timeline,
    TimelineModel,
    alone,
    call_ns,
    cut_illegal,
    form_units,
    peak_bytes,
    rebuild_order,
    refine,
)
from overlap_core.simulation import simulate_views
from overlap_core.testing import assert_legal
from overlap_core.views import coalesced, prepare, propose_plan, with_costs

from .oracles import bytes_in_flight
from .pipeline_views import EXACT, hosted
from .small_graphs import cast, gather, graph_of, mm, on_ranks, opaque, reduce_scatter, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core import Node, OverlapGraph
    from overlap_core.outcome import RankOutcome
    from overlap_core.placement import Plan
    from overlap_core.views import RankView

ALL = 1 << 40
HOST = Machine(kernel_host_ns=1, collective_host_ns=200, member_host_ns=10, wait_host_ns=1)


def layers(
    count: int, *, nbytes: int = 10, groups: int = 1, ns: int = 100, compute_ns: int = 0
) -> list[Node]:
    """Gather, wait and use of some weights; a gather takes as long as a layer computes."""
    nodes: list[Node] = []
    before = ""
    for i in range(count):
        launch = gather(f"g{i}", ns=ns, nbytes=nbytes, group=str(i % groups))
        use = mm(f"a{i}", f"w.g{i}", *([before] if before else []), ns=compute_ns or ns)
        nodes += [launch, wait(f"g{i}"), use]
        before = f"a{i}"
    return nodes


def view_of(nodes: list[Node], config: OverlapConfig = EXACT) -> RankView:
    return hosted(graph_of(*nodes), config)


def partition(view: RankView, region_bytes: int, head_bytes: int = 0) -> tuple[int, ...]:
    assert view.skeleton is not None
    return form_units(view.graph, view.skeleton.gathers, region_bytes, head_bytes)


def calls(outcome: RankOutcome) -> list[list[str]]:
    assert outcome.graph is not None
    names = [node.name for node in outcome.graph.nodes]
    return [[names[p] for p in call.launches] for call in outcome.coalesced]


def test_a_region_holds_what_fits() -> None:
    view = view_of(layers(5))
    assert partition(view, 20) == (0, 0, 2, 2, 4)
    assert partition(view, 29) == (0, 0, 2, 2, 4)
    assert partition(view, 5) == (0, 1, 2, 3, 4)


def test_the_head_starts_small() -> None:
    assert partition(view_of(layers(8)), 40, 10) == (0, 1, 1, 3, 3, 3, 3, 7)


def test_a_call_has_one_group_and_one_dtype() -> None:
    assert partition(view_of(layers(6, groups=2)), 40) == (0, 1, 0, 1, 4, 5)
    mixed = [
        evolve(node, dtypes=("float32",)) if node.name in ("g1", "g3") else node
        for node in layers(4)
    ]
    assert partition(view_of(mixed), ALL) == (0, 1, 0, 1)


def test_gathers_of_unknown_size_or_of_another_kind_stay_alone() -> None:
    nodes = layers(4)
    nodes[3] = evolve(nodes[3], nbytes=None)
    nodes[6] = evolve(nodes[6], op="_c10d_functional.all_gather_into_tensor_out.default")
    assert partition(view_of(nodes), ALL) == (0, 1, 2, 0)


def test_what_must_stay_behind_the_first_layer_cannot_join_its_gather() -> None:
    nodes = layers(2)
    nodes[3] = evolve(nodes[3], after=("a0",))
    view = view_of(nodes)
    assert view.frame is not None
    assert cut_illegal((0, 0), view.frame, ()) == (0, 1)


def test_ranks_coalesce_what_all_of_them_would() -> None:
    assert refine([(0, 0, 2, 2), (0, 1, 1, 1)]) == (0, 1, 2, 2)
    assert decode_labels([encode_labels((0, 0, 0)), encode_labels((0, 0, 2))], 3) == (0, 0, 2)
    assert decode_labels([b"nonsense", encode_labels((0, 0))], 2) == alone(2)
    assert decode_labels([encode_labels((0, 0)), encode_labels((0, 0, 0))], 2) == alone(2)


def test_a_call_starts_up_once() -> None:
    assert call_ns([50, 50, 80], 40) == 40 + 10 + 10 + 40
    assert call_ns([5, 90], 40) == 90  # so it takes 5 at most


def test_a_fixed_size_makes_one_call_of_each_region() -> None:
    [outcome] = simulate([graph_of(*layers(4))], OverlapConfig(coalesce=20))
    assert calls(outcome) == [["g0", "g1"], ["g2", "g3"]]
    assert [g.call for g in outcome.gathers] == [0, 0, 1, 1]
    assert outcome.order[:2] == ("g0", "g1")
    assert outcome.gathers[1].why.endswith("; in one call with another gather")


def test_off_and_auto_leave_a_graph_without_host_times_alone() -> None:
    for coalesce in ("off", "auto"):
        [outcome] = simulate([graph_of(*layers(4))], OverlapConfig(coalesce=coalesce))
        assert outcome.coalesced == ()


@pytest.mark.parametrize("value", ["on", 0, -1, True, 1.5, None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"coalesce=.*'auto', 'off' or a number of bytes"):
        OverlapConfig(coalesce=value)  # type: ignore[arg-type]


def test_auto_coalesces_where_the_host_is_the_bottleneck() -> None:
    view = view_of(layers(12, nbytes=1 << 20, ns=50))
    slow = with_costs(view, view.costs, HOST)
    choice = choose_labels(slow)
    assert len(set(choice.labels)) < 12
    assert choice.region_bytes > 0
    assert choose_labels(view) == Choice(labels=alone(12))


def test_auto_leaves_calls_alone_that_hide_better_by_themselves() -> None:
    """Much compute behind each gather, and a host that costs next to nothing."""
    view = view_of(layers(6, nbytes=1 << 20, ns=100_000))
    idle = with_costs(view, view.costs, evolve(HOST, collective_host_ns=1, member_host_ns=1))
    labels = choose_labels(idle).labels
    assert labels[0] == 0
    assert labels[1] == 1  # the head is not made longer


def test_of_sizes_that_take_as_long_the_one_with_the_least_memory_is_chosen() -> None:
    """The host is late with separate gathers, and in time with two or more in one call."""
    nodes = layers(48, nbytes=8 << 20, ns=10_000, compute_ns=100_000)
    view = view_of(nodes)
    view = with_costs(view, view.costs, evolve(HOST, collective_host_ns=150_000))
    choice = choose_labels(view)
    total_ns, peak = predict(coalesced(view, choice.labels, choice.region_bytes))
    assert len(set(choice.labels)) < 48
    for size in (4, 6, 8):
        labels = [i // size * size for i in range(48)]
        other_ns, other_peak = predict(coalesced(view, labels, size * (8 << 20)))
        assert total_ns <= 1.01 * other_ns <= 1.01**2 * total_ns
        assert peak <= other_peak


def test_calls_fit_the_bound_on_the_peak_of_memory_and_a_note_says_what_that_costs() -> None:
    nodes = layers(48, nbytes=8 << 20, ns=10_000, compute_ns=100_000)
    graph = evolve(graph_of(*nodes), input_bytes=0)
    peaks, steps = [], []
    for growth in (None, 20, 0):
        config = evolve(EXACT, coalesce="auto", max_peak_growth=growth)
        view = hosted(graph, config)
        view = with_costs(view, view.costs, evolve(HOST, collective_host_ns=400_000))
        choice = choose_labels(view)
        step_ns, peak = predict(coalesced(view, choice.labels, choice.region_bytes))
        peaks.append(peak)
        steps.append(step_ns)
        if view.peak is not None:
            assert peak <= view.peak.nbytes
    program = peak_bytes(graph, range(len(graph.nodes)))
    assert peaks[0] >= peaks[1] > peaks[2]
    assert peaks[2] <= program + (32 << 20)
    assert steps[2] > steps[0]
    gain = f"{(steps[2] - steps[0]) / 1000:.0f} µs"
    assert choice.note == (
        f"memory: the step is predicted to take {gain} less with other calls, but the peak would "
        "grow by more than 32 MiB (max_peak_growth)"
    )


def test_calls_that_were_agreed_on_earlier_bring_their_bound_on_memory() -> None:
    """What a rank follows says which gathers are one call, but not what size was asked for."""
    view = view_of(layers(8, nbytes=80 << 20))
    assert view.bound_bytes == 2 * (80 << 20)
    assert coalesced(view, [0, 0, 2, 2, 2, 5, 5, 5]).bound_bytes == 2 * (240 << 20)


def predict(view: RankView) -> tuple[int, int]:
    """Time of a step and its peak of memory, as this rank would have it."""
    assert view.frame is not None
    assert view.model is not None
    plan = propose_plan(view, pinned=False)
    order = rebuild_order(view.frame, [p.boundary for p in plan.placements])
    return view.model.run(order).total_ns, peak_bytes(view.graph, order)


class Holder:
    """A policy that launches one gather where program order does."""

    overlap_plugin_name = "holder"

    @hookimpl
    def overlap_adjust_plan(self, plan: Plan, graph: OverlapGraph) -> Plan:
        return evolve(
            plan,
            placements=tuple(
                evolve(p, boundary=p.original) if p.gather == "g2" else p for p in plan.placements
            ),
        )


def test_a_gather_that_a_policy_holds_back_stays_alone() -> None:
    config = evolve(EXACT, coalesce=ALL)
    [outcome] = simulate([graph_of(*layers(4))], config, plugins=[Holder()])
    assert calls(outcome) == [["g0", "g1", "g3"]]
    order = list(outcome.order)
    assert order.index("a1") < order.index("g2") < order.index("w.g2")


def test_a_gather_for_which_no_call_can_be_made_stays_alone() -> None:
    config = evolve(EXACT, coalesce=ALL)
    host = PluginHost.discover(config)
    view = prepare(graph_of(*layers(3)), config, host, keep_alone=frozenset({"g1"}))
    [outcome] = simulate_views([view])
    assert calls(outcome) == [["g0", "g2"]]


def test_one_rank_that_cannot_is_enough() -> None:
    config = evolve(EXACT, coalesce=ALL)
    host = PluginHost.discover(config)
    graphs = on_ranks(graph_of(*layers(3)), 2)
    views = [
        prepare(graphs[0], config, host),
        prepare(graphs[1], config, host, keep_alone=frozenset({"g2"})),
    ]
    outcomes = simulate_views(views)
    assert [calls(outcome) for outcome in outcomes] == [[["g0", "g1"]]] * 2


@st.composite
def models(draw: st.DrawFn) -> list[OverlapGraph]:
    """A model on two ranks: layers with weights of several groups, dtypes and sizes.

    Between the layers lie reduce-scatters and opaque ops, and some launches lie in the layer
    before; the ranks differ in how much they compute, or not at all.
    """
    few = st.integers(0, 3)
    weights = draw(
        st.lists(
            st.tuples(
                st.sampled_from("0001"),
                st.sampled_from(("bfloat16", "bfloat16", "float32")),
                st.none() | st.integers(0, 4096),
                st.integers(0, 200),
                st.sampled_from(("direct", "early", "cast", "scatter", "opaque", "changed")),
            ),
            min_size=2,
            max_size=9,
        )
    )
    more = draw(st.tuples(few, few) | few.map(lambda n: (n, n)))
    return [_model(weights, extra, rank) for rank, extra in enumerate(more)]


def _model(weights: list[Any], extra: int, rank: int) -> OverlapGraph:
    nodes = [mm(f"extra{i}", "x") for i in range(extra)]
    start = before = len(nodes)
    for i, (group, dtype, nbytes, ns, style) in enumerate(weights):
        before, start = start, len(nodes)
        if style == "cast":
            nodes.append(cast(f"c{i}", f"shard_{i}"))
        source = f"c{i}" if style == "cast" else f"shard_{i}"
        launch = gather(f"g{i}", source, ns=ns, nbytes=nbytes, group=group, dtypes=(dtype,))
        inputs = (f"w.g{i}", f"a{i - 1}" if i else "x")
        changed = {"mutates": (f"shard_{i + 1}",)} if style == "changed" else {}
        nodes.insert(before if style == "early" else len(nodes), launch)
        nodes += [wait(f"g{i}"), mm(f"a{i}", *inputs, ns=90, **changed)]
        if style == "scatter":
            nodes += [reduce_scatter(f"r{i}", f"a{i}", group=group), wait(f"r{i}")]
        if style == "opaque":
            nodes.append(opaque(f"o{i}", f"a{i}", issues_collective=True))
    return on_ranks(graph_of(*nodes), 2)[rank]


class AgainstCalls(TimelineModel):
    """Predicts that coalesced calls make every step long."""

    def run(self, order: Sequence[int]) -> Timeline:
        timeline = super().run(order)
        return evolve(timeline, total_ns=10**9) if self._calls else timeline


def test_calls_that_would_lose_are_given_up_before_the_freedom_to_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overlap_core.views.TimelineModel", AgainstCalls)
    graphs = on_ranks(graph_of(*layers(4)), 2)
    outcomes = simulate(graphs, evolve(EXACT, coalesce=ALL))
    assert [outcome.mode for outcome in outcomes] == ["identical"] * 2
    assert all(outcome.committed and not outcome.coalesced for outcome in outcomes)
    assert all(outcome.hoisted for outcome in outcomes)


def configs() -> st.SearchStrategy[OverlapConfig]:
    return st.builds(
        OverlapConfig,
        contention=st.sampled_from((1, 3)),
        slack_ns=st.sampled_from((0, 20_000)),
        max_in_flight_bytes=st.none() | st.integers(1, 6_000),
        coalesce=st.sampled_from((1_000, 4_000, ALL)),
    )


@given(models(), configs())
def test_launches_of_a_call_follow_each_other_on_all_ranks(
    graphs: list[OverlapGraph], config: OverlapConfig
) -> None:
    outcomes = simulate(graphs, config)
    scopes: dict[tuple[int, ...], set[tuple[object, ...]]] = {}
    for outcome in outcomes:
        assert outcome.graph is not None
        assert_legal(outcome.graph, outcome.order)
        event(f"{outcome.mode}, {'some' if outcome.coalesced else 'no'} calls")
        ordinal = {entry.node: entry.ordinal for entry in outcome.skeleton}
        sequence = [ordinal[name] for name in outcome.collectives]
        for names in calls(outcome):
            spot = outcome.order.index(names[0])
            assert list(outcome.order[spot : spot + len(names)]) == names
            launches = [outcome.graph.nodes[outcome.graph.index[name]] for name in names]
            assert len({(node.op, node.group, node.dtypes) for node in launches}) == 1
        made = tuple(tuple(ordinal[name] for name in names) for names in calls(outcome))
        free = outcome.mode in ("identical", "slot")
        assert free or not made
        scopes.setdefault(outcome.scope, set()).add((tuple(sequence), made) if free else ())
    assert all(len(said) == 1 for said in scopes.values())


@given(models(), configs())
def test_bytes_in_flight_are_bounded(graphs: list[OverlapGraph], config: OverlapConfig) -> None:
    """By what is configured, or twice a region, unless program order or one call takes more."""
    for outcome in simulate(graphs, config):
        graph = outcome.graph
        assert graph is not None
        gathers = [gather.name for gather in outcome.gathers]
        sizes = {g: graph.nodes[graph.index[g]].nbytes or 0 for g in gathers}
        of_calls = [sum(sizes[name] for name in names) for names in calls(outcome)]
        assert isinstance(config.coalesce, int)
        bound = config.max_in_flight_bytes or 2 * max(config.coalesce, *sizes.values(), 1)
        program = bytes_in_flight(graph, [n.name for n in graph.nodes], gathers)
        allowed = max(bound, program, *sizes.values(), *of_calls, 0)
        peak = bytes_in_flight(graph, outcome.order, gathers)
        assert peak <= allowed, (outcome.order, of_calls, sizes)
        assert outcome.total_ns_after <= outcome.total_ns_before


def test_a_call_does_not_bring_bytes_where_program_order_has_too_many() -> None:
    """`b` is launched while `a` is in flight, `c` is not: both in one call would be 6,000 bytes."""
    nodes = [
        *(gather("a", nbytes=3_000), gather("b", nbytes=1_500), wait("a"), mm("x1", "w.a")),
        *(gather("c", nbytes=1_500), wait("b"), mm("x2", "x1", "w.b")),
        *(wait("c"), mm("x3", "x2", "w.c")),
    ]
    config = evolve(EXACT, coalesce=3_500, max_in_flight_bytes=3_500)
    for outcome in simulate(on_ranks(graph_of(*nodes), 2), config):
        assert outcome.graph is not None
        assert bytes_in_flight(outcome.graph, outcome.order, "abc") == 4_500
        assert not outcome.coalesced
    roomy = evolve(config, max_in_flight_bytes=6_000)
    assert [calls(outcome) for outcome in simulate(on_ranks(graph_of(*nodes), 2), roomy)] == [
        [["b", "c"]]
    ] * 2


def test_a_fixed_size_gives_way_to_the_bound_on_the_peak_of_memory() -> None:
    gathers = [(gather(f"g{i}", nbytes=40 << 20), wait(f"g{i}")) for i in range(8)]
    nodes = [
        node
        for i, pair in enumerate(gathers)
        for node in (*pair, mm(f"m{i}", f"m{i - 1}" if i else "x", f"w.g{i}"))
    ]
    graph = evolve(graph_of(*nodes), input_bytes=10 << 20)
    wish = evolve(EXACT, coalesce=160 << 20)
    [bounded] = simulate([graph], wish)
    [free] = simulate([graph], evolve(wish, max_peak_growth=None))
    assert [len(names) for names in calls(free)] == [4, 4]
    assert not bounded.coalesced
    assert any(
        note.startswith("memory: regions of 40 MiB instead of 160 MiB") for note in bounded.notes
    )


@given(models(), configs())
def test_every_rank_could_have_followed_alone(
    graphs: list[OverlapGraph], config: OverlapConfig
) -> None:
    host = PluginHost.discover(config)
    for outcome in simulate(graphs, config):
        assert outcome.graph is not None
        view = prepare(outcome.graph, config, host)
        _, alone_again = follow(view, agreement_of(view, outcome))
        assert alone_again.committed or not outcome.committed
        assert alone_again.collectives == outcome.collectives
        assert calls(alone_again) == calls(outcome)
        assert_legal(outcome.graph, alone_again.order)


def test_a_graph_whose_gathers_cannot_be_coalesced_does_not_follow() -> None:
    config = evolve(EXACT, coalesce=ALL)
    host = PluginHost.discover(config)
    graph = graph_of(*layers(3))
    view = prepare(graph, config, host)
    agreement = agreement_of(view, simulate_views([view])[0])
    assert agreement.calls == ((0, 1, 2),)
    other = prepare(graph, config, host, keep_alone=frozenset({"g1"}))
    with pytest.raises(DivergenceError, match="a gather cannot be coalesced here"):
        follow(other, agreement)


@given(models(), st.sampled_from((1_000, 4_000, ALL)))
def test_a_call_is_predicted_as_one(graphs: list[OverlapGraph], region_bytes: int) -> None:
    """The gathers of a call end together, and nothing of it is counted twice."""
    view = hosted(graphs[0])
    assert view.skeleton is not None
    assert view.frame is not None
    labels = form_units(view.graph, view.skeleton.gathers, region_bytes)
    labels = cut_illegal(labels, view.frame, ())
    event(f"{len(labels) - len(set(labels))} calls saved")
    joined = coalesced(view, labels)
    assert joined.model is not None
    for call in joined.calls:
        ns = [view.costs[launch].ns or 0 for launch in call.launches]
        assert max(ns) <= call.ns <= sum(ns)
