"""What the compiler knows of a graph's inputs: parameter, buffer, argument, gradient, or nothing.

Dynamo knows from where each input of a captured graph comes. AOTAutograd makes other graphs of it,
with inputs of their own, and says for each what it stands for. What is saved between forward and
backward is followed through the joint graph.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._functorch._aot_autograd import descriptors

from overlap_core.graph import InputKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["capturing", "find_input_kinds", "mark_kinds"]

KIND = "overlap_core_kind"
"""Key in `torch.fx.Node.meta`."""

_HELD = re.compile(r"\._(parameters|buffers)\b")
_ARGUMENT = re.compile(r"L\[(?!'self'\])")
"""How the name of a source begins that is an argument of the function and not its module."""
_MIXING = re.compile(r"(?:^|[.:])_?(?:mm|addmm|bmm|baddbmm|scaled_mm|matmul|linear|convolution)\b")

_captured: ContextVar[Sequence[InputKind | None]] = ContextVar("captured", default=())


@contextmanager
def capturing(module: Any) -> Iterator[None]:
    """While a graph that Dynamo captured is compiled: remember what its inputs are.

    Args:
        module: what `compile_fx` is given; anything but a captured graph is passed over.
    """
    token = _captured.set(_kinds_of(module))
    try:
        yield
    finally:
        _captured.reset(token)


def _kinds_of(module: Any) -> list[InputKind | None]:
    """By input of a captured graph. Arguments are activations only where weights are known."""
    if not isinstance(module, torch.fx.GraphModule):
        return []
    kinds: list[InputKind | None] = []
    arguments = []
    for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
        name = _source_name(node)
        held = _HELD.search(name)
        if isinstance(node.meta.get("example_value"), torch.nn.Parameter) or (
            held is not None and held[1] == "parameters"
        ):
            kinds.append(InputKind.PARAMETER)
        else:
            kinds.append(None if held is None else InputKind.BUFFER)
            if held is None and _ARGUMENT.match(name):
                arguments.append(number)
    if InputKind.PARAMETER in kinds or _holds_parameters(module):
        for number in arguments:
            kinds[number] = InputKind.USER
    return kinds


def _source_name(node: Any) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method up to torch 2.11


def _holds_parameters(module: torch.fx.GraphModule) -> bool:
    return next(module.parameters(), None) is not None


def mark_kinds(graph: torch.fx.Graph) -> None:
    """Note for each node of a joint or an inference graph what it would be as an input.

    A graph that knows nothing of its inputs is left as it is.
    """
    for node in graph.nodes:
        if KIND in node.meta:
            continue
        kind = _kind_of(node.meta.get("desc")) if node.op == "placeholder" else _derive(node)
        if kind is not None:
            node.meta[KIND] = kind


def _kind_of(desc: Any) -> InputKind | None:
    """What an input of AOTAutograd's stands for."""
    if isinstance(desc, descriptors.TangentAOTInput):
        return InputKind.TANGENT
    if isinstance(desc, descriptors.ParamAOTInput):
        return InputKind.PARAMETER
    if isinstance(desc, descriptors.BufferAOTInput):
        return InputKind.BUFFER
    if isinstance(desc, descriptors.PlainAOTInput):
        kinds = _captured.get()
        return kinds[desc.idx] if desc.idx < len(kinds) else None
    base = getattr(desc, "base", None)  # a tensor subclass, such as a DTensor, in its parts
    return None if base is None else _kind_of(base)


def _derive(node: torch.fx.Node) -> InputKind | None:
    """What is made of parameters alone, by a cast or a view, is as good as one."""
    kinds = {source.meta.get(KIND) for source in node.all_input_nodes}
    if not kinds or None in kinds:
        return None
    mixes = _MIXING.search(str(node.target)) or "c10d" in str(node.target)
    if mixes or not kinds <= {InputKind.PARAMETER, InputKind.BUFFER}:
        return InputKind.USER
    return InputKind.PARAMETER if InputKind.PARAMETER in kinds else InputKind.BUFFER


def find_input_kinds(inductor_graph: Any, names: Iterable[str]) -> dict[str, InputKind]:
    """What is known of the inputs of a graph that is being lowered."""
    graph: torch.fx.Graph = inductor_graph.graph
    placeholders = {node.target: node.meta.get(KIND) for node in graph.find_nodes(op="placeholder")}
    return {name: kind for name in names if (kind := placeholders.get(name)) is not None}
