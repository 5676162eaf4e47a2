"""Hosts of chosen plugins, the recorder of hook calls, and ranks in memory."""

from __future__ import annotations

from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
from attrs import evolve

import overlap_core as oc
from overlap_core import OverlapConfig, hookspecs
from overlap_core.errors import PluginError
from overlap_core.ranks.votes import Mode
from overlap_core.report import Report
from overlap_core.testing import FakeRanks, GraphBuilder, HookRecorder, host_with, tensor_spec

BUILTINS = ("analytical_costs", "default_ladder", "functional_collectives", "replay")


def plugin_names(*plugins: object) -> tuple[str, ...]:
    return tuple(info.name for info in host_with(*plugins).plugins())


def two_layers() -> oc.OverlapGraph:
    g = GraphBuilder()
    g.mm(g.mm("x", g.gather("w0")), g.gather("w1"))
    return g.build()


class Silent:
    overlap_plugin_name = "silent"

    @oc.hookimpl
    def overlap_classify_node(self, node: Any) -> None:
        return None


def test_only_the_given_plugins_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metadata.entry_points(group="overlap_core"), "no plugin is installed: this tests nothing"
    monkeypatch.setenv("OVERLAP_CORE_DISABLE_PLUGINS", "replay")
    assert plugin_names() == BUILTINS
    module = ModuleType("my_module")
    module.overlap_classify_node = Silent().overlap_classify_node  # type: ignore[attr-defined]
    assert plugin_names(Silent(), module) == ("my_module", "silent", *BUILTINS)


def test_installed_plugins_by_name() -> None:
    assert plugin_names("mode_ladders", Silent()) == ("mode_ladders", "silent", *BUILTINS)
    with pytest.raises(
        PluginError, match=r"no plugin named 'no_such' is installed; .*mode_ladders"
    ):
        host_with("no_such")


def test_a_configuration() -> None:
    host = host_with("mode_ladders", config=OverlapConfig(mode_ladder="strict"))
    assert "strict" in host.ladders()


def test_the_recorder_sees_every_hook() -> None:
    recorder = HookRecorder()
    config = OverlapConfig(mode_ladder="hook_recorder")
    graph = two_layers()
    unknown = evolve(graph, nodes=tuple(evolve(node, cost_ns=None) for node in graph.nodes))
    outcomes = FakeRanks.of(unknown, 2).with_plugins(recorder).with_config(config).run()
    host = host_with(recorder)
    host.materialize("mylib::attn", (1,), {"a": 2})
    host.realize_tensor(tensor_spec(2))
    Report.of(outcomes[0], host)
    hooks = {name for name in hookspecs.__all__ if name.startswith("overlap_")}
    assert set(recorder.hooks) == hooks
    first = recorder.of("overlap_classify_node")[0]
    assert first.arguments == {"node": unknown.nodes[0]}
    (call,) = recorder.of("overlap_materialize_inputs")
    assert call.arguments == {"op_name": "mylib::attn", "args": (1,), "kwargs": {"a": 2}}
    assert len(recorder.of("overlap_choose_mode")[0].arguments["votes"]) == 2
    recorder.clear()
    assert recorder.calls == []


def test_the_recorder_changes_nothing() -> None:
    ranks = FakeRanks.of(two_layers(), 2)
    orders = [outcome.order for outcome in ranks.run()]
    assert [outcome.order for outcome in ranks.with_plugins(HookRecorder()).run()] == orders


def test_calls_are_recorded_in_order() -> None:
    recorder = HookRecorder("mine")
    host = host_with(recorder)
    host.classify(two_layers().nodes[0])
    assert recorder.hooks == ["overlap_register_ops", "overlap_classify_node"]
    assert next(info.name for info in host.plugins()) == "mine"


def test_ranks_with_plugins_of_their_own() -> None:
    ranks = FakeRanks.of(two_layers(), 3)
    assert {outcome.mode for outcome in ranks.run()} == {Mode.IDENTICAL}
    everywhere = ranks.with_plugins(Silent())
    assert {outcome.mode for outcome in everywhere.run()} == {Mode.IDENTICAL}
    for odd in (ranks.with_plugins(Silent(), rank=1), everywhere.with_plugins(rank=1)):
        outcomes = odd.run()
        assert {outcome.mode for outcome in outcomes} == {Mode.ABORT}
        assert outcomes[0].why.startswith("different plugins: ")
        assert "silent" in outcomes[0].why


def test_ranks_with_a_configuration_of_their_own() -> None:
    ranks = FakeRanks.of(two_layers(), 2).with_config(OverlapConfig(slack_ns=1), rank=0)
    assert ranks.run()[1].why.startswith("different configuration: rank 0: ")


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(
        ValueError, match=r"no graph is of rank 5; there are graphs of ranks \[0, 1\]"
    ):
        FakeRanks.of(two_layers(), 2).with_plugins(Silent(), rank=5)
