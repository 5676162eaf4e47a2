"""From Inductor's scheduler nodes to an `OverlapGraph` and the questions about its costs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sympy
from attrs import evolve, frozen
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep, StarDep, WeakDep
from torch._inductor.scheduler import (
    FusedSchedulerNode,
    GroupedSchedulerNode,
    NopKernelSchedulerNode,
)

from overlap_core.errors import GraphFormatError
from overlap_core.graph import Node, NodeKind, OverlapGraph
from overlap_core.registry import is_registered, op_has_internal_collective
from overlap_core.skeleton import is_exchange

from .captured import find_shard_inputs
from .dependencies import (
    comm_buffer_names,
    comm_order_deps,
    is_collective_kernel,
    is_wait_kernel,
    issues_collective,
    operations_inside,
)
from .groups import GroupResolver
from .input_kinds import find_input_kinds
from .numbering import find_captured
from .sizes import SizeReader
from .work import describe_work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.costs import CostRequest
    from overlap_core.graph import Size

__all__ = ["AdaptedGraph", "adapt", "find_group_ranks"]

_TRANSPARENT_NAMESPACES = frozenset(
    {"aten", "prims", "prim", "quantized", "quantized_decomposed", "bucketing"}
)
"""Ops of these namespaces never communicate; anything else is opaque until somebody knows it."""
MULTI_OUTPUT = "multi_output"


@frozen(kw_only=True)
class AdaptedGraph:
    """A graph and what Inductor's nodes say beyond it."""

    graph: OverlapGraph
    requests: tuple[CostRequest | None, ...]
    """One a node; None for nodes that cost nothing."""
    comm_buffers: frozenset[str]
    sizes: SizeReader


def adapt(
    snodes: Sequence[Any],
    inductor_graph: Any,
    rank: int,
    world_size: int,
    groups: GroupResolver | None = None,
    *,
    roughly: bool = False,
) -> AdaptedGraph:
    """Describe scheduler nodes, in the order given, as plain data.

    Nothing is changed and no guard is added: symbolic sizes are read as expressions, and as
    hints through the shape environment's non-guarding query.

    Args:
        snodes: as Inductor hands them to a reorder pass.
        inductor_graph: the graph being lowered (`V.graph`).
        rank, world_size: of this process.
        groups: resolver of group names; None: a fresh one.
        roughly: leave out what a node doesn't tell, such as a size that cannot be read.

    Raises:
        GraphFormatError: the nodes cannot be described, for instance since they are grouped.
    """
    groups = GroupResolver() if groups is None else groups
    sizes = SizeReader(inductor_graph.sizevars)
    inputs = tuple(
        name
        for name in inductor_graph.graph_input_names
        if not isinstance(inductor_graph.graph_inputs.get(name), (sympy.Expr, int))
    )
    writer = {name: i for i, snode in enumerate(snodes) for name in snode.get_buffer_names()}
    rank_of_input = {name: i for i, name in enumerate(inputs)}
    comm_buffers = comm_buffer_names(snodes)
    constants: dict[str, None] = {}
    nodes: list[Node] = []
    requests: list[CostRequest | None] = []
    names = [snode.get_name() for snode in snodes]
    for position, snode in enumerate(snodes):
        if isinstance(snode, GroupedSchedulerNode):
            raise GraphFormatError(
                f"node {names[position]!r} is a GroupedSchedulerNode, as "
                "enforce_comm_ordering_for_fsdp makes them; take that pass out of "
                "reorder_for_compute_comm_overlap_passes"
            )
        droppable = set(comm_order_deps(snode, comm_buffers))
        reads: dict[str, None] = {}
        after: set[int] = set()
        for dep in snode.read_writes.reads:
            if dep in droppable:
                continue
            source = writer.get(dep.name)
            if source == position:
                continue
            if isinstance(dep, WeakDep):
                if source is not None:
                    after.add(source)
            elif isinstance(dep, (StarDep, MemoryDep)):
                if source is None and dep.name not in rank_of_input:
                    constants[dep.name] = None
                reads[dep.name] = None
        if not reads and not after:
            reads.update(dict.fromkeys(find_shard_inputs(snode, rank_of_input)))
        ordered_reads = sorted(
            reads, key=lambda name: (writer.get(name, -1), rank_of_input.get(name, -1), name)
        )
        read_from = {writer[name] for name in ordered_reads if name in writer}
        needs = (
            tuple(ordered_reads),
            tuple(names[i] for i in sorted(after - read_from)),
        )
        try:
            node, request = _describe(snode, sizes, groups, *needs)
        except Exception:
            if not roughly:
                raise
            node, request = _describe_roughly(snode, groups, *needs), None
        nodes.append(node)
        requests.append(request)
    _give_members_sizes(nodes, [_unpacked(snode, writer) for snode in snodes])
    known = writer.keys() | rank_of_input.keys() | constants.keys()
    graph = OverlapGraph(
        rank=rank,
        world_size=world_size,
        nodes=tuple(nodes),
        inputs=inputs,
        constants=tuple(constants),
        outputs=tuple(n for n in inductor_graph.get_output_names() if n in known),
        symbols=sizes.hints(),
        input_kinds=find_input_kinds(inductor_graph, inputs),
        # What is no tensor, such as None, has a name and is no input of the graph.
        input_bytes=sum(_held_bytes(inductor_graph.graph_inputs.get(n), sizes) for n in inputs),
    )
    return AdaptedGraph(
        graph=graph, requests=tuple(requests), comm_buffers=comm_buffers, sizes=sizes
    )


