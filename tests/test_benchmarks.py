"""The step time benchmark runs, at toy sizes on CPUs, and its numbers are where they belong."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

CONTENDERS = ("unsharded", "program", "ours", "ours:contention=0")
"""The last one is refused, and must not keep the others from running."""
MODELS = ("video", "moe")
TOKENS = 32
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(
    path.name for path in BENCHMARKS.glob("*.py") if '"__main__"' in path.read_text("utf-8")
)
TRACE = Path(__file__).parent / "traces" / "h200-forward.json.gz"
TRACE_STEPS = 5


@frozen(kw_only=True)
class Seen:
    """What one run printed and wrote."""

    status: int
    text: str
    rows: list[dict[str, Any]]
    """Of results.jsonl."""
    files: frozenset[str]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def cells(self, model: str) -> dict[str, list[str]]:
        """The table of times of a model, by contender."""
        after = self.text.split(f" {model}, {TOKENS} tokens a rank, 1 blocks: ")[1]
        lines = [line for line in after.splitlines() if line.startswith("│")]
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
        return {row[0]: row[1:] for row in rows[: len(CONTENDERS)]}


@pytest.fixture(scope="module", autouse=True)
def _scripts(repo_root: Path) -> Iterator[None]:
    """The scripts of the benchmarks import each other by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo_root / "benchmarks"))
        yield


