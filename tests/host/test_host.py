"""Calls of hooks: whose answer counts, what is checked, and what errors say."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import attrs
import pytest
import torch

from overlap_core import (
    Communication,
    Node,
    NodeKind,
    OverlapConfig,
    OverlapGraph,
    hookimpl,
    hookspecs,
)
from overlap_core.costs.types import Cost, CostRequest
from overlap_core.errors import ConfigError, PluginError
from overlap_core.host import PluginHost
from overlap_core.placement.plan import GatherPlacement, Plan, Verdict
from overlap_core.ranks.votes import Mode, ModeDecision, Vote
from overlap_core.registry import op_has_internal_collective
from overlap_core.replay.types import TensorSpec

from ..virtual_clock import VirtualClock

NODE = Node(name="op7", kind=NodeKind.OPAQUE, op="mylib::attn", issues_collective=True)
GRAPH = OverlapGraph(nodes=(NODE,))
SPEC = TensorSpec(shape=(2, 3), stride=(3, 1), dtype="float32", device="cpu")
PLACEMENT = GatherPlacement(
    gather="op1",
    ordinal=0,
    floor=1,
    original=5,
    boundary=3,
    slot=0,
    verdict=Verdict.HIDDEN,
    why="",
)
PLAN = Plan(placements=(PLACEMENT,))


def plugin(name: str, hook: str, function: Any, **options: Any) -> object:
    """A plugin with one hook, which hands all the hook's arguments to a function."""
    arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    space: dict[str, Any] = {"function": function}
    exec(f"def {hook}(self, {arguments}): return function({arguments})", space)
    body = {hook: hookimpl(space[hook], **options), "overlap_plugin_name": name}
    return type("Probe", (), body)()


def host(*plugins: object, ladder: str = "default") -> PluginHost:
    return PluginHost.discover(OverlapConfig(mode_ladder=ladder), plugins=plugins, environ={})


def classify(name: str, **options: Any) -> object:
    said = Communication(comparable=(name,))
    return plugin(name, "overlap_classify_node", lambda node: said, **options)


def fail(*_: object) -> Any:
    raise ValueError("no luck")


CALLS = {
    "overlap_classify_node": lambda h: h.classify(NODE),
    "overlap_materialize_inputs": lambda h: h.materialize("mylib::attn", (1,), {}),
    "overlap_realize_tensor": lambda h: h.realize_tensor(SPEC),
    "overlap_measure_cost": lambda h: h.measure_cost(CostRequest(kind="compute", op="a.b")),
    "overlap_choose_mode": lambda h: h.choose_mode((Vote(rank=0, can=True),)),
    "overlap_adjust_plan": lambda h: h.adjust_plan(PLAN, GRAPH),
    "overlap_report_section": lambda h: h.report_sections(object()),
}


def test_a_plugin_answers_before_the_built_in_and_names_decide_among_plugins() -> None:
    silent = plugin("probe_0", "overlap_classify_node", lambda node: None)
    for plugins in ((classify("probe_a"), classify("probe_b"), silent),) * 2:
        answer = host(*reversed(plugins)).classify(NODE)
        assert answer is not None
        assert answer.comparable == ("probe_a",)
    assert host().classify(NODE) == Communication()


def test_tryfirst_and_trylast_move_within_the_plugins() -> None:
    first = host(classify("probe_a"), classify("probe_b", tryfirst=True)).classify(NODE)
    last = host(classify("probe_a", trylast=True), classify("probe_b")).classify(NODE)
    lone = host(classify("probe_a", trylast=True)).classify(NODE)
    assert [said and said.comparable for said in (first, last, lone)] == [
        ("probe_b",),
        ("probe_b",),
        ("probe_a",),
    ]


def test_later_plugins_are_not_asked_after_an_answer() -> None:
    assert host(classify("probe_a"), plugin("probe_b", "overlap_classify_node", fail)).classify(
        NODE
    )


