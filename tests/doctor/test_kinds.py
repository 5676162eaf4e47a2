"""Each finding that the facts of ranks can lead to, and what is found where all is well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlap_core.doctor.facts import PlanFacts, facts_from_text, facts_to_text
from overlap_core.doctor.findings import KINDS, Finding, Severity, merge_ranks, problems
from overlap_core.doctor.machine import check_process_group, check_rank
from overlap_core.doctor.place import JobPlace, find_job, is_in_job
from overlap_core.doctor.ranks import check_ranks, compare_versions

from .samples import kinds, rank

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTIMIZATIONS = "aten_distributed_optimizations"
PLAN = PlanFacts(setting="5e77", name="first", world_size="2")
JOB = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def place_finding(**changes: str) -> list[Finding]:
    found = find_job({**JOB, **changes})
    assert isinstance(found, Finding)
    return [found]


def two(**changes: object) -> Sequence[Finding]:
    """Findings about two ranks, the second of which has other facts."""
    return check_ranks([rank(0), rank(1, **changes)], world_size=2)


def env(**values: str) -> Sequence[Finding]:
    return check_rank(rank(environment=values))


CASES = {
    "versions": (check_rank(rank()), "torch 2.13.0, Python 3.11.7"),
    "torch-unsupported": (check_rank(rank(torch="2.15.1+cu130")), "2.15.1+cu130 is not supported"),
    "torch-names-missing": (check_rank(rank(names_missing=("a.B (for c)",))), "lacks a.B (for c)"),
    "torch-unusable": (check_rank(rank(torch_fault="ImportError: no V")), "2.13.0: ImportError"),
    "environment": (env(OVERLAP_CORE_PLAN_DIR="/p"), "OVERLAP_CORE_PLAN_DIR=/p"),
    "switched-off": (env(OVERLAP_CORE="0"), "OVERLAP_CORE=0 switches everything off"),
    "switch-invalid": (env(OVERLAP_CORE="yes"), "OVERLAP_CORE='yes' in the environment"),
    "plugins-left-out": (env(OVERLAP_CORE_DISABLE_PLUGINS="a,b"), "leaves out a,b"),
    "variable-unknown": (env(OVERLAP_CORE_DISABLE_PLUGIN="a"), "OVERLAP_CORE_DISABLE_PLUGIN is"),
    "plugins": (check_rank(rank()), "cp_attention 0.1.0, replay 0.1.0"),
    "plugin-unusable": (check_rank(rank(plugin_faults=("plugin 'x' broke",))), "plugin 'x' broke"),
    "plugin-note": (check_rank(rank(plugin_notes=("x does not declare",))), "x does not declare"),
    "ops": (check_rank(rank()), "2 registered, 1 of them communicate inside"),
    "op-unknown": (
        check_rank(rank(ops_unknown=("op 'a::b' is unknown. Import the library",))),
        "op 'a::b' is unknown.",
    ),
    "devices": (check_rank(rank()), "GPUs: 2 x NVIDIA H200; backends: gloo, nccl"),
    "no-gpu": (check_rank(rank(gpus=())), "no GPU is seen"),
    "nccl-missing": (check_rank(rank(backends=("gloo",))), "without NCCL"),
    "no-distributed": (check_rank(rank(distributed=False)), "without torch.distributed"),
    "deterministic": (check_rank(rank(on="deterministic")), "runs no reorder pass"),
    "overlap-scheduling": (
        check_rank(rank(on=f"{OPTIMIZATIONS}.enable_overlap_scheduling")),
        "Inductor's own overlap scheduling is on",
    ),
    "simple-overlap": (
        check_rank(rank(on=f"{OPTIMIZATIONS}.enable_simple_overlap")),
        "where overlap_core is installed, it is switched off",
    ),
    "suppress-errors": (check_rank(rank(on="suppress_errors")), "goes on in eager mode"),
    "cuda-graphs": (check_rank(rank(on="triton.cudagraphs")), "in which it was captured"),
    "cpp-wrapper": (check_rank(rank(on="cpp_wrapper")), "brings no report back"),
    "grouped-nodes": (
        check_rank(rank(reorder_passes=("comms.enforce_comm_ordering_for_fsdp",))),
        "overlap_core refuses",
    ),
    "user-passes": (
        check_rank(rank(reorder_passes=("sink_waits", "mine.p"))),
        "sink_waits, mine.p",
    ),
    "caches": (check_rank(rank()), "FX graphs, autograd"),
    "caches-off": (check_rank(rank(on="force_disable_caches")), "every start compiles anew"),
    "remote-cache": (check_rank(rank(on="fx_graph_remote_cache")), "a remote cache is on"),
    "warm-start-off": (check_rank(rank(warm_start=False)), "OverlapConfig(warm_start=False)"),
    "plan-files": (check_rank(rank(plans=(PLAN,))), "1 in /plans"),
    "plan-folder-unusable": (check_rank(rank(plan_folder_fault="/: read-only")), "/: read-only"),
    "plan-file-broken": (check_rank(rank(plans_broken=("/p: bad",))), "cannot be read: /p: bad"),
    "no-process-group": (check_process_group(rank()), "no process group is initialized"),
    "process-group": (
        check_process_group(rank(process_group="nccl", world_size=8)),
        "process group nccl of 8 ranks",
    ),
    "one-rank": (check_ranks([rank()], world_size=1), "the job has one rank"),
    "job-incomplete": (place_finding(MASTER_ADDR=""), "but not its MASTER_ADDR"),
    "ranks-agree": (two(), "2 ranks answered, with the same versions"),
    "overlap-core-differs": (
        compare_versions({0: "0.1.0", 1: "0.2.0", 2: "0.1.0"}),
        "ranks 0, 2: 0.1.0; rank 1: 0.2.0",
    ),
    "switch-differs": (two(environment={"OVERLAP_CORE": "0"}), "rank 0: on; rank 1: off;"),
    "plugins-differ": (
        two(plugins=("replay 0.1.0",), environment={"OVERLAP_CORE_DISABLE_PLUGINS": "x"}),
        "cp_attention 0.1.0; rank 1: nothing that others lack (OVERLAP_CORE_DISABLE_PLUGINS=x)",
    ),
    "ops-differ": (
        two(ops=("mylib::mm",), ops_digest="0ther"),
        "rank 0: mylib::attn (communicates) by cp_attention; rank 1: no further ones",
    ),
    "config-differs": (two(config="0ther"), "rank 0: d1ce; rank 1: 0ther"),
    "torch-differs": (two(torch="2.14.0"), "rank 0: 2.13.0; rank 1: 2.14.0"),
    "python-differs": (two(python="3.12.0"), "rank 0: 3.11.7; rank 1: 3.12.0"),
    "settings-differ": (
        two(on="cpp_wrapper", reorder_passes=("sink_waits",)),
        "rank 0: reorder passes none; rank 1: cpp_wrapper=True, reorder passes sink_waits",
    ),
    "plans-differ": (two(plans=(PLAN,)), "rank 0: no file; rank 1: first"),
}
"""Kind -> findings that one change of the facts leads to, and words of the finding."""

ELSEWHERE = {
    "gloo-group": "test_job",
    "gloo-group-failed": "test_job",
    "gloo-missing": "test_job",
    "ranks-missing": "test_job",
    "store-unreachable": "test_job",
    "report": "test_reports",
    "report-costs-estimated": "test_reports",
    "report-costs-unknown": "test_reports",
    "report-illegal": "test_reports",
    "report-note": "test_reports",
    "report-nothing": "test_reports",
    "report-off": "test_reports",
    "report-op-undeclared": "test_reports",
    "report-pinned": "test_reports",
    "single-process": "test_command",
}
"""Kinds that need a report or a job."""

EXPECTED = {"caches", "devices", "environment", "ops", "plan-files", "plugins", "versions"}


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_is_found(kind: str) -> None:
    findings, words = CASES[kind]
    [finding] = [finding for finding in findings if finding.kind == kind]
    assert words in finding.what
    assert finding.severity is KINDS[kind]
    assert finding.do or finding.severity in (Severity.OK, Severity.NOTE)


@pytest.mark.parametrize("kind", CASES)
def test_one_change_of_the_facts_leads_to_no_other_problem(kind: str) -> None:
    findings, _ = CASES[kind]
    expected = {kind} if KINDS[kind] is Severity.PROBLEM else set()
    if kind == "switch-differs":
        expected.add("switched-off")
    assert set(problems(findings)) == expected


def test_every_kind_has_a_test() -> None:
    assert CASES.keys() | ELSEWHERE.keys() == KINDS.keys()
    assert not CASES.keys() & ELSEWHERE.keys()


def test_nothing_but_what_is_well_is_found_on_a_healthy_rank() -> None:
    found = check_rank(rank())
    assert set(kinds(found)) == EXPECTED
    assert {finding.severity for finding in found} == {Severity.OK}
    assert set(kinds(two())) == {*EXPECTED, "ranks-agree"}


def test_prereleases_and_local_builds_count_as_their_release() -> None:
    for version in ("2.11.0", "2.14.1+cu130", "2.12.0.dev20251101+cpu"):
        assert "versions" in kinds(check_rank(rank(torch=version)))
    for version in ("2.10.1", "2.15.0a0+git123"):
        assert "torch-unsupported" in kinds(check_rank(rank(torch=version)))


def test_without_a_torch_that_can_be_used_nothing_is_said_of_its_settings() -> None:
    found = check_rank(rank(torch="", torch_fault="ModuleNotFoundError: torch", switches={}))
    assert kinds(found) == ["torch-unusable", "environment", "plugins", "ops"]
    assert "torch (none): ModuleNotFoundError" in found[0].what
    assert found[0].do == "install a release of torch >=2.11,<2.15"


def test_a_misspelt_variable_is_told_from_the_one_that_is_meant() -> None:
    [finding] = [f for f in env(OVERLAP_CORE_PLANDIR="x") if f.kind == "variable-unknown"]
    assert finding.do == "did you mean OVERLAP_CORE_PLAN_DIR?"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "one"}, "must be numbers"),
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no place"),
        ({"RANK": "", "MASTER_PORT": ""}, "not its RANK, MASTER_PORT"),
    ],
)
def test_what_is_wrong_with_a_place_is_said(changes: dict[str, str], words: str) -> None:
    [finding] = place_finding(**changes)
    assert finding.kind == "job-incomplete"
    assert words in finding.what


def test_the_place_in_the_job_is_read_from_the_environment() -> None:
    expected = JobPlace(
        rank=1, world_size=4, address="host", port=29500, agent_store=True, attempt="2"
    )
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert find_job({**JOB, **elastic}) == expected
    assert is_in_job(JOB)
    assert not is_in_job({"MASTER_ADDR": "host"})


def test_equal_findings_of_ranks_are_said_once_with_the_ranks() -> None:
    facts = [rank(number, gpus=() if number in (1, 3) else ("A",)) for number in range(4)]
    found = check_ranks(facts, world_size=4)
    [finding] = [finding for finding in found if finding.kind == "no-gpu"]
    assert finding.ranks == (1, 3)
    [versions] = [finding for finding in found if finding.kind == "versions"]
    assert versions.ranks == ()


def test_what_every_rank_finds_differently_is_summed_up() -> None:
    found = merge_ranks({r: [Finding(kind="plan-files", what=f"folder {r}")] for r in range(20)})
    assert len(found) == 9
    assert found[-1].what == "the same in 12 other ways"
    assert found[-1].ranks == tuple(range(8, 20))
    [finding] = compare_versions({r: f"0.{r}" for r in range(20)})
    assert finding.what.endswith("rank 7: 0.7; and 12 more groups of ranks")


def test_plugins_that_cannot_be_loaded_or_that_differ_are_said_once() -> None:
    broken = rank(1, plugins=(), plugin_faults=("plugin 'x' broke",), ops_digest="0ther")
    found = check_ranks([rank(0), broken, rank(2)], world_size=3)
    assert problems(found) == ("plugin-unusable",)
    renamed = two(plugins=("replay 0.1.0",), ops=(), ops_digest="0ther")
    assert problems(renamed) == ("plugins-differ",)


def test_two_ways_to_say_that_it_is_on_do_not_differ() -> None:
    assert "ranks-agree" in kinds(two(environment={"OVERLAP_CORE": "1"}))


def test_settings_of_a_rank_without_torch_are_not_compared() -> None:
    found = two(torch="", torch_fault="ImportError", switches={})
    assert problems(found) == ("torch-unusable",)
    assert "settings-differ" not in kinds(found)


def test_the_order_of_plugins_counts() -> None:
    assert "plugins-differ" in kinds(two(plugins=("replay 0.1.0", "cp_attention 0.1.0")))


def test_plan_files_of_a_job_of_another_size_are_passed_over() -> None:
    facts = [rank(0), rank(1, plans=(PLAN,)), rank(2)]
    assert "plans-differ" not in kinds(check_ranks(facts, world_size=3))
    whole = [rank(number, plans=(PLAN,)) for number in range(2)]
    assert "plans-differ" not in kinds(check_ranks(whole, world_size=2))


def test_facts_come_back_from_their_text() -> None:
    facts = rank(3, plans=(PLAN,), environment={"OVERLAP_CORE": "1"}, names_missing=("é",))
    assert facts_from_text(facts_to_text(facts).encode()) == facts


def test_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KeyError, match="no-such-kind"):
        Finding(kind="no-such-kind", what="")
