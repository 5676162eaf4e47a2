"""What a process that goes on without overlap tells its peers, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.compile_fx as compile_fx_module
from torch.distributed import HashStore

import overlap_core as oc
from overlap_core.errors import PluginError
from overlap_core.host import PluginHost
from overlap_core.inductor import install, off, warm_start
from overlap_core.inductor.job import Job
from overlap_core.ranks.notices import find_off
from overlap_core.session import session

if TYPE_CHECKING:
    from pathlib import Path

BY_ENVIRONMENT = "switched off by OVERLAP_CORE=0 in the environment"


@pytest.fixture
def store() -> Any:
    return HashStore()


@pytest.fixture
def job(store: Any, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Rank 1 of 2, as the process finds it."""
    found = Job(store, 1, 2)

    def current() -> Job:
        session.learned.job = found
        return found

    monkeypatch.setattr(off, "current_job", current)
    return found


def said(store: Any) -> dict[int, str]:
    return find_off(store, 1, range(2))


def test_the_environment_is_told_and_taken_back_by_the_next_installation(
    store: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_CORE", "0")
    oc.inductor_options()
    assert said(store) == {1: BY_ENVIRONMENT}
    with oc.enabled():
        pass
    oc.enable()
    assert said(store) == {1: BY_ENVIRONMENT}
    monkeypatch.delenv("OVERLAP_CORE")
    oc.inductor_options()
    assert said(store) == {}


def test_an_unusable_torch_or_plugin_is_told_and_raised_as_before(
    store: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise PluginError("plugin 'x': no luck")

    monkeypatch.setattr(PluginHost, "discover", fail)
    with pytest.raises(PluginError, match="plugin 'x': no luck"):
        oc.enable()
    assert said(store) == {1: "plugin 'x': no luck"}
    monkeypatch.setattr(install, "check_torch", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        oc.enable()
    assert said(store) == {1: "ZeroDivisionError: integer division or modulo by zero"}


def test_where_all_is_well_the_store_is_not_asked(job: Job) -> None:
    job.store = object()  # type: ignore[assignment]
    oc.enable()
    torch.compile(torch.sin, fullgraph=True)(torch.ones(4))
    assert session.learned.job is None


def test_a_reason_is_told_once_in_each_job(store: Any, job: Job) -> None:
    off.go_without("no luck")
    count = "overlap_core/off/1/said"
    off.tell_peers("no luck")
    assert store.add(count, 0) == 1
    off.tell_peers("bad luck")
    assert (store.add(count, 0), said(store)) == (2, {1: "bad luck"})


def test_a_lost_store_stops_nobody(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.store = object()  # type: ignore[assignment]
    monkeypatch.setenv("OVERLAP_CORE", "0")
    assert oc.inductor_options() == {}
    assert "peers cannot be told whether this rank overlaps: AttributeError" in caplog.text


def test_a_compile_tells_a_job_that_began_after_the_installation(
    store: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_CORE", "0")
    with monkeypatch.context() as before:
        before.setattr(off, "current_job", lambda: None)
        oc.enable()
    assert said(store) == {}
    torch.compile(torch.sin, fullgraph=True)(torch.ones(4))
    assert said(store) == {1: BY_ENVIRONMENT}


def test_switched_off_a_compile_touches_nothing_of_torch(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a torch in which names are missing."""
    monkeypatch.setenv("OVERLAP_CORE", "0")
    oc.enable()
    monkeypatch.setattr(install, "inductor_config", object())
    assert install._compile_with_overlap(lambda *args: args, (1, 2), {}) == (1, 2)


def test_a_torch_without_the_entry_of_compiles_is_left_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_CORE", "0")
    monkeypatch.setattr(session.kept, "original_compile_fx", None)
    monkeypatch.delattr(compile_fx_module, "compile_fx")
    assert oc.inductor_options() == {}


def test_what_was_taken_out_is_not_told_to_later_jobs(store: Any, job: Job) -> None:
    off.go_without("no luck")
    oc.disable()
    assert session.kept.off == ""


def test_a_warm_start_does_not_wait_for_a_rank_without_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_start, "_LONGEST_PATIENCE_S", 1e6)
    config = oc.OverlapConfig(plan_dir=str(tmp_path), deadline_s=1e6)
    host = PluginHost.discover(config)
    jobs = [Job(HashStore(), 0, 2), Job(HashStore(), 0, 2)]
    first = jobs[0].agreements(config, host)  # finds no file, so it is cold
    Job(jobs[1].store, 1, 2).say_off("no luck")
    second = jobs[1].agreements(config, host)
    assert first.plan != second.plan != ""


def test_a_graph_that_failed_leaves_its_meeting_once() -> None:
    class Graph:
        pass

    job, graph = Job(HashStore(), 1, 2), Graph()
    missed = job.missed_meeting(graph, "f/forward/main", "setting", counts=True)
    assert missed is not None
    assert missed.name == "1/f/forward/main/0/0"
    assert not missed.again
    job.attend(graph)
    assert job.missed_meeting(graph, "f/forward/main", "setting", counts=True) is None
    again = job.missed_meeting(Graph(), "f/forward/main", "setting", counts=True)
    assert again is not None
    assert again.name == "1/f/forward/main/0/none/0"