@pytest.mark.parametrize("hook", CALLS)
def test_an_exception_names_plugin_hook_and_subject(hook: str) -> None:
    ladder = "probe_x" if hook == "overlap_choose_mode" else "default"
    asked = host(plugin("probe_x", hook, fail), ladder=ladder)
    with pytest.raises(PluginError) as caught:
        CALLS[hook](asked)
    text = str(caught.value)
    assert f"plugin 'probe_x', hook {hook}" in text
    assert "raised ValueError: no luck" in text
    assert "OVERLAP_CORE_DISABLE_PLUGINS=probe_x" in text
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_subject_is_the_node() -> None:
    with pytest.raises(PluginError, match=r"on node 'op7' \(mylib::attn\): raised"):
        host(plugin("probe_x", "overlap_classify_node", fail)).classify(NODE)


@pytest.mark.parametrize("hook", CALLS)
def test_keyboard_interrupt_passes(hook: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ladder = "probe_x" if hook == "overlap_choose_mode" else "default"
    with pytest.raises(KeyboardInterrupt):
        CALLS[hook](host(plugin("probe_x", hook, interrupt), ladder=ladder))


@pytest.mark.parametrize(
    ("hook", "answer", "expected"),
    [
        ("overlap_classify_node", True, "True of type bool: expected Communication or None"),
        ("overlap_materialize_inputs", (1, 2), r"expected a pair \(args, kwargs\) or None"),
        ("overlap_realize_tensor", 3, "expected torch.Tensor or None"),
        ("overlap_realize_tensor", torch.zeros(2), r"returned a float32 tensor of shape \(2,\)"),
        ("overlap_realize_tensor", torch.zeros(2, 3).int(), "returned a int32 tensor"),
        ("overlap_measure_cost", 1.5, r"1.5 of type float: expected nanoseconds"),
        ("overlap_measure_cost", True, "expected nanoseconds"),
        ("overlap_measure_cost", -1, "expected nanoseconds"),
        ("overlap_measure_cost", Cost(), "expected nanoseconds"),
        ("overlap_measure_cost", Cost(ns=5, network_ns=6), "a Cost with such times"),
        ("overlap_choose_mode", "slot", "expected a ModeDecision or None"),
        ("overlap_adjust_plan", (PLACEMENT,), "expected a Plan or None"),
        ("overlap_report_section", "text", "expected a mapping with text keys, or None"),
        ("overlap_report_section", {1: 2}, "expected a mapping with text keys, or None"),
        ("overlap_report_section", {"a": {1}}, "that JSON can't hold"),
        ("overlap_report_section", {"a": float("nan")}, "that JSON can't hold"),
    ],
)
def test_answers_of_another_kind_are_refused(hook: str, answer: object, expected: str) -> None:
    ladder = "probe_x" if hook == "overlap_choose_mode" else "default"
    asked = host(plugin("probe_x", hook, lambda *_: answer), ladder=ladder)
    with pytest.raises(PluginError, match=rf"plugin 'probe_x', hook {hook}.*{expected}"):
        CALLS[hook](asked)


def test_materialize_keeps_generic_values_without_an_opinion() -> None:
    assert host().materialize("mylib::nobody", [1, 2], {"a": 3}) == ((1, 2), {"a": 3})
    better = plugin("probe_x", "overlap_materialize_inputs", lambda n, a, k: ([*a, n], {"b": k}))
    args, kwargs = host(better).materialize("mylib::nobody", (1,), {"a": 3})
    assert args == (1, "mylib::nobody")
    assert dict(kwargs["b"]) == {"a": 3}


def test_materialize_hands_out_read_only_arguments() -> None:
    def spoil(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        kwargs["a"] = 4

    with pytest.raises(PluginError, match=r"probe_x.*on op mylib::nobody: raised TypeError"):
        host(plugin("probe_x", "overlap_materialize_inputs", spoil)).materialize(
            "mylib::nobody", (), {"a": 3}
        )


def test_realize_tensor_gives_the_tensor_of_the_spec() -> None:
    made = torch.ones(2, 3)
    assert (
        host(plugin("probe_x", "overlap_realize_tensor", lambda s: made)).realize_tensor(SPEC)
        is made
    )
    assert host().realize_tensor(SPEC) is None


def test_ops_are_registered_once_a_discovery_and_may_be_again() -> None:
    calls = []

    def register(registry: Any) -> None:
        calls.append(registry)
        registry.register("hosttest::op", lambda x: None, has_internal_collective=True)

    probe = plugin("probe_x", "overlap_register_ops", register)
    host(probe)
    host(probe)
    assert len(calls) == 2
    assert op_has_internal_collective("hosttest.op.default")


def test_a_failing_registration_names_the_plugin() -> None:
    bad = plugin("probe_x", "overlap_register_ops", lambda registry: registry.register("nonsense"))
    with pytest.raises(PluginError, match="'probe_x', hook overlap_register_ops: raised Registrat"):
        host(bad)


def adjust(name: str, **change: Any) -> object:
    def implementation(plan: Plan, graph: OverlapGraph) -> Plan:
        first, *rest = plan.placements
        return Plan(placements=(attrs.evolve(first, **change), *rest))

    return plugin(name, "overlap_adjust_plan", implementation)


def test_plans_pass_from_one_policy_to_the_next() -> None:
    def one_later(plan: Plan, graph: OverlapGraph) -> Plan:
        (first,) = plan.placements
        return Plan(placements=(attrs.evolve(first, boundary=first.boundary + 1),))

    both = [plugin(name, "overlap_adjust_plan", one_later) for name in ("probe_a", "probe_b")]
    silent = plugin("probe_c", "overlap_adjust_plan", lambda plan, graph: None)
    assert host(*both, silent).adjust_plan(PLAN, GRAPH).placements[0].boundary == 5
    assert host().adjust_plan(PLAN, GRAPH) is PLAN


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"boundary": 2}, "for gather 'op1' it returned boundary 2, earlier than 3"),
        ({"boundary": 6}, "for gather 'op1' it returned boundary 6, past its original 5"),
        ({"boundary": 3.5}, "boundary 3.5: expected an int"),
        ({"original": 9}, "another ordinal, floor or original"),
        ({"gather": "op2"}, r"a plan of other gathers \(\['op1', 'op2'\]\)"),
    ],
)
def test_a_policy_may_only_make_placements_later(change: dict[str, Any], expected: str) -> None:
    asked = host(adjust("probe_x", **change))
    with pytest.raises(PluginError, match=f"'probe_x', hook overlap_adjust_plan.*{expected}"):
        asked.adjust_plan(PLAN, GRAPH)


