"""Where the pass is installed, for whom, and what stays of other people's settings."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.codecache import BypassFxGraphCache

import overlap_core as oc
from overlap_core.errors import ConfigError, UnsupportedTorchError
from overlap_core.inductor import check_torch
from overlap_core.inductor.overlap_pass import OverlapPass
from overlap_core.inductor.versions import REQUIRED, SIMPLE_OVERLAP_KEY, PrivateName

# Most of these run what they compiled.
pytestmark = pytest.mark.slow

GATE = "reorder_for_compute_comm_overlap"
PASSES = "reorder_for_compute_comm_overlap_passes"


def first_pass(snodes: list[Any]) -> list[Any]:
    calls.append("first")
    return snodes


calls: list[str] = []


def test_options_install_the_pass_for_one_model(model: Any, arguments: Any) -> None:
    torch.compile(model, fullgraph=True, options=oc.inductor_options())(*arguments)
    [report] = oc.reports()
    assert str(report.mode) == "identical"
    assert report.hoisted > 0
    assert report.legal
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True)(*arguments)
    assert len(oc.reports()) == 1


def test_passes_that_a_user_configured_run_before_ours(model: Any, arguments: Any) -> None:
    calls.clear()
    with inductor_config.patch({GATE: True, PASSES: [first_pass]}):
        options = oc.inductor_options()
        assert [type(one) for one in options[PASSES][1:]] == [OverlapPass]
        assert options[PASSES][0] is first_pass
        with oc.enabled():
            torch.compile(model, fullgraph=True)(*arguments)
    assert calls == ["first"]
    assert len(oc.reports()) == 1


def test_passes_behind_a_closed_gate_stay_off() -> None:
    with inductor_config.patch({GATE: False, PASSES: [first_pass]}):
        assert len(oc.inductor_options()[PASSES]) == 1


def test_options_given_to_compile_stay(model: Any, arguments: Any) -> None:
    calls.clear()
    options = {GATE: True, PASSES: [first_pass]}
    with oc.enabled():
        torch.compile(model, fullgraph=True, options=options)(*arguments)
    assert calls == ["first"]
    assert len(oc.reports()) == 1


def test_enable_reaches_other_threads(model: Any, arguments: Any) -> None:
    """Inductor's configuration belongs to one thread; the installation does not."""
    oc.enable()
    compiled = torch.compile(model, fullgraph=True)
    thread = threading.Thread(target=lambda: compiled(*arguments))
    thread.start()
    thread.join()
    assert len(oc.reports()) == 1
    oc.disable()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True)(*arguments)
    assert len(oc.reports()) == 1


def test_a_backward_graph_compiled_later_in_another_thread_is_served(
    model: Any, arguments: Any
) -> None:
    leaves = [tensor.requires_grad_() for tensor in arguments]
    with oc.enabled():
        result = torch.compile(model, fullgraph=True)(*leaves).sum()
    assert len(oc.reports()) == 1
    thread = threading.Thread(target=result.backward)
    thread.start()
    thread.join()
    assert leaves[1].grad is not None
    forward, backward = oc.reports()
    assert forward.gathers
    assert any("reduce_scatter" in entry.op for entry in backward.skeleton)


def test_enabled_ends_with_its_block_and_nests(model: Any, arguments: Any) -> None:
    with oc.enabled(oc.OverlapConfig(slack_ns=1)):
        with oc.enabled(oc.OverlapConfig(enabled=False)):
            torch.compile(model, fullgraph=True)(*arguments)
        [report] = oc.reports()
        assert "OverlapConfig(enabled=False)" in report.why
        torch._dynamo.reset()
        torch.compile(model, fullgraph=True)(*arguments)
        assert oc.reports()[-1].committed
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True)(*arguments)
    assert len(oc.reports()) == 2


def test_the_environment_switches_everything_off(
    model: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    oc.enable()
    monkeypatch.setenv("OVERLAP_CORE", "0")
    assert oc.inductor_options() == {}
    torch.compile(model, fullgraph=True)(*arguments)
    with oc.enabled():
        pass
    assert oc.reports() == ()
    monkeypatch.setenv("OVERLAP_CORE", "off")
    with pytest.raises(ConfigError, match=r"OVERLAP_CORE='off'.*expected 0 or 1"):
        oc.inductor_options()


def test_deterministic_algorithms_switch_the_hook_off_and_the_report_says_so(
    model: Any, arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with inductor_config.patch(deterministic=True), oc.enabled():
        torch.compile(model, fullgraph=True)(*arguments)
    [report] = oc.reports()
    assert not report.committed
    assert "torch.use_deterministic_algorithms" in report.why
    assert "overlap is off" in caplog.text


def test_without_a_process_group_enable_works_and_says_that_overlap_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not dist.is_initialized()
    oc.enable()
    assert "overlap is off: no process group is initialized" in caplog.text
    assert torch.compile(torch.sin, fullgraph=True)(torch.ones(4)).shape == (4,)
    assert oc.reports() == ()


def test_artifacts_are_never_cached(model: Any, arguments: Any) -> None:
    counters.clear()
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(model, fullgraph=True, options=oc.inductor_options())(*arguments)
    assert len(oc.reports()) == 2
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0
    counters.clear()


def test_the_pass_survives_copies_and_refuses_to_be_a_cache_key() -> None:
    installed = oc.inductor_options()[PASSES][-1]
    assert copy.deepcopy(installed) is installed
    with pytest.raises(BypassFxGraphCache, match="overlap_core"):
        pickle.dumps(installed)
    for name in ("type", "name", "value"):
        assert not hasattr(installed, name), "torch would make a cache key of it"


def test_simple_overlap_is_switched_off_where_torch_has_it() -> None:
    known = SIMPLE_OVERLAP_KEY in inductor_config.get_config_copy()
    assert (oc.inductor_options().get(SIMPLE_OVERLAP_KEY, None) is False) == known


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0a0+git1234"])
def test_torch_outside_the_range_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedTorchError, match=rf"torch {version[:3]}.*>=2\.11,<2\.15"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.14.1", "2.13.0.dev20260101"])
def test_torch_inside_the_range_is_taken(version: str) -> None:
    check_torch(version)


def test_a_missing_private_name_is_named() -> None:
    gone = (PrivateName("torch._inductor.ir", "_NoSuchKernel", "a test"),)
    with pytest.raises(UnsupportedTorchError, match=r"lacks torch\._inductor\.ir\._NoSuchKernel"):
        check_torch(torch.__version__, REQUIRED + gone)


def test_an_info_line_says_what_was_done(
    model: Any, arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Rank 1 of a pretended world: the lowest rank says it at level INFO.
    with caplog.at_level(logging.DEBUG, logger="overlap_core"), oc.enabled():
        torch.compile(model, fullgraph=True)(*arguments)
    assert "identical" in caplog.text
    assert "gathers hoisted" in caplog.text
