"""What every plugin must keep to, as tests that a plugin's author inherits.

    import my_plugin
    from overlap_core.testing import OpCall, PluginConformance, tensor_spec

    class TestConformance(PluginConformance):
        plugin = my_plugin
        ops = {"mylib::attn_cp": OpCall((tensor_spec(2, 64, 8, 16), [32, 32]))}

The rules are those of the hooks' docstrings (`overlap_core.hookspecs`). A rule that a plugin
breaks on purpose is left out by overriding its test, with the reason in the docstring.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

from overlap_core import hookspecs
from overlap_core._discovery import Candidate
from overlap_core.config import OverlapConfig
from overlap_core.errors import OverlapError
from overlap_core.host import PluginHost
from overlap_core.replay.types import TensorSpec
from overlap_core.skeleton import build_skeleton
from overlap_core.testing import _corpus
from overlap_core.testing._questions import (
    Author,
    OpCall,
    acting_as_rank,
    describe,
    generic_arguments,
    layout,
    questions,
    same,
)
from overlap_core.testing.checks import assert_legal, assert_same_collective_sequence
from overlap_core.testing.fake_ranks import FakeRanks
from overlap_core.testing.graphs import on_ranks
from overlap_core.testing.hosts import HookRecorder, host_with
from overlap_core.testing.leaks import ProcessState, find_leaks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from overlap_core.graph import Node, OverlapGraph
    from overlap_core.testing._questions import Question

__all__ = ["OpCall", "PluginConformance", "tensor_spec"]

_POLICIES = frozenset(("overlap_adjust_plan", "overlap_measure_cost"))
"""Hooks whose purpose is to change where gathers go, in any graph."""


def tensor_spec(
    *shape: int, dtype: str = "float32", stride: Sequence[int] | None = None, device: str = "cpu"
) -> TensorSpec:
    """A tensor argument for an `OpCall`: sizes and strides in elements, row-major by default."""
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return TensorSpec(shape=shape, stride=tuple(stride), dtype=dtype, device=device)


class PluginConformance:
    """Inherit it in a class called `Test...` and set `plugin`; pytest collects the rest."""

    plugin: ClassVar[object]
    """The plugin: a module, an instance, or the name of an installed one."""
    ops: ClassVar[Mapping[str, OpCall]] = {}
    """Generic arguments for ops whose replay inputs the plugin makes consistent, by op name."""
    graphs: ClassVar[Sequence[OverlapGraph]] = ()
    """Graphs with the plugin's ops, beside those that the suite brings. Each is taken for the
    graph of two ranks, with groups that hold both."""

    def test_it_loads_alone_and_beside_the_installed_plugins(self) -> None:
        """It registers, implements hooks that exist, and clashes with nobody."""
        plugin = self._author().plugin
        host_with(plugin)
        given = () if isinstance(plugin, str) else (plugin,)
        PluginHost.discover(OverlapConfig(), plugins=given, environ={})

    def test_hooks_take_their_exact_arguments(self) -> None:
        """Each implementation takes all arguments of its hook, by their names, and no others."""
        author = self._author()
        calls = author.host()._calls
        for hook in author.hooks:
            wanted = _arguments(getattr(hookspecs, hook))
            for impl in calls.of(hook):
                taken = (*impl.argnames, *impl.kwargnames)
                if impl.plugin_name == author.name and sorted(taken) != sorted(wanted):
                    raise AssertionError(
                        f"plugin {author.name!r}: {impl.function.__name__} takes "
                        f"({', '.join(taken)}); {hook} has the arguments ({', '.join(wanted)})"
                    )

    def test_answers_have_the_right_type(self) -> None:
        """No question makes it raise or answer with a value of another type than the hook's."""
        author = self._author()
        for question in self._questions(author):
            question.ask(author)

    def test_the_same_question_gets_the_same_answer(self) -> None:
        """Asking twice makes no difference."""
        author = self._author()
        for question in self._questions(author):
            _expect_same(question, question.ask(author), question.ask(author), "asked again")

    def test_answers_do_not_depend_on_the_rank(self) -> None:
        """Neither on the environment's or torch.distributed's rank, nor on a random seed."""
        author = self._author()
        asked = self._questions(author)
        answers = []
        for rank in (0, 1):
            with acting_as_rank(rank):
                answers.append([question.ask(author) for question in asked])
        for question, first, second in zip(asked, *answers, strict=True):
            _expect_same(question, first, second, "on rank 1 instead of 0")

    def test_answers_do_not_depend_on_the_order_of_plugins_or_questions(self) -> None:
        """Neighbours before and behind it, and what was asked before, make no difference."""
        author = self._author()
        asked = self._questions(author)
        alone = [question.ask(author) for question in asked]
        beside = [_candidate(HookRecorder(name)) for name in ("A_first", "zz_last")]
        again = [question.ask(author, beside) for question in reversed(asked)]
        for question, first, second in zip(asked, alone, reversed(again), strict=True):
            _expect_same(question, first, second, "beside other plugins, asked in another order")

    def test_arguments_stay_as_they_were(self) -> None:
        """No hook changes what it was given, not even inside of tensors."""
        author = self._author()
        for question in self._questions(author):
            given = copy.deepcopy(question.arguments)
            question.put(author.host(question.ladder), *given)
            if not same(given, question.arguments):
                raise AssertionError(f"plugin {author.name!r}: {question} changed its arguments")

    def test_it_initializes_nothing(self) -> None:
        """Neither a process group nor CUDA is initialized by loading or asking it."""
        before = dist.is_initialized(), torch.cuda.is_initialized()
        try:
            author = self._author()
            for question in self._questions(author):
                question.ask(author)
            after = dist.is_initialized(), torch.cuda.is_initialized()
        finally:
            if dist.is_initialized() and not before[0]:
                dist.destroy_process_group()
        for what, was, now in zip(("a process group", "CUDA"), before, after, strict=True):
            if was != now:
                raise AssertionError(f"plugin {author.name!r} initialized {what}: a hook must not")

    def test_it_does_not_communicate(self) -> None:
        """In a process with a real process group, no hook issues a collective."""
        _load_inductor()
        from overlap_core.testing.recorder import CollectiveRecorder

        author = self._author()
        asked = self._questions(author)
        with ExitStack() as stack:
            if not dist.is_initialized():
                store = dist.HashStore()
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)
                stack.callback(dist.destroy_process_group)
            recorder = stack.enter_context(CollectiveRecorder())
            author.host().register_ops()
            for question in asked:
                question.ask(author)
                if recorder.collectives:
                    raise AssertionError(
                        f"plugin {author.name!r}: {question} issued {recorder.collectives[0].op}: "
                        "hooks run at different times on each rank, so this would hang"
                    )

    def test_classification_ignores_names_and_ranks(self) -> None:
        """Names of nodes, buffers and groups, and the ranks in a group, are each rank's own."""
        author = self._author()
        host = author.host()
        for node in _corpus.collect(self.graphs).nodes:
            answer, renamed = host.classify(node), host.classify(_rename(node))
            if answer is not None:
                groups = tuple(f"other_{g}" if g == node.group else g for g in answer.groups)
                answer = evolve(answer, groups=groups)
            if answer != renamed:
                raise AssertionError(
                    f"plugin {author.name!r}, node of {node.op}: with other names of nodes, "
                    f"buffers and groups it says {describe(renamed)}, not {describe(answer)}"
                )

    def test_ladders_are_never_freer_than_default(self) -> None:
        """Every ladder that it offers is at least as careful as `default`."""
        author = self._author()
        if not author.ladders:
            pytest.skip(f"plugin {author.name!r} offers no mode ladder")
        default = host_with()
        for ladder in author.ladders:
            host = author.host(ladder)
            for votes in _corpus.votes():
                limit, decision = default.choose_mode(votes), host.choose_mode(votes)
                modes = _corpus.FREEST_FIRST
                if modes.index(decision.mode) < modes.index(limit.mode) or not decision.why:
                    raise AssertionError(
                        f"ladder {ladder!r} chose {decision.mode} ({decision.why or 'no reason'}) "
                        f"where default chooses {limit.mode}: a ladder may only be more careful"
                    )

    def test_plans_are_only_made_later(self) -> None:
        """An adjusted plan has the same gathers, each at its place or later."""
        author = self._author()
        if "overlap_adjust_plan" not in author.hooks:
            pytest.skip(f"plugin {author.name!r} adjusts no plan")
        host = author.host()
        for plan, graph in _corpus.collect(self.graphs).plans:
            adjusted = host.adjust_plan(plan, graph)
            for old, new in zip(plan.placements, adjusted.placements, strict=True):
                if not old.boundary <= new.boundary <= old.original:
                    raise AssertionError(
                        f"plugin {author.name!r} moved gather {old.gather!r} from boundary "
                        f"{old.boundary} to {new.boundary}: later only, up to {old.original}"
                    )

    def test_replay_inputs_keep_shapes_and_ignore_the_rank(self) -> None:
        """For `ops`: values may change, layouts may not, and every rank makes the same."""
        author = self._author()
        if not self.ops:
            pytest.skip("no op is named in `ops`")
        for op, call in self.ops.items():
            args, kwargs = generic_arguments(author, call)
            made = []
            for rank in (0, 1):
                with acting_as_rank(rank):
                    host, given = author.host(), copy.deepcopy((args, kwargs))
                    made.append(host.materialize(op, *given))
            if not same(*made):
                raise AssertionError(f"op {op}: its replay inputs are others on rank 1 than on 0")
            _expect_layouts(op, (args, kwargs), made[0])

    def test_ranks_with_it_agree(self) -> None:
        """In the whole pipeline every rank can, orders are legal, and communication is alike."""
        author = self._author()
        jobs = (*_corpus.corpus_graphs(), *(on_ranks(graph, 2) for graph in self.graphs))
        for ladder in ("default", *author.ladders):
            config = OverlapConfig(mode_ladder=ladder)
            for graphs in jobs:
                ranks = FakeRanks(graphs=graphs, plugins=(author.plugin,), config=config)
                outcomes = ranks.run()
                for outcome in outcomes:
                    assert_legal(graphs[outcome.rank], outcome.order)
                    if f"plugin {author.name!r}" in outcome.why:
                        raise AssertionError(
                            f"with plugin {author.name!r} ranks keep program order: {outcome.why}"
                        )
                assert_same_collective_sequence(outcomes, tolerate_program_differences=True)

    def test_graphs_without_its_ops_are_left_alone(self) -> None:
        """What the pass sees in graphs of other ops is the same without the plugin.

        Also where gathers go, unless the plugin is a policy: a cost source, or one that adjusts
        plans.
        """
        author = self._author()
        bare, host = host_with(), host_with(author.plugin)
        for graphs in _corpus.corpus_graphs():
            for graph in graphs:
                without, beside = (build_skeleton(graph, h.classify) for h in (bare, host))
                if without != beside:
                    raise AssertionError(
                        f"plugin {author.name!r} changes what is known of a graph without its ops: "
                        f"{_first_change(without.entries, beside.entries)}"
                    )
            if _POLICIES.isdisjoint(author.hooks):
                plugins = ((), (author.plugin,))
                orders = [
                    [outcome.order for outcome in FakeRanks(graphs=graphs, plugins=p).run()]
                    for p in plugins
                ]
                if orders[0] != orders[1]:
                    raise AssertionError(
                        f"plugin {author.name!r} changes the order of a graph without its ops: "
                        f"{_first_change(*orders)}"
                    )

    def test_it_leaves_settings_alone(self) -> None:
        """Loading and asking it changes neither torch's configuration nor the environment."""

        _load_inductor()
        before = ProcessState.now()
        author = self._author()
        asked = self._questions(author)
        found: list[str] = []
        for ladder in ("default", *author.ladders):
            host = author.host(ladder)
            # Torch's configuration belongs to a thread, and a host calls plugins in one of its own.
            found += host.bounded(
                partial(_leaks_of, host, [q for q in asked if q.ladder == ladder])
            )
        found += _traces(before)
        if found:
            raise AssertionError(f"plugin {author.name!r} changed settings:\n" + "\n".join(found))

    def _author(self) -> Author:
        plugin = getattr(type(self), "plugin", None)
        if plugin is None:
            raise OverlapError(f"{type(self).__name__}: set `plugin` to the plugin to be tested")
        return Author(plugin)

    def _questions(self, author: Author) -> list[Question]:
        return questions(author, self.graphs, self.ops)