def test_a_policy_is_measured_by_the_plan_that_it_saw() -> None:
    with pytest.raises(PluginError, match=r"'probe_b'.*boundary 3, earlier than 4"):
        host(adjust("probe_a", boundary=4), adjust("probe_b", boundary=3)).adjust_plan(PLAN, GRAPH)


def test_report_sections_are_plain_data_under_their_plugins_names() -> None:
    sections = host(
        plugin("probe_b", "overlap_report_section", lambda r: {"rows": (1, 2)}),
        plugin("probe_a", "overlap_report_section", lambda r: {"report": r}),
        plugin("probe_c", "overlap_report_section", lambda r: None),
    ).report_sections("r")
    assert [pair for pair in sections if pair[0].startswith("probe")] == [
        ("probe_a", {"report": "r"}),
        ("probe_b", {"rows": [1, 2]}),
    ]


class Ladders:
    """Two further ladders, each named by its function, and one of the plugin's own name."""

    overlap_plugin_name = "probe_ladders"

    @hookimpl
    def overlap_choose_mode(self, votes: tuple[Vote, ...]) -> ModeDecision:
        return ModeDecision(mode=Mode.PINNED, why="its own")

    @hookimpl(specname="overlap_choose_mode")
    def undecided(self, votes: tuple[Vote, ...]) -> None: ...

    @hookimpl(specname="overlap_choose_mode")
    def daring(self, votes: tuple[Vote, ...]) -> ModeDecision:
        return ModeDecision(mode=Mode.IDENTICAL, why="fortune favours the bold")