@pytest.fixture(scope="module")
def seen(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("step_time")
    runs = [_run(repo_root, model, folder / model) for model in MODELS]
    lines = [
        line
        for model in MODELS
        for line in (folder / model / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return Seen(
        status=max(run.returncode for run in runs),
        text="".join(run.stdout for run in runs),
        rows=[json.loads(line) for line in lines],
        files=frozenset(
            str(path.relative_to(folder / model))
            for model in MODELS
            for path in (folder / model).rglob("*.*")
        ),
    )


def _run(repo_root: Path, model: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The benchmark of one model; again if gloo's memory fault ends it, see `run_ranks`.

    Here the fault is frequent: many steps run back to back, with all their gathers in flight.
    """
    command = [sys.executable, str(repo_root / "benchmarks" / "step_time.py")]
    command += ["--device", "cpu", "--ranks", "2", "--model", model]
    command += ["--contenders", ",".join(CONTENDERS), "--tokens", str(TOKENS)]
    command += ["--blocks", "1", "--dim", "64", "--heads", "4", "--ffn", "128"]
    command += ["--text-tokens", "8", "--experts", "4", "--expert-dim", "32", "--top-k", "2"]
    command += ["--repeats", "2", "--steps", "2", "--profile"]
    command += ["--out", str(folder), "--dump", str(folder / "dump")]
    # Well above what it takes, as other tests may share the cores.
    command += ["--deadline", "400", "--phase-limit", "200", "--timeout", "200"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=450, check=False
        )
        if done.returncode not in (6, 11) and "Fatal Python error" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(1000)  # a minute on two idle cores, more beside other tests
class TestRun:
    def test_ours_equals_program_order(self, seen: Seen) -> None:
        assert seen.status == 0, seen.text
        assert [row["model"] for row in seen.of_kind("compared")] == list(MODELS)
        for row in seen.of_kind("compared"):
            assert row["equal"] == dict.fromkeys(CONTENDERS[:3], True)
            assert row["finite"]
            assert row["scale"] > 0.01

    @pytest.mark.parametrize("model", MODELS)
    def test_table_has_a_row_for_each_contender(self, seen: Seen, model: str) -> None:
        cells = seen.cells(model)
        assert tuple(cells) == CONTENDERS
        assert cells["ours:contention=0"][0] == "failed"
        for contender in CONTENDERS[:3]:
            *times, peak, bits = cells[contender]
            # Times both ways with their ratios and spreads, the host's, the compiler's.
            assert len(times) == 8
            assert all(float(value) >= 0 for value in times)
            assert (peak, bits) == ("-", "equal")
        assert cells["unsharded"][1] == cells["unsharded"][4] == "1.000"
        assert "ours:contention=0: ConfigError: OverlapConfig(contention=0)" in seen.text

    @pytest.mark.parametrize("model", MODELS)
    def test_ratios_are_to_the_unsharded_step(self, seen: Seen, model: str) -> None:
        results = {row["label"]: row for row in seen.of_kind("result") if row["model"] == model}
        assert tuple(results) == CONTENDERS
        times = {label: results[label]["summary"] for label in CONTENDERS[:3]}
        for label, summary in times.items():
            assert summary["rounds"] == 2
            for column, name in ((1, "back_to_back_ms"), (4, "synchronized_ms")):
                ratio = summary[name] / times["unsharded"][name]
                assert float(seen.cells(model)[label][column]) == pytest.approx(ratio, abs=1e-3)

    def test_contenders_take_turns(self, seen: Seen) -> None:
        order = [row["contender"] for row in seen.of_kind("round") if row["model"] == "moe"]
        assert order == ["unsharded", "program", "ours", "program", "ours", "unsharded"]

    def test_weights_are_sharded_and_experts_stay(self, seen: Seen) -> None:
        own = {(row["model"], row["label"]): row["own_bytes"] for row in seen.of_kind("result")}
        assert own["video", "program"] == own["video", "ours"]
        assert own["video", "program"] == own["video", "unsharded"] // 2
        experts = 2 * 2 * 64 * 32 * 4  # up and down of two local experts, in float32
        dense = own["moe", "unsharded"] - experts
        assert own["moe", "program"] == dense // 2 + experts

    def test_overlap_core_saw_the_graphs(self, seen: Seen) -> None:
        for row in seen.of_kind("result"):
            gathers = {"video": 18, "moe": 10}[row["model"]]
            note = row["pass_note"]
            assert (f" of {gathers} gathers hoisted" in note) == (row["label"] == "ours")
        for model in MODELS:
            name = f"{model}.ours.{TOKENS}.rank1.0"
            assert {f"dump/{name}.graph.json", f"dump/{name}.costs.json"} <= seen.files
            assert f"trace.{model}.program.{TOKENS}.json.gz" in seen.files


def test_all_contenders_by_one_word() -> None:
    contenders = import_module("steptime.contenders")
    found = contenders.parse_contenders("all,ours:slack_ns=0")
    assert {contender.kind for contender in found} == set(contenders.CONTENDERS)
    assert [contender.label for contender in found[:2]] == ["unsharded", "program"]
    settings = {contender.label: contender.settings for contender in found}
    assert settings["ours:coalesce=off"] == {"coalesce": "off"}
    assert settings["ours:slack_ns=0"] == {"slack_ns": 0}
    with pytest.raises(ValueError, match="contender 'ours' is named twice"):
        contenders.parse_contenders("all,ours")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "program,fastest"], "unknown contender 'fastest'; there are: all, "),
        (["--tokens", "4096,x"], "--tokens: 'x' is no number of tokens; expected for instance"),
        (["--tokens", "0"], "'0' is no number of tokens"),
        (["--model", "video,cnn"], "unknown model 'cnn'; there are: video, moe, train"),
        (["--model", "moe"], "--model moe needs a plugin: pip install --no-deps plugins/ep_moe"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workloads = import_module("steptime.workloads")
    monkeypatch.setitem(workloads._PLUGINS, "moe", ("no_such_package", "plugins/ep_moe"))
    monkeypatch.setattr(sys, "argv", ["step_time.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        import_module("steptime.options").read_options("")
    assert message in capsys.readouterr().err


def run_script(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a script up to where it leaves; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return left.value.code


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_of_a_script_keeps_its_lines(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(name, "--help", monkeypatch=monkeypatch) == 0
    doc = ast.get_docstring(ast.parse((BENCHMARKS / name).read_text(encoding="utf-8")))
    assert doc is not None
    assert doc in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", ["power.py", "cuda_graphs.py"])
def test_a_script_that_needs_a_gpu_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(name, "--tokens", "32", monkeypatch=monkeypatch) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{name}: error: needs (a GPU|GPUs) with CUDA, .*", last)


def test_a_rank_is_started_by_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert run_script("cuda_graphs.py", monkeypatch=monkeypatch) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("cuda_graphs.py: error: start it with torchrun, ")


def test_lengths_are_read_before_the_gpu_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script("power.py", "--tokens", "many", monkeypatch=monkeypatch) == 2
    assert "argument --tokens: 'many' is no number of tokens" in capsys.readouterr().err


@pytest.fixture
def traces() -> ModuleType:
    return import_module("steptime.traces")


@pytest.fixture
def trace() -> dict[str, Any]:
    """Five steps on an H200: 11 gathers each, on one stream."""
    with gzip.open(TRACE, "rt", encoding="utf-8") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def test_the_parts_of_a_step_add_up(traces: ModuleType, trace: dict[str, Any]) -> None:
    found = traces.analyze(trace, TRACE_STEPS)
    parts = (found.compute_ms, found.gather_exposed_ms, found.all_to_all_alone_ms)
    parts += (found.reduce_alone_ms, found.other_ms, found.idle_ms)
    assert sum(parts) == pytest.approx(found.step_ms)
    assert min(parts) >= 0
    assert found.gathers == 11
    assert 0 < found.head_exposed_ms < found.gather_exposed_ms < found.gather_ms


def test_the_first_step_is_left_out(traces: ModuleType, trace: dict[str, Any]) -> None:
    whole = traces.analyze(trace, TRACE_STEPS)
    rest, steps = traces.without_first_step(trace, TRACE_STEPS)
    found = traces.analyze(rest, steps)
    assert found.steps == steps == TRACE_STEPS - 1
    assert (found.gathers, whole.gathers) == (11, 11)
    starts = [kernel.start_us for kernel in whole.gather_kernels]
    after = [kernel.start_us for kernel in found.gather_kernels]
    assert [b - a for a, b in pairwise(after)] == pytest.approx(
        [b - a for a, b in pairwise(starts[11:])]
    )


def test_a_trace_of_unequal_steps_is_left_as_it_is(
    traces: ModuleType, trace: dict[str, Any]
) -> None:
    events = trace["traceEvents"]
    events.remove(next(e for e in events if "AllGather" in str(e.get("name"))))
    assert traces.without_first_step(trace, TRACE_STEPS) == (trace, TRACE_STEPS)


def test_gathers_by_group(traces: ModuleType, trace: dict[str, Any]) -> None:
    whole = traces.analyze(trace, TRACE_STEPS)
    gathers = [e for e in trace["traceEvents"] if "AllGather" in str(e.get("name"))]
    for event in gathers[3::11]:  # the fourth of each step goes to another group
        event["args"]["stream"] = 99
    found = traces.analyze(trace, TRACE_STEPS)
    first, second = found.gather_groups
    assert (first.gathers, second.gathers, second.stream) == (10, 1, 99)
    for name in ("gather_ms", "exposed_ms", "head_exposed_ms"):
        one = getattr(whole.gather_groups[0], name)
        assert getattr(first, name) + getattr(second, name) == pytest.approx(one)
    assert found.past_head_share == whole.past_head_share
    past = whole.gather_ms - sum(
        kernel.duration_us / 1e3 / TRACE_STEPS for kernel in whole.gather_kernels if kernel.in_head
    )
    exposed = whole.gather_groups[0].exposed_ms - whole.head_exposed_ms
    assert whole.past_head_share == pytest.approx(exposed / past, rel=1e-3)


def test_profile_tables(
    traces: ModuleType, trace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = import_module("steptime.tables")
    report = import_module("steptime.progress").Report(quiet=False)
    result = tables.Result(label="ours", profile=traces.analyze(trace, TRACE_STEPS))
    tables.print_tables(report, "tiny", [result])
    out = capsys.readouterr().out
    rows = [line.strip("│ \n").split("│") for line in out.splitlines() if line.startswith("│ ours")]
    times, profile, group = rows
    assert times[1].strip() == "failed"
    assert [cell.strip() for cell in (profile[8], group[2])] == ["11", "11"]
    share = f"{result.profile.exposed_share:.0%}"
    assert profile[11].strip() == group[5].strip() == share


def test_progress_on_a_terminal_and_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = import_module("steptime.progress")
    outputs = []
    for on_terminal in (False, True):
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        if on_terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        report = progress.Report(quiet=False)
        report.begin("tiny", 3)
        report.working_on("round 1")
        report.done(2)
        report.say("halfway")
        report.end()
        outputs.append(capsys.readouterr().out)
    plain, animated = outputs
    assert plain.endswith(" s] halfway\n")
    assert plain.count("\n") == 1
    assert "round 1" in animated
    assert "2/3" in animated
    assert "halfway" in animated
    progress.Report(quiet=True).say("not from the second rank")
    assert capsys.readouterr().out == ""


def test_clock_and_power_are_what_the_program_says_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks_of = import_module("steptime.clocks").Clocks
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {tmp_path}/arguments\n'
        "echo '1980, 400.5, Not Active'; echo '[N/A], 1, Active'; echo 'no such field'\n"
        "echo '1500, 700, Active'; echo '1200, 650, Active'\n"
        "exec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="1-2"))
    start = time.perf_counter()
    with clocks_of(torch.device("cuda:0")) as clocks:
        reading = None
        while reading is None or reading.watts != 650:  # the median once all lines were read
            time.sleep(0.05)
            reading = clocks.between(start, time.perf_counter())
    assert (reading.sm_mhz, reading.watts) == (1500, 650)
    assert reading.capped == pytest.approx(2 / 3)
    assert clocks.between(0, start) is None
    assert "--id=GPU-1-2" in (tmp_path / "arguments").read_text()
    for device, wanted in (("cuda:0", False), ("cpu", True)):
        with clocks_of(torch.device(device), wanted=wanted) as clocks:
            assert clocks.between(start, time.perf_counter()) is None
