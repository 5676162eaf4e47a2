"""Every rule of the conformance suite passes a good plugin, and fails one that breaks it."""

from __future__ import annotations

import itertools
import os
import random
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch.distributed as dist
from attrs import evolve

import overlap_core as oc
from overlap_core.errors import OverlapError
from overlap_core.ranks.votes import Mode, ModeDecision
from overlap_core.testing import GraphBuilder, OpCall, PluginConformance, tensor_spec

if TYPE_CHECKING:
    from collections.abc import Callable

pytest_plugins = ["pytester"]

OP = "conformancelib::attention"
CALL = OpCall((tensor_spec(2, 8), [4, 4]), {"scale": tensor_spec(8, dtype="bfloat16")})


def attention_graph() -> oc.OverlapGraph:
    g = GraphBuilder()
    y = g.mm("x", g.gather("w0"))
    y = g.opaque(OP, y, group="cp", ns=None)
    g.mm(y, g.gather("w1"))
    return g.build()


def consistent(x: torch.Tensor, splits: list[int], scale: torch.Tensor) -> tuple[Any, ...]:
    return x, [x.shape[1]], torch.ones_like(scale)


class Good:
    """A model library's plugin that implements every hook, as it should."""

    overlap_plugin_name = "good"

    @oc.hookimpl
    def overlap_register_ops(self, registry: Any) -> None:
        registry.register(OP, consistent, has_internal_collective=True)

    @oc.hookimpl
    def overlap_classify_node(self, node: oc.Node) -> oc.Communication | None:
        if node.op != OP:
            return None
        return oc.Communication(groups=node.group or (), comparable="ring")

    @oc.hookimpl
    def overlap_materialize_inputs(self, op_name: str, args: Any, kwargs: Any) -> None:
        return None

    @oc.hookimpl
    def overlap_realize_tensor(self, spec: Any) -> torch.Tensor | None:
        if spec.dtype != "bool":
            return None
        return torch.zeros(spec.shape, dtype=torch.bool).as_strided(spec.shape, spec.stride)

    @oc.hookimpl
    def overlap_measure_cost(self, request: Any) -> int | None:
        return 1_000 if request.op == OP else None

    @oc.hookimpl
    def overlap_choose_mode(self, votes: Any) -> ModeDecision:
        return ModeDecision(mode=Mode.ABORT, why="never")

    @oc.hookimpl
    def overlap_adjust_plan(self, plan: Any, graph: Any) -> Any:
        late = [evolve(one, boundary=one.original) for one in plan.placements]
        return evolve(plan, placements=tuple(late))

    @oc.hookimpl
    def overlap_report_section(self, report: Any) -> dict[str, Any]:
        return {"gathers": len(report.gathers)}


class TestGood(PluginConformance):
    plugin = Good()
    ops = {OP: CALL}  # noqa: RUF012
    graphs = (attention_graph(),)


class TestGoodModule(PluginConformance):
    """A module, and one that is no policy."""

    plugin = ModuleType("good_module")
    plugin.overlap_classify_node = Good().overlap_classify_node  # type: ignore[attr-defined]


class TestInstalled(PluginConformance):
    """By the name of its entry point."""

    plugin = "mode_ladders"


class Bad:
    """A good plugin but for what a case replaces; `turn` differs at every look."""

    overlap_plugin_name = "bad"
    looks = itertools.count()

    @property
    def turn(self) -> int:
        return next(self.looks)


def bad(hook: str, function: Callable[..., Any], **options: Any) -> Bad:
    """A plugin whose implementation of one hook is a function that also gets the plugin."""
    kind = type("Bad", (Bad,), {hook: oc.hookimpl(**options)(function)})
    return kind()


def classify(function: Callable[[oc.Node], Any]) -> Bad:
    def overlap_classify_node(self: Bad, node: oc.Node) -> Any:
        return function(node)

    return bad("overlap_classify_node", overlap_classify_node)


def materialize(function: Callable[[Any], Any]) -> Bad:
    def overlap_materialize_inputs(self: Bad, op_name: str, args: Any, kwargs: Any) -> Any:
        return function(args) if op_name == OP else None

    return bad("overlap_materialize_inputs", overlap_materialize_inputs)


def clashing_ladder() -> Bad:
    def default(self: Bad, votes: Any) -> None: ...

    return bad("default", default, specname="overlap_choose_mode")


def fewer_arguments() -> Bad:
    def overlap_adjust_plan(self: Bad, plan: Any) -> None: ...

    return bad("overlap_adjust_plan", overlap_adjust_plan)


