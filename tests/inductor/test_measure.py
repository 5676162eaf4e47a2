"""Measuring inside a compile: what is replayed, and that nothing is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._inductor.virtualized import V

import overlap_core as oc
from overlap_core import pipeline
from overlap_core.costs import Machine, request_digest
from overlap_core.host import PluginHost
from overlap_core.inductor.adapter import adapt
from overlap_core.inductor.intercept import Allocations, SilentCollectives
from overlap_core.inductor.measure import DeviceMeasurer
from overlap_core.inductor.op_names import unknown_registrations
from overlap_core.inductor.probes import MachineProbes, slowdown
from overlap_core.pipeline import prepare
from overlap_core.ranks import agree_on_costs, run_loopback
from overlap_core.ranks.lockstep import agree_on_machine
from overlap_core.registry import OpRegistry
from overlap_core.session import session
from overlap_core.views import RankView, with_workspaces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PASSES = "reorder_for_compute_comm_overlap_passes"


class Stop(BaseException):
    """Ends a compile behind the pass."""


@pytest.fixture
def real_world() -> Iterator[None]:
    """One rank with a real process group, so that replays run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gather(shard: torch.Tensor) -> torch.Tensor:
    launched = torch.ops._c10d_functional.all_gather_into_tensor(shard, 1, "0")
    return torch.ops._c10d_functional.wait_tensor(launched)


def compile_only(fn: Any, *args: Any, look: Any = None, **config: Any) -> dict[str, Any]:
    """Costs by op of one compile that ends behind the pass."""

    def stop(snodes: list[Any]) -> list[Any]:
        if look is not None:
            look()
        raise Stop

    options = oc.inductor_options(oc.OverlapConfig(**config))
    options[PASSES].append(stop)
    with pytest.raises(Stop), torch.no_grad():
        torch.compile(fn, fullgraph=True, options=options)(*args)
    report = oc.reports()[-1]
    assert report.graph is not None
    # A report of a pass that is switched off has no costs.
    return {n.op: c for n, c in zip(report.graph.nodes, report.costs, strict=False)}


def probed(device: str, *, times: int = 1) -> list[tuple[DeviceMeasurer, Machine]]:
    """Who would time a small model, and the machine that it agreed on with itself, some times."""
    found: list[tuple[DeviceMeasurer, Machine]] = []

    def look(snodes: list[Any]) -> list[Any]:
        config = oc.OverlapConfig()
        host = PluginHost.discover(config)
        adapted = adapt(snodes, V.graph, 0, 1)
        view = prepare(adapted.graph, config, host, adapted.requests)
        assert view.skeleton is not None, view.fault
        for _ in range(times):
            measurer = DeviceMeasurer(
                snodes, adapted.requests, view.skeleton, adapted.sizes, config, host
            )
            run_loopback(agree_on_costs(measurer, 0), 0, 1)
            found.append((measurer, run_loopback(agree_on_machine(measurer, 0), 0, 1)))
        raise Stop

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return quiet(x) @ gather(w)

    options = {**oc.inductor_options(), PASSES: [look]}
    inputs = torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)
    with pytest.raises(Stop), torch.no_grad():
        torch.compile(model, fullgraph=True, options=options)(*inputs)
    return found


def test_on_a_cpu_the_host_is_never_late(real_world: None) -> None:
    [(measurer, machine)] = probed("cpu")
    assert machine == Machine()
    assert measurer.offer_probes() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_machine_with_a_gpu_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    run = MachineProbes.run
    monkeypatch.setattr(MachineProbes, "run", lambda s, name: runs.append(name) or run(s, name))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (_, first), (measurer, second) = probed("cuda:0", times=2)
        offered = set(measurer.offer_probes())
    finally:
        dist.destroy_process_group()
    assert runs == ["collective", "contention/0/1048576", "kernel"]
    # Opaque ops are each graph's own.
    assert evolve(first, opaque_host_ns=0) == evolve(second, opaque_host_ns=0)
    assert offered == {*runs, "opaque"}
    assert first.measured
    host = first.kernel_host_ns, first.collective_host_ns, first.wait_host_ns
    assert min(*host, first.opaque_host_ns) > 0


@given(st.floats(1e3, 1e8), st.floats(1e3, 1e8), st.floats(1, 3.9), st.floats(1, 3.9))
def test_slowdowns_are_found_however_long_two_works_run_together(
    one_ns: float, other_ns: float, slows_one: float, slows_other: float
) -> None:
    """Two works start together; when one is done, the other goes on at its full speed."""
    first, second = one_ns * slows_one, other_ns * slows_other
    if first <= second:
        took_one, took_other = first, first + other_ns - first / slows_other
    else:
        took_one, took_other = second + one_ns - second / slows_one, second
    both_ns = min(took_one, took_other)
    assert slowdown(one_ns, took_one, both_ns) == pytest.approx(slows_one, rel=0.01)
    assert slowdown(other_ns, took_other, both_ns) == pytest.approx(slows_other, rel=0.01)


