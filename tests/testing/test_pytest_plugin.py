"""The pytest plugin as authors get it: by installation, in projects of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import overlap_core.testing as kit
from overlap_core.testing import ProcessState, find_leaks

pytest_plugins = ["pytester"]

LEAKS = """
    import os
    import pytest
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor
    import overlap_core as oc

    def test_environment():
        os.environ["OVERLAP_CORE"] = "1"

    def test_inductor():
        inductor.max_autotune = not inductor.max_autotune

    def test_dynamo():
        dynamo.verbose = not dynamo.verbose

    def test_registry():
        oc.register_materialize_inputs("leaklib::op", has_internal_collective=True)

    @pytest.mark.ranks
    def test_installed():
        oc.enable()

    def test_monkeypatch(monkeypatch):
        monkeypatch.setenv("OVERLAP_CORE", "0")

    @pytest.fixture
    def patched():
        with inductor.patch(max_autotune=not inductor.max_autotune):
            yield

    def test_patched(patched):
        with oc.enabled():
            pass

    @pytest.mark.allow_leaks("environment")
    def test_allowed():
        os.environ["OVERLAP_OTHER"] = "1"

    @pytest.mark.allow_leaks
    def test_all_allowed():
        os.environ["OVERLAP_MORE"] = "1"
"""
CAUGHT = 5


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """In a process of its own, with all warnings as errors but torch's about itself."""
    warnings = ("-W", "error", "-W", "ignore:`torch.jit.script_method`:DeprecationWarning")
    return pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", *warnings, "--strict-markers", *arguments
    )


@pytest.mark.slow
def test_leaks_fail_the_test_that_made_them(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\noverlap_leak_check = true")
    pytester.makepyfile(LEAKS)
    result = run(pytester)
    result.assert_outcomes(passed=9, errors=CAUGHT)
    result.stdout.fnmatch_lines_random(
        [
            "environment: os.environ OVERLAP_CORE was not set and is now '1'",
            "torch config: torch._inductor.config.max_autotune was False and is now True",
            "torch config: torch._dynamo.config.verbose was False and is now True",
            "op registry: ops were registered, or registered ones changed",
            "installed pass: the pass was installed 0 times and is now 1 times: call *disable*",
        ]
    )


def test_nothing_is_checked_unless_asked_for(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os

        def test_free():
            os.environ["OVERLAP_CORE"] = "1"

        def test_asked(no_leaks):
            os.environ["OVERLAP_CORE"] = "0"

        def test_taken_back(monkeypatch, no_leaks):
            monkeypatch.setenv("OVERLAP_CORE", "1")
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["environment: os.environ OVERLAP_CORE was '1' and is now '0'"])


def test_the_plugin_can_be_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(no_leaks): ...")
    result = run(pytester, "-p", "no:overlap_core")
    result.assert_outcomes(errors=1)


def test_nothing_heavy_is_loaded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it(hook_recorder):
            assert "overlap_core.testing.pytest_plugin" in sys.modules
            assert hook_recorder.calls == []
            assert "torch" not in sys.modules
        """
    )
    run(pytester, "-p", "no:hypothesispytest").assert_outcomes(passed=1)
    program = (
        "import sys, overlap_core.testing.pytest_plugin\n"
        "sys.exit(not {'torch', 'hypothesis', 'numpy'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.ranks
def test_real_ranks_as_a_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time

        import pytest
        import torch
        import torch.distributed as dist
        from overlap_core.testing import RankFailure

        pytestmark = pytest.mark.ranks

        def add(rank, world_size, more):
            total = torch.tensor([rank + more])
            dist.all_reduce(total)
            return int(total)

        def hang(rank, world_size):
            time.sleep(600 * rank)

        def test_results_by_rank(gloo_ranks):
            assert gloo_ranks(add, 2, 10) == [21, 21]

        def test_a_deadline(gloo_ranks):
            with pytest.raises(RankFailure, match="the deadline of 12 s"):
                gloo_ranks(hang, 2, deadline_s=12)
        """
    )
    run(pytester).assert_outcomes(passed=2)


def test_what_a_picture_leaves_out() -> None:
    before = ProcessState.now()
    assert find_leaks(before, ProcessState.now()) == ()
    with pytest.raises(ValueError, match=r"ignore=\['weather'\]: expected some of torch config,"):
        find_leaks(before, before, ignore=["weather"])


def test_long_and_removed_values_are_shown_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_A", "x" * 1000)
    before = ProcessState.now()
    monkeypatch.delenv("OVERLAP_A")
    (line,) = find_leaks(before, ProcessState.now())
    assert line.startswith("environment: os.environ OVERLAP_A was 'xxx")
    assert line.endswith("... and is now not set")
    assert len(line) < 300
    assert "OVERLAP_A" not in os.environ


def test_the_kit_names_what_it_has() -> None:
    assert sorted(kit.__all__) == kit.__all__
    assert set(kit.__all__) == set(kit._MODULES)
    for name in kit.__all__:
        assert getattr(kit, name) is not None
    assert set(kit.__all__) <= set(dir(kit))
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        kit.no_such  # noqa: B018
