"""Every hook has a page, whose example runs as an installed plugin and whose words are true."""

from __future__ import annotations

import ast
import inspect
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from overlap_core import Communication, OverlapConfig, hookspecs
from overlap_core.errors import PluginError
from overlap_core.ranks import Mode
from overlap_core.report import Report
from overlap_core.testing import FakeRanks, GraphBuilder, HookRecorder, host_with

from ..wheels import CORE, Environment, FreshEnvironment, fresh_environment, wheels
from .faulty import ASK, HOOKS, blocking, faulty, ladder_for
from .pages import PAGES, Block, blocks_of, install

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from overlap_core import OverlapGraph

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

HEADINGS = [
    "When",
    "Arguments",
    "Return",
    "Order",
    "Must not",
    "When it goes wrong",
    "Example",
]

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "overlap-page-examples"
version = "1.0"

[tool.setuptools]
py-modules = {modules}

[project.entry-points.overlap_core]
"""


def page(hook: str) -> Path:
    return PAGES / "hooks" / f"{hook}.md"


def example(hook: str) -> tuple[Block, Block]:
    """The module of a page, and the script that uses it as an installed plugin."""
    _, module, script = (b for b in blocks_of(page(hook)) if b.language == "python")
    return module, script


@pytest.fixture(scope="module")
def environment(
    fresh_environment: FreshEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """One with the examples of all pages, each an entry point of the name of its module."""
    made = fresh_environment(CORE)
    folder = tmp_path_factory.mktemp("examples")
    modules = [example(hook)[0] for hook in HOOKS]
    names = [module.file.removesuffix(".py") for module in modules]
    for module in modules:
        (folder / module.file).write_text(module.text, encoding="utf-8")
    points = "".join(f'{name} = "{name}"\n' for name in names)
    text = PROJECT.format(modules=json.dumps(names)) + points
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    install(made, folder)
    return made


def test_every_hook_has_a_page_and_every_page_a_hook() -> None:
    specs = {name for name in hookspecs.__all__ if name.startswith("overlap_")}
    assert specs == set(HOOKS)
    assert {path.stem for path in (PAGES / "hooks").glob("*.md")} == specs
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_overlap_")}
    assert tests == specs


@pytest.mark.parametrize("hook", HOOKS)
def test_a_page_shows_the_hooks_exact_arguments(hook: str) -> None:
    first = next(block for block in blocks_of(page(hook)) if block.language == "python")
    (shown,) = ast.parse(first.text).body
    (spec,) = ast.parse(inspect.getsource(getattr(hookspecs, hook))).body
    assert isinstance(shown, ast.FunctionDef)
    assert isinstance(spec, ast.FunctionDef)
    assert shown.name == hook
    assert ast.dump(shown.args) == ast.dump(spec.args)
    assert shown.returns is not None
    assert spec.returns is not None
    assert ast.dump(shown.returns) == ast.dump(spec.returns)
    text = page(hook).read_text(encoding="utf-8")
    for argument in spec.args.args:
        assert f"| `{argument.arg}` | `" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_a_page_has_the_parts_of_the_specification(hook: str) -> None:
    text = page(hook).read_text(encoding="utf-8")
    found = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert found == HEADINGS
    doc = inspect.getdoc(getattr(hookspecs, hook)) or ""
    version = doc.rpartition("Added in: ")[2].strip()
    assert f"\nAdded in {version}. " in text
    stops = "Stops at the first answer other than None." in text
    only = "Only the ladder that the configuration names is asked" in text
    assert (stops or only) == getattr(hookspecs, hook).overlap_core_spec["firstresult"]


def check(hook: str, environment: Environment) -> None:
    """What all pages promise: the example runs, and faults read as shown."""
    module, script = example(hook)
    name = module.file.removesuffix(".py")
    program = (
        f"import {name}\n"
        f"assert {name}.__file__.startswith({str(environment.folder)!r})\n{script.text}"
    )
    environment.run(["python", "-c", program], timeout=300)
    assert f"under the name `{name}`" in page(hook).read_text(encoding="utf-8")
    (shown,) = (block.text for block in blocks_of(page(hook)) if block.language == "text")
    assert shown.splitlines() == faults(hook)


def faults(hook: str) -> list[str]:
    """What a user reads of a plugin that raises, answers with nonsense, or never returns."""
    with blocking() as block:
        return [
            complaint(hook, fail),
            complaint(hook, lambda *_: "nonsense"),
            complaint(hook, block, timeout_s=0.05),
        ]


def fail(*_: object) -> None:
    raise RuntimeError("no luck")


def complaint(hook: str, act: Callable[..., Any], timeout_s: float = 600) -> str:
    config = OverlapConfig(plugin_timeout_s=timeout_s, mode_ladder=ladder_for(hook))
    with pytest.raises(PluginError) as caught:
        ASK[hook](host_with(faulty(hook, act), config=config))
    default = OverlapConfig().plugin_timeout_s
    return str(caught.value).replace(f"for {timeout_s:g} s", f"for {default:g} s")


def two_layers(ns: int | None = 100_000) -> OverlapGraph:
    g = GraphBuilder()
    y = g.mm(g.mm("x", ns=ns), g.gather("w0", ns=ns), ns=ns)
    y = g.opaque("gossip.mix.default", y, ns=ns)
    g.mm(y, g.gather("w1", ns=ns), ns=ns)
    return g.build()


def on_two_ranks(*plugins: object, ns: int | None = 100_000, **config: Any) -> tuple[Any, ...]:
    ranks = FakeRanks.of(two_layers(ns), 2).with_config(OverlapConfig(**config))
    return ranks.with_plugins(*plugins).run()


@pytest.mark.full
def test_overlap_register_ops(environment: Environment, hook_recorder: HookRecorder) -> None:
    check("overlap_register_ops", environment)
    for _ in range(2):  # once for each discovery
        host_with(hook_recorder)
    assert hook_recorder.hooks == ["overlap_register_ops"] * 2


@pytest.mark.full
def test_overlap_classify_node(environment: Environment, hook_recorder: HookRecorder) -> None:
    check("overlap_classify_node", environment)
    # Every node but waits, in program order; nobody is asked behind an answer.
    answers = faulty("overlap_classify_node", lambda node: Communication())
    on_two_ranks(hook_recorder)
    asked = [call.arguments["node"].name for call in hook_recorder.of("overlap_classify_node")]
    rank_0 = [node.name for node in two_layers().nodes if node.kind != "wait"]
    assert asked == rank_0 * 2
    hook_recorder.clear()
    on_two_ranks(answers, hook_recorder)
    assert not hook_recorder.of("overlap_classify_node")


@pytest.mark.full
def test_overlap_materialize_inputs(environment: Environment, hook_recorder: HookRecorder) -> None:
    check("overlap_materialize_inputs", environment)
    # Asked before the functions of registered ops, with keyword arguments that can't be changed.
    host = host_with(hook_recorder)
    host.materialize("packed::attn", [1], {"a": 2})
    (call,) = hook_recorder.of("overlap_materialize_inputs")
    assert call.arguments["args"] == (1,)
    with pytest.raises(TypeError, match="does not support item assignment"):
        call.arguments["kwargs"]["a"] = 3


@pytest.mark.full
def test_overlap_realize_tensor(environment: Environment) -> None:
    check("overlap_realize_tensor", environment)
    # Another shape than asked for is refused as well.
    host = host_with(faulty("overlap_realize_tensor", lambda spec: torch.ones(2, dtype=torch.bool)))
    with pytest.raises(PluginError, match=r"shape \(2,\): expected what spec says"):
        ASK["overlap_realize_tensor"](host)


@pytest.mark.full
def test_overlap_measure_cost(environment: Environment, hook_recorder: HookRecorder) -> None:
    check("overlap_measure_cost", environment)
    # Once for each key; nodes with a time of their own are not asked for.
    on_two_ranks(hook_recorder)
    assert not hook_recorder.of("overlap_measure_cost")
    on_two_ranks(hook_recorder, ns=None)
    requests = [call.arguments["request"] for call in hook_recorder.of("overlap_measure_cost")]
    assert requests[: len(requests) // 2] == requests[len(requests) // 2 :]  # each rank asks
    assert len(set(requests)) == len(requests) // 2
    assert sum(request.op.startswith("_c10d") for request in requests) == 2  # of 4 gathers


@pytest.mark.full
def test_overlap_choose_mode(environment: Environment, hook_recorder: HookRecorder) -> None:
    check("overlap_choose_mode", environment)
    # Only the ladder that the configuration names; the same votes on every rank, by rank.
    on_two_ranks(hook_recorder)
    assert not hook_recorder.of("overlap_choose_mode")
    on_two_ranks(hook_recorder, mode_ladder="hook_recorder")
    first, second = (call.arguments["votes"] for call in hook_recorder.of("overlap_choose_mode"))
    assert first == second
    assert [vote.rank for vote in first] == [0, 1]


@pytest.mark.full
def test_overlap_adjust_plan(environment: Environment, hook_recorder: HookRecorder) -> None:
    check("overlap_adjust_plan", environment)

    # Policies are called by name, and each sees what the one before made.
    def back(plan: Any, graph: Any) -> Any:
        placements = tuple(evolve(one, boundary=one.original) for one in plan.placements)
        return evolve(plan, placements=placements)

    outcomes = on_two_ranks(hook_recorder, faulty("overlap_adjust_plan", back))
    calls = hook_recorder.of("overlap_adjust_plan")
    assert [call.arguments["graph"].rank for call in calls] == [0, 1]
    for call in calls:
        assert all(p.boundary == p.original for p in call.arguments["plan"].placements)
    assert {(outcome.mode, outcome.hoisted) for outcome in outcomes} == {(Mode.IDENTICAL, 0)}


@pytest.mark.full
def test_overlap_report_section(environment: Environment, hook_recorder: HookRecorder) -> None:
    check("overlap_report_section", environment)
    # Only a report that is made with a host has sections.
    host = host_with(hook_recorder)
    report = Report.of(on_two_ranks(hook_recorder)[0])
    assert not hook_recorder.of("overlap_report_section")
    Report.of(report, host)
    (call,) = hook_recorder.of("overlap_report_section")
    assert call.arguments["report"] == report