SLOT_VOTES = tuple(Vote(rank=r, can=True, fingerprint=f"f{r}", skeleton="s") for r in (1, 0))


@pytest.mark.parametrize(
    ("ladder", "mode"),
    [("default", Mode.SLOT), ("probe_ladders", Mode.PINNED), ("undecided", Mode.SLOT)],
)
def test_the_configured_ladder_decides(ladder: str, mode: Mode) -> None:
    assert host(Ladders(), ladder=ladder).choose_mode(SLOT_VOTES).mode is mode


def test_a_ladder_may_not_be_freer_than_the_default() -> None:
    expected = "ladder 'daring': chose mode identical where the votes allow slot at most"
    with pytest.raises(PluginError, match=f"'probe_ladders'.*{expected}"):
        host(Ladders(), ladder="daring").choose_mode(SLOT_VOTES)


def test_an_unknown_ladder_is_refused_with_the_known_ones() -> None:
    known = r"mode_ladder='no_such'.*: .*daring, default,.* probe_ladder"
    with pytest.raises(ConfigError, match=known):
        host(Ladders(), ladder="no_such")


def test_two_ladders_of_one_name_are_refused() -> None:
    taken = plugin("default", "overlap_choose_mode", lambda votes: None)
    with pytest.raises(
        PluginError, match=r"'default_ladder' and 'default' both offer .* 'default'"
    ):
        host(taken)


def test_the_digest_is_of_names_and_versions_in_order() -> None:
    one, two = classify("probe_a"), classify("probe_a")
    assert host(one).digest() == host(two).digest()
    two.overlap_plugin_version = "2"  # type: ignore[attr-defined]
    assert len({host(one).digest(), host(two).digest(), host().digest()}) == 3


@pytest.mark.parametrize("hook", [hook for hook in CALLS if hook != "overlap_register_ops"])
def test_a_hook_that_never_returns_is_given_up_and_named(hook: str) -> None:
    release = threading.Event()
    ladder = "probe_x" if hook == "overlap_choose_mode" else "default"
    config = OverlapConfig(mode_ladder=ladder, plugin_timeout_s=0.05)
    blocked = plugin("probe_x", hook, lambda *_: release.wait())
    stuck = PluginHost.discover(config, plugins=[blocked], environ={})
    with pytest.raises(PluginError, match=rf"plugin 'probe_x', hook {hook}.* has not returned for"):
        CALLS[hook](stuck)
    release.set()


def test_many_slow_calls_of_one_plugin_add_up() -> None:
    config, clock = OverlapConfig(plugin_timeout_s=60), VirtualClock()
    slow = plugin("probe_x", "overlap_classify_node", lambda node: clock.sleep(20))
    slow_host = PluginHost.discover(config, plugins=[slow], environ={}, clock=clock)
    for _ in range(9):
        assert slow_host.classify(NODE) is not None
    before = clock.now()
    with pytest.raises(PluginError, match=r"probe_x.* took more than 60 s"):
        slow_host.bounded(lambda: [slow_host.classify(NODE) for _ in range(9)])
    assert clock.now() == before + 80


def test_a_policy_that_changes_its_graph_is_at_fault() -> None:
    def change(plan: Plan, graph: OverlapGraph) -> None:
        graph.symbols["s0"] = 3

    changing = host(plugin("probe_x", "overlap_adjust_plan", change))
    with pytest.raises(PluginError, match=r"probe_x.* changed the graph that it was given"):
        changing.adjust_plan(PLAN, GRAPH)
    assert not GRAPH.symbols