def _arguments(function: Any) -> tuple[str, ...]:
    code = function.__code__
    return tuple(code.co_varnames[: code.co_argcount])


def _candidate(plugin: HookRecorder) -> Candidate:
    name = plugin.overlap_plugin_name
    return Candidate(name=name, plugin=plugin, version="", distribution="")


def _load_inductor() -> None:
    """Load torch's settings, of which only what is loaded is looked at, and its collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch imports deprecated code of its own
        import overlap_core.inductor  # noqa: F401


def _traces(before: ProcessState) -> tuple[str, ...]:
    return find_leaks(before, ProcessState.now(), ignore=("op registry",))


def _leaks_of(host: PluginHost, asked: Sequence[Question]) -> tuple[str, ...]:
    before = ProcessState.now()
    host.register_ops()
    for question in asked:
        question.put(host, *copy.deepcopy(question.arguments))
    return _traces(before)


def _expect_same(question: Question, first: Any, second: Any, when: str) -> None:
    if not same(first, second):
        raise AssertionError(
            f"{question}: {when} it answers {describe(second)}, not {describe(first)}"
        )


def _rename(node: Node) -> Node:
    """The same logical operation as another rank may call it."""

    def other(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"other_{name}" for name in names)

    ranks = node.group_ranks
    return evolve(
        node,
        name=f"other_{node.name}",
        reads=other(node.reads),
        writes=other(node.writes),
        mutates=other(node.mutates),
        after=other(node.after),
        group=None if node.group is None else f"other_{node.group}",
        group_ranks=None if ranks is None else tuple(rank + 8 for rank in ranks),
    )


def _expect_layouts(
    op: str, given: tuple[Sequence[Any], Mapping[str, Any]], made: tuple[Sequence[Any], Any]
) -> None:
    # A function may return as positional what it was given by keyword: those by no place.
    places = len(given[0])
    old, new = (
        ([_tensors(arg) for arg in args[:places]], sorted(_tensors((*args[places:], kwargs))))
        for args, kwargs in (given, made)
    )
    if old != new:
        raise AssertionError(
            f"op {op}: replay inputs have other tensors than the generic ones (shape, dtype, "
            f"device): {describe(new)} instead of {describe(old)}"
        )


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [layout(value)]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [found for member in value for found in _tensors(member)]
    return []


def _first_change(without: Sequence[Any], beside: Sequence[Any]) -> str:
    for old, new in zip(without, beside, strict=False):
        if old != new:
            return f"{describe(new)} instead of {describe(old)}"
    return f"{len(beside)} entries instead of {len(without)}"
