"""How much a scheduler node computes and moves, for the cost sources."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from overlap_core.costs import CostRequest
from overlap_core.graph import NodeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from overlap_core.costs import Dim
    from overlap_core.graph import Node

    from .sizes import SizeReader

__all__ = ["describe_work"]


def describe_work(snode: Any, node: Node, sizes: SizeReader) -> CostRequest:
    """The structural key of a node: op, shapes by hint, dtypes, bytes read and written.

    Isomorphic nodes give equal keys, also on other ranks and whatever their symbols are called.
    """
    inputs, input_dtypes, read_bytes = _describe_tensors(_inputs(snode), sizes)
    made = [output.node for output in snode.get_outputs()]
    outputs, output_dtypes, write_bytes = _describe_tensors(made, sizes)
    return CostRequest(
        kind=str(node.kind),
        op=node.op if node.op != "fused" else "fused:" + ",".join(node.origins),
        inputs=tuple(inputs),
        input_dtypes=tuple(input_dtypes),
        outputs=tuple(outputs),
        output_dtypes=tuple(output_dtypes),
        device=_device_name(snode.get_device()),
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        group_size=None if node.group_ranks is None else len(node.group_ranks),
        nbytes=node.nbytes if node.kind is NodeKind.COLLECTIVE else None,
        node=node.name,
    )


def _inputs(snode: Any) -> list[Any]:
    """What is read: an extern node's inputs in the order of its arguments, else buffers."""
    values = getattr(snode.node, "inputs", None)
    return values or [_find_buffer(snode, dep.name) for dep in _data_reads(snode)]


def _describe_tensors(
    values: Iterable[Any], sizes: SizeReader
) -> tuple[list[tuple[Dim, ...]], list[str], int | None]:
    """Shapes, dtypes and total bytes of those values that have a shape."""
    shapes: list[tuple[Dim, ...]] = []
    dtypes: list[str] = []
    total: int | None = 0
    for value in values:
        shape = None if value is None else _shape(value)
        if shape is None:
            continue
        shapes.append(sizes.dims(shape))
        dtypes.append(_dtype(value))
        count = sizes.numel(shape)
        total = None if count is None or total is None else total + count * _itemsize(value)
    return shapes, dtypes, total


def _data_reads(snode: Any) -> list[Any]:
    from torch._inductor.dependencies import MemoryDep, StarDep

    own = snode.get_buffer_names()
    unique: dict[str, Any] = {}
    for dep in snode.read_writes.reads:
        if isinstance(dep, (MemoryDep, StarDep)) and dep.name not in own:
            unique.setdefault(dep.name, dep)
    return list(unique.values())


def _find_buffer(snode: Any, name: str) -> Any:
    from torch._inductor.virtualized import V

    buffer = snode.scheduler.name_to_buf.get(name)
    if buffer is not None:
        return buffer.node
    return V.graph.graph_inputs.get(name)


def _shape(value: Any) -> Any:
    try:
        return value.get_size()
    except (NotImplementedError, AttributeError):
        return None


def _dtype(value: Any) -> str:
    return str(value.get_dtype()).removeprefix("torch.")


def _itemsize(value: Any) -> int:
    return int(value.get_dtype().itemsize)


@lru_cache(maxsize=16)
def _device_name(device: torch.device | None) -> str:
    """Device type and model, as cost tables are told apart."""
    if device is None:
        return "cpu"
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_name(device)}"
    return device.type
