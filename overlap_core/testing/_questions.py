"""Asking one plugin everything that the pass may ask it, and comparing what it answers."""

from __future__ import annotations

import copy
import os
import random
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import field, frozen

from overlap_core._discovery import find_plugins
from overlap_core.config import OverlapConfig
from overlap_core.host import PluginHost
from overlap_core.replay.realize import realize
from overlap_core.testing import _corpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from overlap_core._discovery import Candidate
    from overlap_core.graph import OverlapGraph

__all__ = ["Author", "OpCall", "Question", "acting_as_rank", "describe", "questions", "same"]

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
_TIMEOUT_S = 60.0


@frozen
class OpCall:
    """Generic arguments of an op: numbers, text, nested lists, a `TensorSpec` for each tensor."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)


class Author:
    """One plugin and the hosts in which it is asked.

    Raises:
        PluginError: the plugin cannot be loaded.
    """

    def __init__(self, plugin: object) -> None:
        self.plugin = plugin
        names, objects = ((plugin,), ()) if isinstance(plugin, str) else ((), (plugin,))
        found, _ = find_plugins(OverlapConfig(), objects, {}, installed=names)
        (self.candidate,) = (one for one in found if not one.builtin)
        self._helpers = tuple(one for one in found if one.name in ("default_ladder", "replay"))
        host = self.host()
        host.register_ops()
        self.name = self.candidate.name
        self.ladders = tuple(name for name in host.ladders() if name != "default")
        (info,) = (one for one in host.plugins() if one.name == self.name)
        self.hooks = info.hooks

    def host(self, ladder: str = "default", beside: Sequence[Candidate] = ()) -> PluginHost:
        """The plugin without the built-in answers, so that what it leaves open stays open.

        The ladder `default` is there, and `replay`, which applies functions of registered ops.
        """
        plugins = sorted((self.candidate, *beside), key=lambda one: one.name)
        return PluginHost((*plugins, *self._helpers), ladder=ladder, timeout_s=_TIMEOUT_S)


@frozen(kw_only=True, eq=False)
class Question:
    """One call of a hook; `arguments` are copied for each, so that nothing carries over."""

    hook: str
    subject: str
    arguments: tuple[Any, ...]
    put: Callable[..., Any]
    """Called with a host and the arguments."""
    ladder: str = "default"

    def ask(self, author: Author, beside: Sequence[Candidate] = ()) -> Any:
        """The answer of a fresh host."""
        host = author.host(self.ladder, beside)
        return self.put(host, *copy.deepcopy(self.arguments))

    def __str__(self) -> str:
        return f"{self.hook} on {self.subject}"


def questions(
    author: Author, graphs: Sequence[OverlapGraph], ops: Mapping[str, OpCall]
) -> list[Question]:
    """All questions that concern the hooks which the plugin implements."""
    corpus = _corpus.collect(graphs)
    found: list[Question] = []

    def add(hook: str, subject: str, put: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        # A plugin may also answer through the ops that it registers.
        if hook in author.hooks or hook == "overlap_materialize_inputs":
            found.append(Question(hook=hook, subject=subject, arguments=arguments, put=put, **more))

    for node in corpus.nodes:
        add("overlap_classify_node", f"a node of {node.op}", PluginHost.classify, node)
    for request in corpus.requests:
        add("overlap_measure_cost", f"a cost of {request.op}", PluginHost.measure_cost, request)
    for spec in _corpus.specs():
        subject = f"a {spec.dtype} tensor of shape {spec.shape}"
        add("overlap_realize_tensor", subject, PluginHost.realize_tensor, spec)
    for op, call in {_corpus.OPAQUE: OpCall(), **ops}.items():
        arguments = generic_arguments(author, call)
        add("overlap_materialize_inputs", op, PluginHost.materialize, op, *arguments)
    for ladder in author.ladders:
        for votes in _corpus.votes():
            subject = f"{len(votes)} votes, ladder {ladder!r}"
            add("overlap_choose_mode", subject, PluginHost.choose_mode, votes, ladder=ladder)
    for plan, graph in corpus.plans:
        subject = f"a plan of {len(plan.placements)} gathers"
        add("overlap_adjust_plan", subject, PluginHost.adjust_plan, plan, graph)
    for report in corpus.reports:
        add("overlap_report_section", "a report", PluginHost.report_sections, report)
    return found


def generic_arguments(author: Author, call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a replay starts from."""
    special = author.host().realize_tensor
    return realize(call.args, special), realize(dict(call.kwargs), special)


@contextmanager
def acting_as_rank(rank: int, ranks: int = 8) -> Iterator[None]:
    """Let code believe that it runs on a rank: environment, torch.distributed, random seeds."""
    variables = {**dict.fromkeys(_RANK_VARIABLES, str(rank)), "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(torch.random.fork_rng())
        stack.callback(random.setstate, random.getstate())
        torch.manual_seed(rank)
        random.seed(rank)
        answers = {"is_initialized": True, "get_rank": rank, "get_world_size": ranks}
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(dist, name, return_value=answer))
        yield


def same(one: Any, other: Any) -> bool:
    """Equality that looks into containers and compares tensors by layout and bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and _same_tensor(one, other)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(value, other[key]) for key, value in one.items())
        )
    return bool(one == other)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if layout(one) != layout(other) or one.stride() != other.stride():
        return False
    # As integers, since NaN equals nothing and some dtypes have no comparison.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if one.dtype is torch.bool or one.itemsize not in bits:
        return torch.equal(one, other)
    dtype = bits[one.itemsize]
    return torch.equal(one.view(dtype), other.view(dtype))


def layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, str]:
    """Shape, dtype and type of device."""
    return tuple(tensor.shape), str(tensor.dtype), tensor.device.type


def describe(answer: Any) -> str:
    """An answer, short enough for a message."""
    text = f"{answer!r}"
    return text if len(text) <= 300 else f"{text[:297]}..."
