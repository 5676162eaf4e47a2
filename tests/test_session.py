"""One object holds what a process remembers, and one call forgets what it learned."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import fields_dict

import overlap_core as oc
from overlap_core.costs import CostRequest, request_digest
from overlap_core.errors import OverlapError
from overlap_core.host import PluginHost
from overlap_core.inductor import add_record, order_check, records
from overlap_core.inductor.hidden import search_hidden
from overlap_core.inductor.job import current_job
from overlap_core.inductor.measure import DeviceMeasurer
from overlap_core.inductor.numbering import CapturedNumbering
from overlap_core.inductor.probes import MachineProbes
from overlap_core.inductor.telling import tell
from overlap_core.registry import note_communicating, note_compiled
from overlap_core.session import Learned, Session, session
from overlap_core.simulation import simulate_views
from overlap_core.testing import CollectiveRecorder

from .pipeline_views import same, skewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OP = "overlap_session_tests::op"
PASSES = "reorder_for_compute_comm_overlap_passes"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    session.reset()
    yield
    oc.disable()
    if dist.is_initialized():
        dist.destroy_process_group()
    session.reset()


def begin_job() -> None:
    """A process group of one rank with a store of its own, in place of the last one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def record() -> None:
    add_record(simulate_views(same(1))[0], "name")


def warn() -> None:
    tell(simulate_views(skewed({}, {"gathers": 1}))[0])


def probe() -> None:
    MachineProbes("cuda:0", [], hold=lambda: None).keep({"kernel": [1.0]})


def search() -> None:
    config = oc.OverlapConfig()
    node = oc.Node(name="op0", kind=oc.NodeKind.OPAQUE, op=OP)
    adapted: Any = SimpleNamespace(
        graph=oc.OverlapGraph(rank=0, world_size=1, nodes=(node,)),
        requests=(CostRequest(kind="opaque", op=OP),),
        sizes=None,
    )
    search_hidden([SimpleNamespace()], adapted, config, PluginHost.discover(config))


def look_inside() -> None:
    config, unknown = oc.OverlapConfig(), SimpleNamespace(get_name=lambda: "op0")
    request = CostRequest(kind="opaque", op=OP)
    skeleton: Any = SimpleNamespace(gathers=(), communication={})
    sizes: Any = None
    measurer = DeviceMeasurer(
        [unknown], [request], skeleton, sizes, config, PluginHost.discover(config)
    )
    measurer.workspace_bytes(request_digest(request))


LEARN: dict[str, Callable[[], object]] = {
    "communicating": lambda: note_communicating([f"{OP}_hidden"]),
    "compiled": lambda: note_compiled([OP]),
    "job": current_job,
    "probes": probe,
    "record_names": record,
    "records": record,
    "said": warn,
    "searched": search,
    "workspaces": look_inside,
}
"""For each field of `Learned`: how it comes to hold something."""


def learn_all() -> None:
    for learn in LEARN.values():
        learn()


@pytest.mark.parametrize("name", fields_dict(Learned))
def test_reset_forgets_what_was_learned(name: str) -> None:
    begin_job()
    LEARN[name]()
    assert getattr(session.learned, name) != getattr(Learned(), name)
    session.reset()
    assert session.learned == Learned()


def test_all_state_is_either_learned_or_kept() -> None:
    assert [*fields_dict(Session)] == ["learned", "kept", "lock", "job_lock"]


def test_what_others_own_survives_a_reset() -> None:
    begin_job()
    oc.register_materialize_inputs(OP, lambda *args: None)
    oc.enable()
    graph = torch.fx.Graph()
    CapturedNumbering()(graph)
    hook, passes = oc.get_materialize_inputs_hook(OP), [*session.kept.passes]
    original = session.kept.original_compile_fx
    with CollectiveRecorder() as recorder:
        session.reset()
        dist.barrier()
    assert hook is not None
    assert oc.get_materialize_inputs_hook(OP) is hook
    assert [*map(id, session.kept.passes)] == [*map(id, passes)]
    assert len(passes) == 1
    assert session.kept.original_compile_fx is original is not None
    assert graph in session.kept.numbered
    assert [seen.op for seen in recorder.collectives] == ["barrier"]
    assert session.kept.listeners == ()


