"""One rank goes on without overlap, on real ranks: the others say why, and wait for no deadline.

The configured deadlines are longer than a case may take.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed

import overlap_core as oc
from overlap_core.errors import ConfigError, PluginError
from overlap_core.inductor import overlap_pass, records
from overlap_core.inductor.overlap_pass import OverlapPass
from overlap_core.ranks import StoreExchange
from overlap_core.session import session

from .fault_cases import PASSES, Stop, _stop, function, inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

DEADLINE_S, LONGEST_S = 600.0, 150.0
"""Of a negotiation, and of a case; both limits that a busy machine does not reach."""
CONFIG = oc.OverlapConfig(
    costs="analytical", deadline_s=DEADLINE_S, recompile_deadline_s=DEADLINE_S
)
ODD = 1
"""The rank that goes on without overlap."""

RAISES = """
from overlap_core import hookimpl

@hookimpl
def overlap_register_ops(registry):
    raise ValueError("no luck")
"""


def look(name: str, options: dict[str, Any], extra: str = "pass") -> dict[str, Any]:
    """Compile a function of this name up to the pass; what became of it."""
    options = {**options, PASSES: [*options.get(PASSES, ()), _stop]}
    options["reorder_for_compute_comm_overlap"] = True
    before = len(records())
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Stop):
        torch.compile(function(name, extra), fullgraph=True, options=options)(*inputs())
    found = records()[before:]
    if not found:
        return {"why": "", "committed": False, "in_order": True}
    [outcome] = found
    names = [entry.node for entry in outcome.skeleton]
    return {
        "why": outcome.why,
        "committed": outcome.committed,
        "in_order": outcome.collectives == tuple(names),
        "hoisted": outcome.hoisted,
    }


@contextmanager
def installed_plugin(folder: str, source: str | None) -> Iterator[None]:
    """A distribution with an entry point; without a source its module is missing."""
    site = Path(folder)
    info = site / "odd_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[overlap_core]\nodd = odd_plugin_of_tests\n")
    if source is not None:
        (site / "odd_plugin_of_tests.py").write_text(source)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.modules.pop("odd_plugin_of_tests", None)


def install_badly(folder: str, case: str) -> None:
    """What a rank does that ends without a pass."""
    if case == "environment":
        os.environ["OVERLAP_CORE"] = "0"
        assert oc.inductor_options(CONFIG) == {}
    elif case == "configuration":
        os.environ["OVERLAP_CORE"] = "off"
        with pytest.raises(ConfigError):
            oc.inductor_options(CONFIG)
        del os.environ["OVERLAP_CORE"]
    else:
        source = RAISES if case == "hook" else None
        with installed_plugin(f"{folder}/{case}", source), pytest.raises(PluginError):
            oc.inductor_options(CONFIG)


def off(rank: int, world_size: int, folder: str, case: str) -> list[dict[str, Any]]:
    """One rank installs nothing; after that it does, and all overlap again."""
    if rank == ODD:
        install_badly(folder, case)
        found = [look(f"off_{case}", {})]
        os.environ.pop("OVERLAP_CORE", None)
    else:
        found = [look(f"off_{case}", oc.inductor_options(CONFIG))]
    dist.barrier()
    options = oc.inductor_options(CONFIG)
    dist.barrier()
    return [*found, look(f"off_{case}_again", options)]


CAUSES = {
    "environment": "switched off by OVERLAP_CORE=0 in the environment",
    "configuration": "OVERLAP_CORE='off' in the environment: expected 0 or 1",
    "import": "plugin 'odd' of odd-plugin (odd_plugin_of_tests) can't be imported: "
    "ModuleNotFoundError: No module named 'odd_plugin_of_tests'",
    "hook": "plugin 'odd' 1.0, hook overlap_register_ops: raised ValueError: no luck",
}


@pytest.mark.parametrize("case", CAUSES)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_rank_that_installs_nothing_says_why(
    pooled_ranks: RunRanks, tmp_path: Path, world_size: int, case: str
) -> None:
    runs = pooled_ranks(off, world_size, str(tmp_path), case, deadline_s=LONGEST_S)
    for rank, (first, second) in enumerate(runs):
        if rank != ODD:
            assert first["why"].startswith(f"rank {ODD} goes on without overlap: {CAUSES[case]}"), (
                first
            )
            assert not first["committed"]
            assert first["in_order"]
        assert second["committed"], second
        assert second["hoisted"]


def enabled_before_the_job(rank: int, world_size: int) -> list[list[str]]:
    """Where nothing is known of the job yet, its first compile says it; so does a later job's."""
    if rank == ODD:
        os.environ["OVERLAP_CORE"] = "0"
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    oc.enable(CONFIG)
    found = []
    for job in range(2):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"job{job}", store), rank=rank, world_size=world_size
        )
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function(f"before_{job}"), fullgraph=True)(*inputs())
        found.append([report.why for report in oc.reports()])
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_a_rank_that_was_switched_off_before_there_was_a_job_says_so(
    pooled_ranks: RunRanks,
) -> None:
    runs = pooled_ranks(enabled_before_the_job, 2, deadline_s=LONGEST_S, tries=3)
    why = f"rank {ODD} goes on without overlap: {CAUSES['environment']}"
    assert runs == [[[why], [why]], [[], []]]


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no luck")


