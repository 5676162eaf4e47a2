"""Looking at this process: real plugins, real settings of torch, real files."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as inductor_scheduler

from overlap_core.config import OverlapConfig
from overlap_core.doctor import examine, problems
from overlap_core.doctor.look import look
from overlap_core.doctor.machine import check_rank
from overlap_core.host import PluginHost
from overlap_core.ranks.plan_file import PlanFile, save_plan_file
from overlap_core.registry import registry_digest

from .samples import kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _plan_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_CORE_PLAN_DIR", str(tmp_path / "plans"))


def run_python(program: str) -> str:
    """Run a program in a process of its own; what it prints."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def test_this_process_is_fit() -> None:
    facts = look()
    host = PluginHost.discover(OverlapConfig())
    assert facts.plugins == host.plugin_names()
    assert facts.plugin_notes == host.notes()
    assert facts.ops_digest == registry_digest()
    assert facts.config == OverlapConfig().digest()
    assert facts.torch == torch.__version__
    assert facts.torch_wanted == ">=2.11,<2.15"
    assert "gloo" in facts.backends
    assert not facts.plugin_faults
    assert not problems(check_rank(facts))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms_are_seen() -> None:
    assert "deterministic" in problems(examine())


def my_pass(nodes: list[object]) -> list[object]:
    return nodes


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"triton.cudagraphs": True}, "cuda-graphs"),
        ({"cpp_wrapper": True}, "cpp-wrapper"),
        ({"fx_graph_cache": False}, "caches-off"),
        ({"fx_graph_remote_cache": True}, "remote-cache"),
        (
            {"aten_distributed_optimizations.enable_overlap_scheduling": True},
            "overlap-scheduling",
        ),
        (
            {
                "reorder_for_compute_comm_overlap": True,
                "reorder_for_compute_comm_overlap_passes": ["enforce_comm_ordering_for_fsdp"],
            },
            "grouped-nodes",
        ),
    ],
)
def test_settings_of_inductor_are_seen(settings: dict[str, object], kind: str) -> None:
    assert kind not in kinds(examine())
    with inductor_config.patch(settings):
        assert kind in kinds(examine())


def test_passes_of_the_user_are_named_while_inductor_would_run_them() -> None:
    passes = {"reorder_for_compute_comm_overlap_passes": ["sink_waits", my_pass]}
    with inductor_config.patch(passes):
        assert look().reorder_passes == ()
        with inductor_config.patch({"reorder_for_compute_comm_overlap": True}):
            assert look().reorder_passes == ("sink_waits", f"{__name__}.my_pass")


def test_switches_outside_inductor_are_seen() -> None:
    without_cache = functorch_config.patch({"enable_autograd_cache": False})
    with dynamo_config.patch({"suppress_errors": True}), without_cache:
        found = {finding.kind: finding for finding in examine()}
    assert "suppress-errors" in found
    assert found["caches"].what == "in use: FX graphs"


def test_a_private_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(inductor_scheduler.Scheduler, "compile_kernel")
    [finding] = [finding for finding in examine() if finding.kind == "torch-names-missing"]
    assert "torch._inductor.scheduler.Scheduler.compile_kernel (for measuring)" in finding.what


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("sys.modules['torch'] = None", "torch (none)"),
        (
            "import torch._inductor.codecache as c; del c.BypassFxGraphCache",
            "cannot import name 'BypassFxGraphCache'",
        ),
    ],
)
def test_a_torch_that_cannot_be_used_is_a_finding(damage: str, words: str) -> None:
    output = run_python(
        f"""
        import sys
        {damage}
        from overlap_core.doctor import examine
        print(*(f"{{f.kind}} {{f.what}} {{f.do}}" for f in examine()), sep="\\n")
        """
    )
    [line] = [line for line in output.splitlines() if line.startswith("torch-unusable")]
    assert words in line
    assert line.endswith("install a release of torch <2.15,>=2.11")