def dynamic_model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.cat([x, x[1:]]) @ gather(w)) @ gather(v)


def test_profiling_adds_no_guard(real_world: None) -> None:
    """The guards with measured costs are those with the pass switched off."""
    found: list[list[str]] = []

    def look() -> None:
        environment = V.graph.sizevars.shape_env
        found.append([str(guard.expr) for guard in environment.guards])

    x, w, v = torch.randn(24, 32), torch.randn(32, 32), torch.randn(32, 32)
    torch._dynamo.mark_dynamic(x, 0)
    for config in ({"enabled": False}, {"costs": "measured"}):
        torch._dynamo.reset()
        compile_only(dynamic_model, x, w, v, look=look, **config)
    assert found[0] == found[1]
    assert oc.reports()[-1].committed


@pytest.mark.slow
def test_profiling_leads_to_no_recompile_for_a_second_shape(real_world: None) -> None:
    counters.clear()
    w, v = torch.randn(32, 32), torch.randn(32, 32)
    compiled = torch.compile(
        dynamic_model, fullgraph=True, dynamic=True, options=oc.inductor_options()
    )
    for rows in (24, 40, 7):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x, w, v), dynamic_model(x, w, v))
    assert counters["stats"]["unique_graphs"] == 1
    assert len(oc.reports()) == 1
    counters.clear()


def test_the_users_random_state_is_untouched(real_world: None) -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    compile_only(lambda x, w: x @ gather(w), torch.ones(8, 8), torch.ones(8, 8))
    torch.testing.assert_close(torch.randn(4), expected, rtol=0, atol=0)