def _held_bytes(value: Any, sizes: SizeReader) -> int:
    """Bytes of an input by its hints; 0 where it is no tensor or a size has no hint."""
    try:
        count, width = sizes.numel(value.get_size()) or 0, int(value.get_dtype().itemsize)
    except (NotImplementedError, AttributeError):
        return 0
    return count * width


def _unpacked(snode: Any, writer: dict[str, int]) -> int | None:
    """The node whose output this one unpacks; its first read may also be that of a size's maker."""
    inner = snode.node
    if not isinstance(inner, ir.MultiOutput):
        return None
    source: Any = inner.inputs[0]
    return writer.get(source.get_name())


def _give_members_sizes(nodes: list[Node], parents: list[int | None]) -> None:
    """A node with several outputs shows no sizes itself: take those of the nodes that unpack it."""
    sizes: dict[int, list[tuple[Size, ...]]] = {}
    dtypes: dict[int, list[str]] = {}
    for node, parent in zip(nodes, parents, strict=True):
        if parent is not None:
            sizes.setdefault(parent, []).extend(node.sizes)
            dtypes.setdefault(parent, []).extend(node.dtypes)
    for parent, found in sizes.items():
        if nodes[parent].kind in (NodeKind.OPAQUE, NodeKind.COLLECTIVE):
            nodes[parent] = evolve(nodes[parent], sizes=tuple(found), dtypes=tuple(dtypes[parent]))


