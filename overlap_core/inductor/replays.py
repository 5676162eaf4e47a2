"""From a scheduler node to an op that can be called again, with generic arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch._inductor import ir

from overlap_core.errors import ReplayError
from overlap_core.replay import ReplayItem, TensorSpec

if TYPE_CHECKING:
    from .sizes import SizeReader

__all__ = ["replay_item"]


def replay_item(snode: Any, sizes: SizeReader) -> ReplayItem:
    """The op behind an extern node, with specifications in place of its tensors.

    Strides are kept: a matmul of a transposed weight is another kernel. Symbolic sizes and numbers
    are read by hint, without a guard.

    Raises:
        ReplayError: the node is no call of an op, or an argument cannot be described.
    """
    inner = snode.node
    overload = getattr(inner, "op_overload", None)
    if not isinstance(overload, torch._ops.OpOverload):
        raise ReplayError(f"{type(inner).__name__} is no call of an op")
    if isinstance(inner, ir.FallbackKernel):
        args, kwargs = inner.unflatten_args(inner.inputs, inner.constant_args)
    elif isinstance(inner, ir.ScatterFallback):
        args, kwargs = _scatter_arguments(inner, overload)
    else:
        args, kwargs = [*inner.inputs, *inner.constant_args], inner.kwargs
    names = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    kwargs = {key: value for key, value in kwargs.items() if key not in names[: len(args)]}
    call: Any = overload
    writes_out = any(
        argument.alias_info is not None and argument.kwarg_only
        for argument in overload._schema.arguments
    )
    if writes_out and overload.namespace != "_c10d_functional":
        # The kernel writes into a buffer that Inductor allocates; the plain op makes its own.
        call = overload.overloadpacket
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    return ReplayItem(
        op_name=overload._schema.name,
        call=call,
        args=tuple(_describe(value, sizes) for value in args),
        kwargs={key: _describe(value, sizes) for key, value in kwargs.items()},
    )


def _scatter_arguments(
    inner: ir.ScatterFallback, overload: torch._ops.OpOverload
) -> tuple[list[Any], dict[str, Any]]:
    """In the order of the op: the node keeps what is no tensor apart, for two ops at once."""
    target, *tensors = inner.inputs
    dim, *numbers = inner.constant_args
    known = {argument.name for argument in overload._schema.arguments}
    kwargs = {
        key: value for key, value in inner.kwargs.items() if key in known and value is not None
    }
    return [target, dim, *tensors, *numbers], kwargs


def _describe(value: Any, sizes: SizeReader) -> Any:
    if isinstance(value, ir.IRNode):
        return _spec(value, sizes)
    if isinstance(value, sympy.Expr):
        return _number(value, sizes)
    if isinstance(value, torch.SymInt):
        return _number(value.node.expr, sizes)
    if isinstance(value, (list, tuple)):
        members = [_describe(member, sizes) for member in value]
        return tuple(members) if isinstance(value, tuple) else members
    if value is None or isinstance(
        value, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
                torch.memory_format)
    ):  # fmt: skip
        return value
    raise ReplayError(f"an argument of type {type(value).__name__} cannot be made for a replay")


def _spec(value: Any, sizes: SizeReader) -> TensorSpec:
    try:
        shape, stride = value.get_size(), value.get_stride()
        dtype, device = value.get_dtype(), value.get_device()
    except (NotImplementedError, AttributeError) as error:
        raise ReplayError(f"an argument ({type(value).__name__}) is no plain tensor") from error
    return TensorSpec(
        shape=tuple(_number(dim, sizes) for dim in shape),
        stride=tuple(_number(dim, sizes) for dim in stride),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )


def _number(value: Any, sizes: SizeReader) -> int:
    if isinstance(value, sympy.Expr) and not value.is_integer and value.is_number:
        raise ReplayError(f"the number {value} is no integer")
    hint = sizes.hint(value)
    if hint is None:
        raise ReplayError(f"the size {value} has no hint")
    return hint