@pytest.mark.slow
def test_ops_of_a_running_program_are_seen() -> None:
    output = run_python(
        """
        import overlap_core as oc
        from overlap_core.doctor import examine
        import torch
        torch.library.define("mylib::attn", "(Tensor x) -> Tensor")
        oc.register_materialize_inputs("mylib::atn", has_internal_collective=True)
        print(*(f"{f.kind}| {f.what}| {f.do}" for f in examine()), sep="\\n")
        """
    )
    [line] = [line for line in output.splitlines() if line.startswith("op-unknown")]
    assert "'mylib::atn' is registered, but torch knows no op" in line
    assert "did you mean 'mylib::attn'" in line
    assert "| import the library that defines it" in line


def test_a_program_without_a_process_group() -> None:
    assert "no-process-group" in problems(examine())


@pytest.mark.slow
def test_reports_of_a_running_program_are_checked() -> None:
    output = run_python(
        """
        import torch
        import overlap_core as oc
        from overlap_core.doctor import examine
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        torch.use_deterministic_algorithms(True)
        torch.compile(lambda x: x + 1, options=oc.inductor_options())(torch.ones(2))
        print(*(f"{f.kind}| {f.what}" for f in examine()), sep="\\n")
        """
    )
    assert "report-off| reports()[0]: the graph is in program order: Inductor runs no" in output
    assert "process-group| process group gloo of 1 ranks" in output
    assert "one-rank| " in output


def test_a_plugin_to_leave_out_that_is_none_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_CORE_DISABLE_PLUGINS", "no-such-plugin")
    facts = look()
    assert facts.plugins == ()
    [fault] = facts.plugin_faults
    assert "'no-such-plugin', which is no plugin here" in fault


def test_every_plugin_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("aaa", "bbb", "ccc"):
        folder = tmp_path / f"overlap_{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: x-{name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[overlap_core]\n{name} = no_module_{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OVERLAP_CORE_DISABLE_PLUGINS", "ccc")
    faults = look().plugin_faults
    assert [fault[:12] for fault in faults] == ["plugin 'aaa'", "plugin 'bbb'"]
    assert problems(examine())[0] == "plugin-unusable"


def test_plan_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    header = {"world_size": "2"}
    for rank in range(2):
        save_plan_file(folder / "5e77" / f"rank{rank}.json", PlanFile(name="a", header=header))
    (folder / "5e77" / "rank0" / "a").mkdir(parents=True)
    (folder / "0ther").mkdir()
    (folder / "0ther" / "rank0.json").write_text("{")
    (folder / "0ther" / "rank1.json").write_text('{"version": 99, "header": {}}')
    (folder / "old").mkdir()
    (folder / "old" / "rank1.json").write_text('{"version": 1, "header": {}}')

    everything = look()
    assert len(everything.plans) == 2
    assert len(everything.plans_broken) == 2
    mine = look(rank=1)
    [plan] = mine.plans
    assert (plan.setting, plan.name, plan.world_size) == ("5e77", "a", "2")
    [broken] = mine.plans_broken
    assert broken.endswith("rank1.json: ValueError: not a plan file of this version")
    assert kinds(check_rank(mine)).count("plan-file-broken") == 1


def test_a_folder_in_which_nothing_can_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = look(OverlapConfig(plan_dir=str(tmp_path / "file" / "plans")))
    assert facts.plan_folder_fault == f"{tmp_path / 'file'}: Not a directory"
    assert "plan-folder-unusable" in kinds(check_rank(facts))


def test_looking_makes_no_folder_and_leaves_no_file(tmp_path: Path) -> None:
    assert look().plan_folder_fault == ""
    assert list(tmp_path.iterdir()) == []


def test_without_warm_starts_no_folder_is_looked_at() -> None:
    found = kinds(examine(OverlapConfig(warm_start=False)))
    assert "warm-start-off" in found
    assert "plan-files" not in found
