"""Plugin `replay`: the `materialize_inputs` functions of registered ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_core.hookspecs import hookimpl
from overlap_core.registry import apply_materialize_inputs, get_materialize_inputs_hook

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from overlap_core.replay.types import TensorSpec

__all__ = ["overlap_materialize_inputs", "overlap_realize_tensor"]

overlap_plugin_name = "replay"


@hookimpl(trylast=True)
def overlap_materialize_inputs(
    op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """Apply the op's registered function; None if it has none."""
    hook = get_materialize_inputs_hook(op_name)
    return None if hook is None else apply_materialize_inputs(hook, args, kwargs)


@hookimpl(trylast=True)
def overlap_realize_tensor(spec: TensorSpec) -> torch.Tensor | None:
    """No opinion: the generic way makes every dtype that noise can be drawn for."""
    return None