def other_ladder_at_every_look() -> Bad:
    def overlap_choose_mode(self: Bad, votes: Any) -> ModeDecision:
        return ModeDecision(mode=Mode.ABORT, why=f"turn {self.turn}")

    return bad("overlap_choose_mode", overlap_choose_mode)


def free_ladder() -> Bad:
    def overlap_choose_mode(self: Bad, votes: Any) -> ModeDecision:
        return ModeDecision(mode=Mode.SLOT, why="it will be fine")

    return bad("overlap_choose_mode", overlap_choose_mode)


def ladder_without_reason() -> Bad:
    def overlap_choose_mode(self: Bad, votes: Any) -> ModeDecision:
        return ModeDecision(mode=Mode.ABORT, why="")

    return bad("overlap_choose_mode", overlap_choose_mode)


def rank_in_section() -> Bad:
    def overlap_report_section(self: Bad, report: Any) -> dict[str, Any]:
        return {"rank": os.environ.get("RANK")}

    return bad("overlap_report_section", overlap_report_section)


def rank_in_comparable_words() -> Bad:
    def where(node: oc.Node) -> oc.Communication:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return oc.Communication(issues=False, comparable=str(rank))

    return classify(where)


def remembers_the_last_question() -> Bad:
    seen = [""]

    def where(node: oc.Node) -> oc.Communication:
        answer = oc.Communication(issues=False, comparable=seen[-1])
        seen.append(node.op)
        return answer

    return classify(where)


def earlier() -> Bad:
    def overlap_adjust_plan(self: Bad, plan: Any, graph: Any) -> Any:
        early = [evolve(one, boundary=one.floor - 1) for one in plan.placements]
        return evolve(plan, placements=tuple(early))

    return bad("overlap_adjust_plan", overlap_adjust_plan)


def initializes_a_process_group() -> Bad:
    def overlap_report_section(self: Bad, report: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    return bad("overlap_report_section", overlap_report_section)


def communicates() -> Bad:
    def where(node: oc.Node) -> None:
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))

    return classify(where)


def raises_on_rank_one() -> Bad:
    def overlap_adjust_plan(self: Bad, plan: Any, graph: Any) -> None:
        if graph.rank == 1:
            raise ValueError("not my rank")

    return bad("overlap_adjust_plan", overlap_adjust_plan)


def sets_the_environment() -> Bad:
    def overlap_report_section(self: Bad, report: Any) -> None:
        os.environ["TORCH_CONFORMANCE_TEST"] = "1"

    return bad("overlap_report_section", overlap_report_section)


def changes_torch_config() -> Bad:
    def overlap_report_section(self: Bad, report: Any) -> None:
        dynamo_config.verbose = True

    return bad("overlap_report_section", overlap_report_section)


def by_time_of_day() -> Bad:
    def overlap_measure_cost(self: Bad, request: Any) -> int:
        return self.turn

    return bad("overlap_measure_cost", overlap_measure_cost)


def shrinks_keyword_tensors() -> Bad:
    def overlap_materialize_inputs(self: Bad, op_name: str, args: Any, kwargs: Any) -> Any:
        return args, {name: value[:1] for name, value in kwargs.items()}

    return bad("overlap_materialize_inputs", overlap_materialize_inputs)


def says(**values: Any) -> Callable[[oc.Node], oc.Communication]:
    return lambda node: oc.Communication(**values)


