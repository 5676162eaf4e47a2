"""Short names for the nodes of small graphs, as example tests write them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from overlap_core import Node, NodeKind, OverlapConfig, OverlapGraph
from overlap_core.host import PluginHost
from overlap_core.skeleton import Skeleton, build_skeleton
from overlap_core.testing import on_ranks

if TYPE_CHECKING:
    from overlap_core.skeleton import Communication

__all__ = [
    "cast",
    "classify",
    "gather",
    "graph_of",
    "mm",
    "on_ranks",
    "opaque",
    "reduce_scatter",
    "skeleton_of",
    "wait",
]

_GATHER = "_c10d_functional.all_gather_into_tensor.default"
_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
_WAIT = "_c10d_functional.wait_tensor.default"


def _node(kind: NodeKind, name: str, op: str, reads: tuple[str, ...], **more: Any) -> Node:
    group = more.pop("group", None)
    if group is not None:
        more |= {"group": group, "group_ranks": (0, 1)}
    return Node(name=name, kind=kind, op=op, reads=reads, **{"writes": (name,), **more})


def mm(name: str, *reads: str, ns: int | None = 100, **more: Any) -> Node:
    """A matmul of 100 ns that writes the buffer of its own name."""
    return _node(NodeKind.COMPUTE, name, "aten.mm.out", reads or ("x",), cost_ns=ns, **more)


def cast(name: str, source: str, ns: int | None = 1, **more: Any) -> Node:
    """A copy to another dtype."""
    return _node(NodeKind.COMPUTE, name, "aten._to_copy", (source,), cost_ns=ns, **more)


def gather(
    name: str, source: str = "", ns: int | None = 100, group: str | None = "0", **more: Any
) -> Node:
    """An all-gather of 100 ns and 10 bytes, from the shard of its own name."""
    more = {"nbytes": 10, "sizes": ((64, 8),), "dtypes": ("bfloat16",), **more}
    reads = (source or f"shard_{name}",)
    return _node(NodeKind.COLLECTIVE, name, _GATHER, reads, cost_ns=ns, group=group, **more)


def reduce_scatter(
    name: str, source: str, ns: int | None = 100, group: str | None = "0", **more: Any
) -> Node:
    """A reduce-scatter of a gradient."""
    return _node(NodeKind.COLLECTIVE, name, _SCATTER, (source,), cost_ns=ns, group=group, **more)


def wait(launch: str, **more: Any) -> Node:
    """The wait for `g` is called `w.g`, like what it makes readable."""
    return _node(NodeKind.WAIT, f"w.{launch}", _WAIT, (launch,), **more)


def opaque(
    name: str,
    source: str,
    ns: int | None = 300,
    group: str | None = "1",
    network_ns: int | None = None,
    **more: Any,
) -> Node:
    """A custom op that communicates inside."""
    more = {"issues_collective": True, "network_ns": network_ns, **more}
    op = "mylib::attn_cp"
    return _node(NodeKind.OPAQUE, name, op, (source,), cost_ns=ns, group=group, **more)


def graph_of(*nodes: Node, rank: int = 0, world_size: int = 2, **more: Any) -> OverlapGraph:
    """A graph of the nodes; what nobody writes is an input, or a constant if it is called so."""
    written = {buffer for node in nodes for buffer in node.writes}
    read = dict.fromkeys(b for node in nodes for b in (*node.reads, *node.mutates))
    outside = [buffer for buffer in read if buffer not in written]
    constants = tuple(buffer for buffer in outside if buffer.startswith("constant"))
    values: dict[str, Any] = {
        "inputs": tuple(buffer for buffer in outside if buffer not in constants),
        "constants": constants,
        "outputs": nodes[-1].writes if nodes else (),
    }
    return OverlapGraph(rank=rank, world_size=world_size, nodes=nodes, **{**values, **more})


@cache
def _host() -> PluginHost:
    return PluginHost.discover(OverlapConfig(), installed=())


def classify(node: Node) -> Communication | None:
    """What the built-in plugins say of a node."""
    return _host().classify(node)


def skeleton_of(graph: OverlapGraph) -> Skeleton:
    """The skeleton with the built-in plugins."""
    return build_skeleton(graph, classify)
