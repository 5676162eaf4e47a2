"""The order of hook calls over a whole compile is the one that the drawing shows."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

from ..wheels import CORE, FreshEnvironment, fresh_environment, wheels
from .pages import PAGES, blocks_of, install

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

pytestmark = [pytest.mark.full, pytest.mark.ranks]

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "overlap-order-probe"
version = "1.0"

[tool.setuptools]
py-modules = ["order_probe"]

[project.entry-points.overlap_core]
order_probe = "order_probe:recorder"
"""

PLUGIN = """
from overlap_core.testing import HookRecorder

recorder = HookRecorder("order_probe")
"""

COMPILE = """
import json

import torch
import torch.distributed as dist
from order_probe import recorder

import overlap_core as oc
from overlap_core.host import PluginHost
from overlap_core.report import Report

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD.group_name


@torch.library.custom_op("order_probe::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _(x):
    return torch.empty_like(x)


def layers(x, *shards):
    ops = torch.ops._c10d_functional
    for shard in shards:
        weight = ops.wait_tensor(ops.all_gather_into_tensor(shard, 1, group))
        x = double(torch.sin(x @ weight))
    return x


config = oc.OverlapConfig(mode_ladder="order_probe")
options = oc.inductor_options(config)
x, *shards = (torch.randn(32, 32) for _ in range(3))
with torch.no_grad():
    out = torch.compile(layers, fullgraph=True, options=options)(x, *shards)
torch.testing.assert_close(out, layers(x, *shards))
(report,) = oc.reports()
compiled = len(recorder.calls)
host = PluginHost.discover(config)
discovered = len(recorder.calls)
Report.of(report, host)
dist.destroy_process_group()


def about(call):
    given = call.arguments
    if "node" in given:
        return given["node"].name
    return given["request"].node if "request" in given else given.get("op_name", "")


print(json.dumps({
    "calls": [(call.hook, about(call)) for call in recorder.calls],
    "compiled": compiled,
    "discovered": discovered,
    "mode": report.mode,
    "nodes": [(node.name, node.kind, node.op) for node in report.graph.nodes],
    "requests": [None if r is None else repr(r) for r in report.requests],
}))
"""

REPLAY = ("overlap_realize_tensor", "overlap_materialize_inputs")


@pytest.fixture(scope="module")
def seen(
    fresh_environment: FreshEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What an installed recorder saw of one compile on one real rank."""
    environment = fresh_environment(CORE)
    folder: Path = tmp_path_factory.mktemp("probe")
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "order_probe.py").write_text(PLUGIN, encoding="utf-8")
    install(environment, folder)
    # Nothing that an earlier run agreed on or compiled.
    fresh = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    output = environment.run(["python", "-c", COMPILE], env=fresh, timeout=300)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def condensed(hooks: list[str]) -> list[str]:
    """Each run of calls of one hook once, each run of replays as its two hooks once."""
    runs = [("replay" if hook in REPLAY else hook) for hook in hooks]
    steps: list[str] = []
    for step, _ in groupby(runs):
        steps += REPLAY if step == "replay" else (step,)
    return steps


def test_the_order_of_hooks_over_a_whole_compile(seen: dict[str, Any]) -> None:
    assert seen["mode"] == "identical"
    hooks = [hook for hook, _ in seen["calls"]]
    (drawing,) = (b.text for b in blocks_of(PAGES / "lifecycle.md") if b.language == "text")
    shown = re.findall(r"\boverlap_\w+", drawing)
    assert condensed(hooks[: seen["compiled"]]) == shown[:-1]
    assert shown == [
        "overlap_register_ops",
        "overlap_realize_tensor",
        "overlap_materialize_inputs",
        "overlap_classify_node",
        "overlap_measure_cost",
        "overlap_realize_tensor",
        "overlap_materialize_inputs",
        "overlap_choose_mode",
        "overlap_adjust_plan",
        "overlap_report_section",
    ]
    # Sections are no part of a compile, and another discovery registers again.
    assert hooks[seen["compiled"] : seen["discovered"]] == ["overlap_register_ops"]
    assert hooks[seen["discovered"] :] == ["overlap_report_section"]


def test_how_often_each_is_called(seen: dict[str, Any]) -> None:
    calls = seen["calls"][: seen["compiled"]]

    def of(hook: str) -> list[str]:
        return [about for name, about in calls if name == hook]

    assert of("overlap_classify_node") == [n for n, kind, _ in seen["nodes"] if kind != "wait"]
    first_of_key: dict[str, str] = {}
    for (name, _, op), request in zip(seen["nodes"], seen["requests"], strict=True):
        if request is not None and op != "multi_output":
            first_of_key.setdefault(re.sub(r", node='\w*'", "", request), name)
    assert of("overlap_measure_cost") == list(first_of_key.values())
    for hook in ("overlap_register_ops", "overlap_choose_mode", "overlap_adjust_plan"):
        assert len(of(hook)) == 1


def test_replays_make_tensors_first_and_arguments_then(seen: dict[str, Any]) -> None:
    calls = seen["calls"][: seen["compiled"]]
    classified = [hook for hook, _ in calls].index("overlap_classify_node")
    search = [about for hook, about in calls[:classified] if hook == REPLAY[1]]
    assert search == ["order_probe::double"]  # the custom op alone, once for both of its calls
    replayed = {about for hook, about in calls[classified:] if hook == REPLAY[1]}
    gather = "_c10d_functional::all_gather_into_tensor"
    assert replayed == {"order_probe::double", "aten::mm", gather}
    replays = [hook for hook, _ in calls if hook in REPLAY]
    assert replays[0] == REPLAY[0]
    assert replays[-1] == REPLAY[1]