PREFIX = "test_"
CASES: list[tuple[str, Callable[[], Any], str]] = [
    ("it_loads_alone_and_beside_the_installed_plugins", clashing_ladder, "named 'default'"),
    ("it_loads_alone_and_beside_the_installed_plugins", lambda: "no_such", "is installed"),
    ("hooks_take_their_exact_arguments", fewer_arguments, r"takes \(plan\); .* \(plan, graph\)"),
    ("answers_have_the_right_type", lambda: classify(lambda node: "yes"), "expected Communic"),
    ("answers_have_the_right_type", lambda: classify(lambda node: 1 / 0), "ZeroDivisionError"),
    ("the_same_question_gets_the_same_answer", other_ladder_at_every_look, "asked again"),
    ("the_same_question_gets_the_same_answer", by_time_of_day, "asked again it answers"),
    ("answers_do_not_depend_on_the_rank", rank_in_section, "on rank 1 instead of 0"),
    ("answers_do_not_depend_on_the_rank", rank_in_comparable_words, "on rank 1 instead of 0"),
    (
        "answers_do_not_depend_on_the_order_of_plugins_or_questions",
        remembers_the_last_question,
        "asked in another order",
    ),
    (
        "arguments_stay_as_they_were",
        lambda: materialize(lambda args: (args[0].zero_(), None)[1]),
        f"overlap_materialize_inputs on {OP} changed its arguments",
    ),
    ("it_initializes_nothing", initializes_a_process_group, "initialized a process group"),
    ("it_does_not_communicate", communicates, "issued allreduce_"),
    (
        "classification_ignores_names_and_ranks",
        lambda: classify(lambda node: oc.Communication(comparable=node.name)),
        "with other names of nodes",
    ),
    (
        "classification_ignores_names_and_ranks",
        lambda: classify(
            lambda node: oc.Communication(comparable=[str(r) for r in node.group_ranks or ()])
        ),
        "with other names of nodes",
    ),
    (
        "classification_ignores_names_and_ranks",
        lambda: classify(lambda node: oc.Communication(comparable=node.group or "")),
        "with other names of nodes",
    ),
    ("ladders_are_never_freer_than_default", free_ladder, "chose mode slot where"),
    ("ladders_are_never_freer_than_default", ladder_without_reason, "no reason"),
    ("plans_are_only_made_later", earlier, "later only"),
    (
        "replay_inputs_keep_shapes_and_ignore_the_rank",
        lambda: materialize(lambda args: ((args[0][:1], *args[1:]), {})),
        "replay inputs have other tensors",
    ),
    (
        "replay_inputs_keep_shapes_and_ignore_the_rank",
        shrinks_keyword_tensors,
        "replay inputs have other tensors",
    ),
    (
        "replay_inputs_keep_shapes_and_ignore_the_rank",
        lambda: materialize(lambda args: ((torch.randn(2, 8), *args[1:]), {})),
        "are others on rank 1 than on 0",
    ),
    (
        "replay_inputs_keep_shapes_and_ignore_the_rank",
        lambda: materialize(lambda args: ((args[0], [random.randrange(10**9)]), {})),
        "are others on rank 1 than on 0",
    ),
    ("ranks_with_it_agree", raises_on_rank_one, "ranks keep program order: .*not my rank"),
    (
        "graphs_without_its_ops_are_left_alone",
        lambda: classify(says()),
        "changes what is known of a graph without its ops",
    ),
    (
        "graphs_without_its_ops_are_left_alone",
        lambda: classify(lambda node: says(issues=False)(node) if "gather" in node.op else None),
        "changes what is known of a graph without its ops: 2 entries instead of|instead of",
    ),
    ("it_leaves_settings_alone", sets_the_environment, "TORCH_CONFORMANCE_TEST was not set"),
    ("it_leaves_settings_alone", changes_torch_config, r"torch\._dynamo\.config\.verbose was"),
]


@pytest.mark.parametrize(
    ("rule", "make", "message"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_a_plugin_that_breaks_a_rule_fails_it(
    rule: str, make: Callable[[], Any], message: str
) -> None:
    suite = type("Suite", (PluginConformance,), {"plugin": make(), "ops": {OP: CALL}})()
    with (
        mock.patch.dict(os.environ),
        dynamo_config.patch(verbose=False),
        pytest.raises((AssertionError, OverlapError), match=message),
    ):
        getattr(suite, PREFIX + rule)()
    assert not dist.is_initialized()


def test_every_rule_has_a_plugin_that_breaks_it() -> None:
    rules = {name for name in vars(PluginConformance) if name.startswith(PREFIX)}
    assert {PREFIX + rule for rule, _, _ in CASES} == rules


def test_a_suite_without_a_plugin_says_so() -> None:
    with pytest.raises(OverlapError, match="Empty: set `plugin`"):
        type("Empty", (PluginConformance,), {})().test_answers_have_the_right_type()


@pytest.mark.slow
def test_an_author_inherits_the_suite(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        my_plugin="""
        import overlap_core as oc

        @oc.hookimpl
        def overlap_classify_node(node):
            return oc.Communication(comparable=node.name) if node.op == "mylib::attn" else None
        """,
        test_my_plugin="""
        import my_plugin
        from overlap_core.testing import GraphBuilder, PluginConformance

        g = GraphBuilder()
        g.opaque("mylib::attn", "x", group="cp")

        class TestConformance(PluginConformance):
            plugin = my_plugin
            graphs = [g.build()]
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")
    rules = sum(name.startswith(PREFIX) for name in vars(PluginConformance))
    result.assert_outcomes(failed=1, skipped=3, passed=rules - 4)
    result.stdout.fnmatch_lines(
        ["*node of mylib::attn: with other names*", "FAILED *test_classification_ignores_names_*"]
    )
