"""What the pass does to graphs, subgraphs, and to itself when something goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

import overlap_core as oc
from overlap_core.config import OverlapConfig
from overlap_core.host import PluginHost
from overlap_core.inductor.overlap_pass import OverlapPass

PASSES = "reorder_for_compute_comm_overlap_passes"


class Stop(BaseException):
    """Ends a compile behind the pass."""


def compile_through(passes: list[Any], fn: Any, *args: Any) -> list[list[Any]]:
    """Compile a call with the given passes, and stop before code generation."""
    results: list[list[Any]] = []

    def stop(snodes: list[Any]) -> list[Any]:
        results.append(list(snodes))
        raise Stop

    options = {**oc.inductor_options(), PASSES: [*passes, stop]}
    with pytest.raises(Stop):
        torch.compile(fn, fullgraph=True, options=options)(*args)
    return results


def make_pass(*plugins: object, **settings: Any) -> OverlapPass:
    config = OverlapConfig(**settings)
    return OverlapPass(config, PluginHost.discover(config, plugins=plugins))


def launches(snodes: list[Any]) -> list[int]:
    return [i for i, snode in enumerate(snodes) if "all_gather" in str(_op(snode))]


def _op(snode: Any) -> Any:
    return getattr(snode.node, "op_overload", "")


def test_launches_move_forward_and_nothing_else_moves(model: Any, arguments: Any) -> None:
    before: list[list[Any]] = []

    def look(snodes: list[Any]) -> list[Any]:
        before.append(list(snodes))
        return snodes

    [after] = compile_through([look, make_pass()], model, *arguments)
    assert {id(s) for s in after} == {id(s) for s in before[0]}
    assert sum(launches(after)) < sum(launches(before[0]))
    rest = [[s for s in order if "all_gather" not in str(_op(s))] for order in (before[0], after)]
    assert [id(s) for s in rest[0]] == [id(s) for s in rest[1]]


def test_later_passes_keep_the_new_order_of_communication(model: Any, arguments: Any) -> None:
    """As the partitioning for CUDA graphs does, sort by dependencies alone."""
    sorted_orders: list[list[Any]] = []

    def sort(snodes: list[Any]) -> list[Any]:
        sorted_orders.append(snodes[0].scheduler.topological_sort_schedule(list(snodes)))
        return snodes

    [after] = compile_through([make_pass(), sort], model, *arguments)
    communication = [s.get_name() for s in after if launches([s])]
    resorted = [s.get_name() for s in sorted_orders[0] if launches([s])]
    assert resorted == communication
    names = [s.get_name() for s in sorted_orders[0]]
    second_launch = names.index(communication[1])
    first_wait = next(i for i, s in enumerate(sorted_orders[0]) if "wait_tensor" in str(_op(s)))
    assert second_launch < first_wait, "the launch is held behind the wait of the one before"


def test_running_the_pass_twice_changes_nothing(model: Any, arguments: Any) -> None:
    orders: list[list[str]] = []

    def note(snodes: list[Any]) -> list[Any]:
        orders.append([snode.get_name() for snode in snodes])
        return snodes

    compile_through([make_pass(), note, make_pass(), note], model, *arguments)
    assert orders[0] == orders[1]


def test_graphs_of_autotuning_are_left_alone(model: Any, arguments: Any) -> None:
    def pretend(snodes: list[Any]) -> list[Any]:
        from torch._inductor.virtualized import V

        name, V.graph.name = V.graph.name, "benchmark_mm_0"
        try:
            assert make_pass()(snodes) is snodes
        finally:
            V.graph.name = name
        return snodes

    compile_through([pretend], model, *arguments)
    assert oc.reports() == ()


def test_an_empty_graph_is_left_alone(fake_world: None) -> None:
    assert make_pass()([]) == []


@pytest.mark.slow
def test_branches_are_served_under_their_own_names(fake_world: None, gather: Any) -> None:
    def branch(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x @ gather(w)) @ gather(v))

    def other(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.cos(x @ gather(v)) @ gather(w))

    def fn(flag: torch.Tensor, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.cond(flag, branch, other, (x, w, v))

    weights = [torch.randn(8, 32) for _ in range(2)]
    compiled = torch.compile(fn, fullgraph=True, options=oc.inductor_options())
    compiled(torch.tensor(True), torch.randn(64, 32), *weights)
    whole, *branches = oc.reports()
    assert len(whole.skeleton) == 1  # the node that calls the branches
    assert not whole.gathers
    assert len(branches) == 2
    assert all(report.committed and len(report.gathers) == 2 for report in branches)


def test_repeated_regions_are_served_once(fake_world: None, gather: Any) -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x @ gather(w)) @ gather(v))

    def fn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        x = region(x, weights[0], weights[1])
        return region(x, weights[2], weights[3])

    weights = [torch.randn(8, 32) for _ in range(4)]
    compiled = torch.compile(fn, fullgraph=True, options=oc.inductor_options())
    compiled(torch.randn(64, 32), *weights)
    served = [report for report in oc.reports() if report.gathers]
    assert len(served) == 1
    assert served[0].committed


class Raises:
    """A plugin that fails when it sees a gather."""

    overlap_plugin_name = "raises"

    @oc.hookimpl
    def overlap_classify_node(self, node: oc.Node) -> None:
        if "all_gather" in node.op:
            raise RuntimeError("cannot bear it")


def test_a_plugin_that_raises_keeps_program_order(model: Any, arguments: Any) -> None:
    before: list[list[Any]] = []

    def look(snodes: list[Any]) -> list[Any]:
        before.append(list(snodes))
        return snodes

    [after] = compile_through([look, make_pass(Raises())], model, *arguments)
    assert after == before[0]
    [report] = oc.reports()
    assert str(report.mode) == "abort"
    assert "'raises'" in report.why
    assert "overlap_classify_node" in report.why
    assert "cannot bear it" in report.why


def test_a_graph_that_cannot_be_described_keeps_program_order(model: Any, arguments: Any) -> None:
    def group(snodes: list[Any]) -> list[Any]:
        from torch._inductor.scheduler import GroupedSchedulerNode

        grouped = [GroupedSchedulerNode.create(snodes[:2]), *snodes[2:]]
        assert make_pass()(grouped) is grouped
        return snodes

    compile_through([group], model, *arguments)
    [report] = oc.reports()
    assert "enforce_comm_ordering_for_fsdp" in report.why
    assert not report.committed


@pytest.mark.parametrize(
    "settings",
    [{"aot_mode": True}, {"cpp_wrapper": True, "bundled": True}, {"bundled": True}],
)
def test_code_that_cannot_check_its_plan_keeps_program_order(
    model: Any, arguments: Any, settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(snodes: list[Any]) -> list[Any]:
        bundled = functorch_config.patch(bundled_autograd_cache="bundled" in settings)
        with monkeypatch.context() as patch, bundled:
            for name in settings.keys() - {"bundled"}:
                patch.setattr(V.graph, name, True)
            return make_pass()(snodes)

    compile_through([pack], model, *arguments)
    [report] = oc.reports()
    assert ("packaged as C++" in report.why) == (len(settings) == 2 or "aot_mode" in settings)


def test_a_fault_of_the_pass_itself_does_not_break_the_compile(
    model: Any, arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broken = make_pass()
    broken.host = None  # type: ignore[assignment]
    options = {**oc.inductor_options(), PASSES: [broken]}
    result = torch.compile(model, fullgraph=True, options=options)(*arguments)
    assert result.shape == (256, 32)
    [report] = oc.reports()
    assert "the pass failed" in report.why
    assert "program order is kept" in caplog.text


def test_without_a_gate_nothing_is_called(model: Any, arguments: Any) -> None:
    with inductor_config.patch(reorder_for_compute_comm_overlap=False):
        torch.compile(model, fullgraph=True)(*arguments)
    assert oc.reports() == ()


def test_a_second_shape_neither_recompiles_nor_specializes(
    fake_world: None, model: Any, arguments: Any
) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    x, *weights = arguments
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(model, fullgraph=True, options=oc.inductor_options())
    assert compiled(x, *weights).shape == (256, 32)
    assert compiled(torch.randn(100, 32), *weights).shape == (100, 32)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(oc.reports()) == 1
    counters.clear()


class Unspeakable(OverlapPass):
    """Fails after the ranks have decided."""

    def _follow_up(self, outcome: Any, ordered: list[Any], sight: Any) -> None:
        super()._follow_up(outcome, [None], sight)


def test_a_fault_after_the_decision_does_not_undo_it(
    model: Any, arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers carry the decision out, so this rank must too."""
    before: list[list[Any]] = []

    def look(snodes: list[Any]) -> list[Any]:
        before.append(list(snodes))
        return snodes

    config = OverlapConfig()
    failing = Unspeakable(config, PluginHost.discover(config))
    [after] = compile_through([look, failing], model, *arguments)
    assert sum(launches(after)) < sum(launches(before[0]))
    assert "after the decision on a graph (identical)" in caplog.text
