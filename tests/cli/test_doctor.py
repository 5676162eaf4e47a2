"""`overlap-core doctor`: what it prints, its exit status, and a real job under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from overlap_core.cli import main

REPORT = Path(__file__).parents[1] / "report" / "report-v1.json"
NO_JOB = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@pytest.fixture(autouse=True)
def _plan_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_CORE_PLAN_DIR", str(tmp_path))


def run(*args: str | Path, **env: str) -> Result:
    return CliRunner().invoke(
        main,
        ["doctor", *map(str, args)],
        env={**NO_JOB, "COLUMNS": "80", **env},
        catch_exceptions=False,
    )


def findings(result: Result) -> dict[str, Any]:
    return {one["kind"]: one for one in json.loads(result.stdout)["findings"]}


def test_a_machine_that_is_fit() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok ")
    assert any(line.startswith("note") and "single-process" in line for line in lines)
    assert lines[-1] == "overlap would be on"


def test_what_it_prints_fits_80_columns_and_needs_no_colour() -> None:
    result = run(REPORT, OVERLAP_CORE="0")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout
    text = " ".join(result.stdout.split())
    assert (
        "problem switched-off: OVERLAP_CORE=0 switches everything off. "
        "To do: unset OVERLAP_CORE, on all ranks"
    ) in text


def test_a_problem_is_status_1_and_named_at_the_end() -> None:
    result = run(OVERLAP_CORE="0", OVERLAP_CORE_DISABLE_PLUGINS="no-such-plugin")
    assert result.exit_code == 1
    last = result.stdout.splitlines()[-1]
    assert last == "overlap would be off: switched-off, plugin-unusable"


def test_json_holds_every_finding() -> None:
    result = run("--json", OVERLAP_CORE="maybe")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["overlap"] is False
    finding = findings(result)["switch-invalid"]
    assert finding == {
        "severity": "problem",
        "kind": "switch-invalid",
        "ranks": [],
        "what": "OVERLAP_CORE='maybe' in the environment: expected 0 or 1",
        "do": "unset it, or set it to 0 or 1",
    }


def test_reports_are_checked_and_named() -> None:
    result = run("--json", REPORT)
    assert result.exit_code == 0
    found = findings(result)
    assert found["report-pinned"]["what"].startswith(f"{REPORT}: ")
    assert {"report-note", "report-costs-unknown", "single-process"} <= found.keys()


def test_a_report_of_a_graph_in_program_order_is_status_1(tmp_path: Path) -> None:
    data = json.loads(REPORT.read_text())
    path = tmp_path / "off.json"
    why = "\x1b[31mdifferent plugins"
    path.write_text(json.dumps({**data, "mode": "abort", "committed": False, "why": why}))
    result = run(REPORT, path)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "overlap would be off: report-off"
    assert "\x1b" not in result.stdout
    assert "\\x1b[31m" in result.stdout


def test_bad_input_and_bad_usage_are_status_2(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for arguments in ([tmp_path / "broken.json"], ["--timeout", "0"], ["--no-such-option"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr


def test_a_job_of_which_not_enough_is_known_is_a_problem() -> None:
    result = run(RANK="0")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "overlap would be off: job-incomplete"


@pytest.mark.parametrize("setting", ["TORCHINDUCTOR_DETERMINISTIC", "TORCHINDUCTOR_CUDAGRAPHS"])
@pytest.mark.slow
def test_settings_in_the_environment_are_seen(setting: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from overlap_core.cli import main; main()", "doctor"]
    env = {name: value for name, value in os.environ.items() if name not in NO_JOB}
    done = subprocess.run(
        [*program, "--json"],
        env={**env, setting: "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    kinds = {one["kind"] for one in json.loads(done.stdout)["findings"]}
    if setting == "TORCHINDUCTOR_DETERMINISTIC":
        assert "deterministic" in kinds
        assert done.returncode == 1
    else:
        assert "cuda-graphs" in kinds
        assert done.returncode == 0


SCRIPT = """
import os
if os.environ["RANK"] == "1":
    os.environ["OVERLAP_CORE_DISABLE_PLUGINS"] = os.environ.pop("LEAVE_OUT_ON_RANK_1", "")
from overlap_core.cli import main
main(["doctor", "--timeout", "60"])
"""


def torchrun(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.ranks
def test_ranks_of_a_job_that_agree(tmp_path: Path) -> None:
    done = torchrun(tmp_path, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[-1] == "overlap would be on"
    assert lines.count("overlap would be on") == 1
    assert "ok   gloo-group: 2 ranks form a gloo group" in lines


@pytest.mark.ranks
def test_ranks_of_a_job_with_different_plugins(tmp_path: Path) -> None:
    done = torchrun(tmp_path, COLUMNS="400", LEAVE_OUT_ON_RANK_1="replay")
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "plugins-differ: different plugins" in line
    assert "rank 1: nothing that others lack (OVERLAP_CORE_DISABLE_PLUGINS=replay)" in line
    assert "rank 0: replay " in line
    assert "overlap would be off: plugins-differ" in done.stdout.splitlines()