def find_group_ranks(snodes: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Ranks of the groups that the collectives name, for a graph that `adapt` cannot describe."""
    groups = GroupResolver()
    found = set()
    for snode in snodes:
        if is_collective_kernel(snode):
            ranks = groups.ranks(str(_group_name(snode.node, groups)))
            if ranks is not None:
                found.add(ranks)
    return tuple(sorted(found))


def _describe(
    snode: Any,
    sizes: SizeReader,
    groups: GroupResolver,
    reads: tuple[str, ...],
    after: tuple[str, ...],
) -> tuple[Node, CostRequest | None]:
    kind, op = _kind_and_op(snode)
    shapes, dtypes = _outputs(snode, sizes)
    group: str | None = None
    nbytes: int | None = None
    inside = [inner for inner in operations_inside(snode.node) if _may_communicate(inner)]
    if inside:
        kind = NodeKind.OPAQUE
    issues = bool(inside) or (kind is NodeKind.OPAQUE and op_has_internal_collective(op))
    if kind is NodeKind.COLLECTIVE or issues:
        names = {_group_name(inner, groups) for inner in inside or (snode.node,)}
        # Of several groups, or of an unknown one, nothing can be said.
        group = names.pop() if len(names) == 1 else None
    sent: tuple[Size, ...] = ()
    received: tuple[Size, ...] = ()
    if kind is NodeKind.COLLECTIVE:
        ranks = groups.ranks(group) if group else None
        nbytes = _collective_bytes(snode, sizes, ranks)
        if ranks is not None and is_exchange(op):
            sent, received = _exchanged_rows(snode.node, sizes, len(ranks))
    node = Node(
        name=snode.get_name(),
        kind=kind,
        op=op,
        reads=reads,
        writes=tuple(snode.get_buffer_names()),
        after=after,
        sizes=shapes,
        dtypes=dtypes,
        group=group,
        group_ranks=None if group is None else groups.ranks(group),
        sent=sent,
        received=received,
        nbytes=nbytes,
        issues_collective=issues,
        origins=_origins(snode),
        captured=find_captured(snode.node, _origin_nodes(snode)),
    )
    if kind is NodeKind.WAIT or op == MULTI_OUTPUT or isinstance(snode, NopKernelSchedulerNode):
        return node, None
    return node, describe_work(snode, node, sizes)


def _describe_roughly(
    snode: Any, groups: GroupResolver, reads: tuple[str, ...], after: tuple[str, ...]
) -> Node:
    """What its place among others depends on, and what can be read of the rest."""
    kind, op = _kind_and_op(snode)
    communicates = kind is NodeKind.COLLECTIVE or op_has_internal_collective(op)
    group = _group_name(snode.node, groups) if communicates else None
    captured: int | None = None
    dtypes: tuple[str, ...] = ()
    with suppress(Exception):
        captured = find_captured(snode.node, _origin_nodes(snode))
    with suppress(Exception):
        dtypes = tuple(str(b.get_dtype()).removeprefix("torch.") for b in _made_by(snode))
    return Node(
        name=snode.get_name(),
        kind=kind,
        op=op,
        reads=reads,
        writes=tuple(snode.get_buffer_names()),
        after=after,
        dtypes=dtypes,
        group=group,
        group_ranks=None if group is None else groups.ranks(group),
        issues_collective=kind is NodeKind.OPAQUE and communicates,
        captured=captured,
    )


def _may_communicate(operation: Any) -> bool:
    """Whether an operation of a graph inside a node communicates, or nobody can say."""
    if isinstance(operation, ir._CollectiveKernel):  # a wait is one, too
        return issues_collective(operation)
    op = str(getattr(operation, "op_overload", None) or "")
    if not op or _is_transparent(op):
        return False
    return op_has_internal_collective(op) or not is_registered(op)


def _is_transparent(op: str) -> bool:
    return op.partition(".")[0] in _TRANSPARENT_NAMESPACES


def _kind_and_op(snode: Any) -> tuple[NodeKind, str]:
    inner = snode.node
    if isinstance(snode, FusedSchedulerNode) or inner is None:
        return NodeKind.COMPUTE, "fused"
    overload = getattr(inner, "op_overload", None)
    op = "" if overload is None else str(overload)
    if is_wait_kernel(snode):
        return NodeKind.WAIT, op or "_c10d_functional.wait_tensor.default"
    if is_collective_kernel(snode):
        return NodeKind.COLLECTIVE, op
    if isinstance(inner, ir.MultiOutput):
        return NodeKind.COMPUTE, MULTI_OUTPUT
    if op:
        return (NodeKind.COMPUTE if _is_transparent(op) else NodeKind.OPAQUE), op
    kernel = getattr(inner, "python_kernel_name", None)
    return NodeKind.COMPUTE, str(kernel) if kernel else type(inner).__name__


def _made_by(snode: Any) -> list[Any]:
    """The buffers that a node makes; of an in-place collective, those that it changes."""
    buffers = [output.node for output in snode.get_outputs()]
    layouts = [getattr(buffer, "layout", None) for buffer in buffers]
    shaped = [
        buffer
        for buffer, layout in zip(buffers, layouts, strict=True)
        if layout is not None and not isinstance(layout, (ir.NoneLayout, ir.MultiOutputLayout))
    ]
    if not shaped and is_collective_kernel(snode):
        shaped = [value for value in snode.node.inputs if hasattr(value, "get_size")]
    return shaped


def _outputs(snode: Any, sizes: SizeReader) -> tuple[tuple[tuple[Size, ...], ...], tuple[str, ...]]:
    """Sizes and dtypes of what the node makes."""
    shaped = _made_by(snode)
    return (
        tuple(sizes.sizes(buffer.get_size()) for buffer in shaped),
        tuple(str(buffer.get_dtype()).removeprefix("torch.") for buffer in shaped),
    )


def _group_name(inner: Any, groups: GroupResolver) -> str | None:
    """The last text argument that names a process group."""
    arguments = [*getattr(inner, "constant_args", ())]
    arguments += getattr(inner, "kwargs", {}).values()
    for value in reversed(arguments):
        name = value if isinstance(value, str) else getattr(value, "group_name", None)
        if isinstance(name, str) and groups.ranks(name) is not None:
            return name
    return None


def _collective_bytes(snode: Any, sizes: SizeReader, ranks: tuple[int, ...] | None) -> int | None:
    """Bytes of a collective's result on this rank."""
    inner = snode.node
    total = 0
    if isinstance(inner.layout, (ir.NoneLayout, ir.MultiOutputLayout)):
        out_variant = "_out" in str(inner.op_overload)
        scale = len(ranks) if ranks and "all_gather" in str(inner.op_overload) else 1
        values = [v for v in inner.inputs if hasattr(v, "get_size")]
        for value in values[:1] if out_variant else values:
            count = sizes.numel(value.get_size())
            if count is None:
                return None
            total += count * value.get_dtype().itemsize * scale
        return total
    count = sizes.numel(inner.get_size())
    return None if count is None else count * inner.get_dtype().itemsize


def _exchanged_rows(
    inner: Any, sizes: SizeReader, ranks: int
) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Rows that an all-to-all sends to and receives from each rank; empty if it doesn't show."""
    with suppress(Exception):
        args, kwargs = inner.unflatten_args(inner.inputs, inner.constant_args)
        names = [argument.name for argument in inner.op_overload._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        sent = sizes.sizes(named["input_split_sizes"])
        received = sizes.sizes(named["output_split_sizes"])
        if len(sent) == len(received) == ranks:
            return sent, received
    return (), ()


def _origins(snode: Any) -> tuple[str, ...]:
    return tuple(sorted({str(origin.target) for origin in _origin_nodes(snode)}))


def _origin_nodes(snode: Any) -> list[Any]:
    return [
        origin for part in snode.get_nodes() for origin in getattr(part.node, "origins", ()) or ()
    ]