def fails(rank: int, world_size: int, where: str) -> list[dict[str, Any]]:
    """The pass fails for one graph of one rank, before the meeting or in it."""
    place: Any = {"look": OverlapPass, "run": StoreExchange}[where]
    name = {"look": "_look", "run": "run"}[where]
    options = oc.inductor_options(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(place, name, fail)
        found = [look(f"fails_{where}", options)]
    return [*found, look(f"fails_{where}_other", options)]


@pytest.mark.parametrize(("where", "step"), [("look", "scope"), ("run", "0-1.2/vote/digest")])
def test_a_rank_on_which_the_pass_fails_says_why(
    pooled_ranks: RunRanks, where: str, step: str
) -> None:
    runs = pooled_ranks(fails, 2, where, deadline_s=LONGEST_S)
    failed = "the pass failed: RuntimeError: no luck"
    assert runs[ODD][0]["why"] == failed
    assert runs[0][0]["why"] == f"rank {ODD} gave up on step {step!r} ({failed})"
    for first, second in runs:
        assert not first["committed"]
        assert second["committed"]


def bound(rank: int, world_size: int) -> str:
    """All agree, then one rank is switched off and another one compiles what nobody agreed on."""
    options = oc.inductor_options(CONFIG)
    assert look("bound", options)["hoisted"]
    if rank == ODD:
        install_badly("", "environment")
        return ""
    with pytest.raises(BackendCompilerFailed) as error:
        look("bound", options, "x = reduce(x)")
    return str(error.value)


def test_a_rank_that_cannot_go_back_to_program_order_hears_why_too(pooled_ranks: RunRanks) -> None:
    said = pooled_ranks(bound, 2, deadline_s=LONGEST_S)[0]
    assert "DivergenceError" in said
    why = f"rank {ODD} goes on without overlap: {CAUSES['environment']}"
    assert f"No peer has come to agree on a new order ({why})" in said


def newer() -> dict[str, str]:
    return {"overlap_core": "99.1", "torch": str(torch.__version__)}


def other_version(rank: int, world_size: int) -> list[dict[str, Any]]:
    options = oc.inductor_options(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(overlap_pass, "software", newer)
        return [look("other_version", options)]


def test_ranks_of_other_versions_keep_program_order(pooled_ranks: RunRanks) -> None:
    runs = pooled_ranks(other_version, 2, deadline_s=LONGEST_S)
    words = f"rank 0 runs overlap_core {oc.__version__}, rank {ODD} overlap_core 99.1"
    for [seen] in runs:
        assert seen["why"] == words
        assert not seen["committed"]
        assert seen["in_order"]


def configured_off(rank: int, world_size: int) -> list[dict[str, Any]]:
    config = oc.OverlapConfig(enabled=False) if rank == ODD else CONFIG
    return [look("configured_off", oc.inductor_options(config))]


def test_a_rank_that_its_configuration_switches_off_is_named(pooled_ranks: RunRanks) -> None:
    runs = pooled_ranks(configured_off, 2, deadline_s=LONGEST_S)
    words = "switched off by OverlapConfig(enabled=False)"
    assert runs[0][0]["why"] == f"rank {ODD} goes on without overlap: {words}"
    assert runs[ODD][0]["why"] == words


def run_to_the_end(rank: int, world_size: int) -> dict[str, Any]:
    """One rank is switched off, and all run what they compiled."""
    if rank == ODD:
        os.environ["OVERLAP_CORE"] = "0"
    fn, args = function("to_the_end"), inputs()
    expected = fn(*args)
    with torch.no_grad():
        out = torch.compile(fn, fullgraph=True, options=oc.inductor_options(CONFIG))(*args)
    return {
        "close": torch.allclose(out, expected, rtol=1e-4, atol=1e-3),
        "whys": [report.why for report in oc.reports()],
        "off": session.kept.off,
    }


def test_ranks_with_and_without_overlap_run_the_same_program(pooled_ranks: RunRanks) -> None:
    runs = pooled_ranks(run_to_the_end, 2, deadline_s=LONGEST_S, tries=3)
    assert [run["close"] for run in runs] == [True, True]
    cause = CAUSES["environment"]
    assert runs[0]["whys"] == [f"rank {ODD} goes on without overlap: {cause}"]
    assert (runs[ODD]["whys"], runs[ODD]["off"]) == ([], cause)
    assert runs[0]["off"] == ""