def test_a_new_process_group_begins_a_new_session() -> None:
    begin_job()
    learn_all()
    first = current_job()
    assert len(records()) == 2
    begin_job()
    second = current_job()
    assert second is not first
    assert session.learned.job is second
    session.learned.job = None
    assert session.learned == Learned()


def test_one_process_group_is_one_session() -> None:
    begin_job()
    learn_all()
    learned, job = session.learned, current_job()
    assert current_job() is job
    assert session.learned is learned


def test_what_was_learned_before_the_first_process_group_stays() -> None:
    learn_all()
    assert session.learned.job is None
    begin_job()
    assert current_job() is not None
    assert [name for name in LEARN if not getattr(session.learned, name)] == []


def test_after_a_reset_the_same_process_group_is_another_job() -> None:
    begin_job()
    first = current_job()
    session.reset()
    second = current_job()
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (1, 2)


@torch.library.custom_op("overlap_session_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An op that Inductor cannot look into."""
    return x.clone()


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Stop(BaseException):
    """Ends a compile behind the pass."""


def compile_up_to_the_pass(**options: Any) -> None:
    def stop(snodes: list[Any]) -> list[Any]:
        raise Stop

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor(w, 0, dist.group.WORLD)
        return opaque(x) @ functional.wait_tensor(gathered)

    torch._dynamo.reset()
    ours = oc.inductor_options(oc.OverlapConfig(warm_start=False))
    ours[PASSES].append(stop)
    with pytest.raises(Stop), torch.no_grad():
        torch.compile(model, fullgraph=True, options={**ours, **options})(
            torch.ones(8, 8), torch.ones(8, 8)
        )
    torch._dynamo.reset()


@pytest.mark.parametrize("caches", [True, False])  # a cache's key asks for the job, too
def test_what_a_compile_learns_in_a_new_job_stays(caches: bool) -> None:
    begin_job()
    compile_up_to_the_pass(fx_graph_cache=caches)
    note_compiled([OP])
    begin_job()
    compile_up_to_the_pass(fx_graph_cache=caches)
    assert [report.mode for report in oc.reports()] == ["identical"]
    assert session.learned.compiled == {"overlap_session_tests::opaque"}
    assert session.learned.searched
    assert session.learned.job is current_job()


@pytest.mark.slow
def test_a_compile_that_the_pass_never_sees_belongs_to_the_new_job() -> None:
    begin_job()
    compile_up_to_the_pass()
    begin_job()
    with torch._inductor.config.patch(deterministic=True):
        options = oc.inductor_options()
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, options=options)(torch.ones(4))
        torch._dynamo.reset()
    [report] = oc.reports()
    assert "deterministic" in report.why
    current_job()
    assert len(oc.reports()) == 1


def test_checks_of_the_order_are_counted_anew_in_a_new_job() -> None:
    for _ in range(2):
        begin_job()
        assert [order_check._next_serial(0) for _ in range(2)] == [0, 1]
        session.reset()  # what a check left in the store must not be met
        assert order_check._next_serial(0) == 2


def test_a_check_that_cannot_be_counted_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: int) -> int:
        raise RuntimeError("connection lost")

    begin_job()
    with monkeypatch.context() as patched:
        patched.setattr(order_check, "_next_serial", fail)
        with pytest.raises(OverlapError, match="store does not answer: connection lost"):
            oc.check_collective_order().start()
    with oc.check_collective_order(deadline_s=60) as check:
        assert check.recording


def test_threads_may_learn_while_all_is_forgotten() -> None:
    [outcome] = simulate_views(same(1))
    faults: list[BaseException] = []

    def learn() -> None:
        try:
            for number in range(500):
                add_record(outcome, str(number))
                note_communicating([f"{OP}{number}"])
                records()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=learn) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        session.reset()
    for thread in threads:
        thread.join()
    assert faults == []
    session.reset()
    assert session.learned == Learned()