def scaled(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    product = torch.ops.aten._scaled_mm(x, y, scale, scale, out_dtype=torch.bfloat16)
    return product.float() @ gather(w)


@pytest.mark.parametrize("plugin", [True, False])
def test_float8_is_measured_with_its_plugin_and_analytical_without(
    real_world: None, plugin: bool
) -> None:
    pytest.importorskip("overlap_float8_replay")
    x = torch.randn(32, 32).to(torch.float8_e4m3fn)
    y = torch.randn(32, 32).to(torch.float8_e4m3fn).t()
    disabled = () if plugin else ("float8_replay",)
    costs = compile_only(
        scaled, x, y, torch.ones(()), torch.randn(32, 32), disable_plugins=disabled
    )
    [cost] = [cost for op, cost in costs.items() if "_scaled_mm" in op]
    if plugin:
        assert str(cost.source) == "measured", cost
    else:
        assert str(cost.source) != "measured"
        assert "overlap-float8-replay" in cost.why


@torch.library.custom_op("overlap_measure_tests::hidden", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    """Communicates without telling anybody."""
    out = x.clone()
    dist.all_reduce(out)
    return out


@hidden.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_that_hides_communication_is_treated_as_a_collective(
    real_world: None, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = torch.ones(8, 8), torch.ones(8, 8)
    for _ in range(2):
        torch._dynamo.reset()
        costs = compile_only(lambda x, w: hidden(x) @ gather(w), *inputs)
    report = oc.reports()[-1]
    assert [entry.op for entry in report.skeleton if "hidden" in entry.op]
    [cost] = [cost for op, cost in costs.items() if "hidden" in op]
    assert str(cost.source) == "measured"
    [note] = [note for note in report.notes if "hidden" in note]
    assert "register_materialize_inputs('overlap_measure_tests::hidden'" in note
    warned = [r for r in caplog.records if r.levelname == "WARNING" and "hidden" in r.message]
    assert len(warned) == 1


@torch.library.custom_op("overlap_measure_tests::roomy", mutates_args=())
def roomy(x: torch.Tensor) -> torch.Tensor:
    """Needs three times its input while it runs."""
    wide = torch.cat([x, x, x])
    dist.all_reduce(wide)
    return wide[: len(x)].clone()


@roomy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("overlap_measure_tests::roomy_alone", mutates_args=())
def roomy_alone(x: torch.Tensor) -> torch.Tensor:
    """Needs twice its input while it runs."""
    return torch.cat([x, x])[: len(x)].clone()


@roomy_alone.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(("op", "times"), [(roomy, 3), (roomy_alone, 2)])
def test_what_an_op_allocates_while_it_runs_counts_for_the_peak(
    real_world: None, monkeypatch: pytest.MonkeyPatch, op: Any, times: int
) -> None:
    found: list[list[int]] = []

    def look(view: RankView, workspace_bytes: Any) -> RankView:
        seen = with_workspaces(view, workspace_bytes)
        assert view.peak is not None
        assert seen.peak is not None
        more = seen.peak.memory.nbytes.keys() - view.peak.memory.nbytes.keys()
        found.append([seen.peak.memory.nbytes[owner] for owner in more])
        return seen

    monkeypatch.setattr(pipeline, "with_workspaces", look)
    for _ in range(2):  # measured, then known from before
        torch._dynamo.reset()
        compile_only(lambda x, w: op(x) @ gather(w), torch.ones(64, 64), torch.ones(64, 64))
    assert found == [[times * 64 * 64 * 4]] * 2


def test_the_workspace_of_an_op_whose_cost_was_saved_is_known(
    real_world: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[int] = []
    path = str(tmp_path / "costs.json")

    def look(view: RankView, workspace_bytes: Any) -> RankView:
        keys = [
            request_digest(request)
            for request in view.requests
            if request is not None and "roomy_alone" in request.op
        ]
        found.extend(map(workspace_bytes, keys))
        return with_workspaces(view, workspace_bytes)

    monkeypatch.setattr(pipeline, "with_workspaces", look)
    for _ in range(2):
        torch._dynamo.reset()
        session.reset()
        compile_only(
            lambda x, w: roomy_alone(x) @ gather(w),
            torch.ones(48, 48),
            torch.ones(48, 48),
            cost_table_path=path,
        )
    assert found == [2 * 48 * 48 * 4] * 2


def test_allocations_are_counted_once_and_as_long_as_they_live() -> None:
    x = torch.ones(100)
    allocated = Allocations()
    with SilentCollectives(allocated):
        first = x + 1  # 400 bytes
        both = torch.cat([first, first.view(10, 10).flatten()])  # 800
        del first
        both.add_(1)
        kept = both[:50].clone()  # 200
        view = x[1:]
    assert allocated.peak_bytes == 1200
    assert allocated.beside((kept, view)) == 1000
    assert allocated.beside((both, kept)) == 200
    del both
    with SilentCollectives(allocated):
        again = torch.zeros(200)
    assert allocated.peak_bytes == 1200
    assert len(again) == 200


def test_what_is_allocated_where_something_foreign_was_counts() -> None:
    allocated = Allocations()
    with SilentCollectives(allocated):
        for number in range(50):
            torch.tensor([float(number)] * 64)
        kept = [torch.zeros(64) for _ in range(50)]
    assert allocated.peak_bytes >= 50 * 64 * 4
    assert allocated.beside(kept) < 50 * 64 * 4


def test_a_late_registration_is_said(real_world: None, caplog: pytest.LogCaptureFixture) -> None:
    compile_only(lambda x, w: quiet(x) @ gather(w), torch.ones(8, 8), torch.ones(8, 8))
    assert not [entry.op for entry in oc.reports()[-1].skeleton if "quiet" in entry.op]
    oc.register_materialize_inputs("overlap_measure_tests::quiet", has_internal_collective=True)
    oc.register_materialize_inputs("overlap_measure_tests::quiet", has_internal_collective=True)
    said = [r.message for r in caplog.records if "overlap_measure_tests::quiet" in r.message]
    assert len(said) == 1
    assert "registered after a graph that uses it was compiled" in said[0]


def test_a_name_that_torch_does_not_know_is_said_once(
    real_world: None, caplog: pytest.LogCaptureFixture
) -> None:
    oc.register_materialize_inputs("overlap_measure_tests::hiden", has_internal_collective=True)
    for _ in range(2):
        torch._dynamo.reset()
        compile_only(lambda x, w: x @ gather(w), torch.ones(8, 8), torch.ones(8, 8))
    [said] = [r.message for r in caplog.records if "overlap_measure_tests::hiden" in r.message]
    assert "did you mean 'overlap_measure_tests::hidden'?" in said


def test_a_plugin_may_name_ops_of_a_library_that_is_not_imported() -> None:
    OpRegistry("some_plugin").register("overlap_no_such_library::op", None, True)
    OpRegistry("some_plugin").register("overlap_measure_tests::no_such_op", None, True)
    unknown = dict(unknown_registrations())
    assert "overlap_no_such_library::op" not in unknown
    assert "(by plugin 'some_plugin')" in unknown["overlap_measure_tests::no_such_op"]


@torch.library.custom_op("overlap_measure_tests::quiet", mutates_args=())
def quiet(x: torch.Tensor) -> torch.Tensor:
    """A custom op that communicates with nobody."""
    return x.clone()


@quiet.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_nothing_is_sent_while_collectives_are_silent(real_world: None) -> None:
    x = torch.arange(4.0)
    with SilentCollectives() as silent:
        gather(x)
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))
        dist.all_reduce(x)
        dist.barrier()
        hidden(x)
    ops = " ".join(silent.issued)
    for name in ("all_gather_into_tensor", "all_reduce", "allreduce_", "barrier"):
        assert name in ops
    assert sum("allreduce_" in op for op in silent.issued) == 2
