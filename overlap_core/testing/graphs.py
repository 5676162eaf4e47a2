"""Graphs in a few lines: `GraphBuilder`, and one graph or one recipe for many ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from overlap_core.costs import dtype_bytes
from overlap_core.errors import GraphFormatError
from overlap_core.graph import Node, NodeKind, OverlapGraph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from overlap_core.graph import Size

    Sizes = Sequence[Size]

__all__ = ["GraphBuilder", "graphs_for_ranks", "on_ranks"]

_FUNCTIONAL = "_c10d_functional"
_SIZES = (1024, 256)


@define(kw_only=True)
class GraphBuilder:
    """Builds an `OverlapGraph` node by node, in program order.

        g = GraphBuilder(rank=0, ranks=2)
        w = g.gather("w0", ns=100_000)
        y = g.mm("x", w)
        g.opaque("mylib::attn", y, group="cp")
        graph = g.build()

    Each method adds one node and returns its name, which is what later nodes read. Reading a
    collective reads what its wait made; a wait that isn't there yet is put right before the
    reader, under the name `wait_w0`. A name that no node has is an input of the graph.

    Times are nanoseconds, sizes elements, `ns=None` an unknown cost. Nodes write one tensor each,
    of `sizes` and `dtype`; a size is an integer or an expression over `symbols`.
    """

    rank: int = 0
    ranks: int = 2
    """The world's size."""
    groups: Mapping[str, tuple[int, ...]] = field(factory=dict)
    """Ranks of each process group by name; a group that is not here holds all ranks."""
    symbols: Mapping[str, int | None] = field(factory=dict)
    """Size hints of the symbols in `sizes`."""
    _nodes: dict[str, Node] = field(factory=dict, init=False)
    _inputs: dict[str, None] = field(factory=dict, init=False)
    _constants: dict[str, None] = field(factory=dict, init=False)
    _outputs: tuple[str, ...] | None = field(default=None, init=False)

    def gather(
        self, name: str, source: str | None = None, *, ns: int | None = 100_000, **more: Any
    ) -> str:
        """A weight gather, from the input `shard_<name>` unless `source` says otherwise."""
        op = f"{_FUNCTIONAL}.all_gather_into_tensor.default"
        return self.collective(op, source or f"shard_{name}", name=name, ns=ns, **more)

    def reduce_scatter(self, source: str, *, ns: int | None = 100_000, **more: Any) -> str:
        """A reduce-scatter, such as of a gradient."""
        op = f"{_FUNCTIONAL}.reduce_scatter_tensor.default"
        return self.collective(op, source, ns=ns, **more)

    def all_reduce(self, source: str, *, ns: int | None = 100_000, **more: Any) -> str:
        """An all-reduce."""
        return self.collective(f"{_FUNCTIONAL}.all_reduce.default", source, ns=ns, **more)

    def all_to_all(self, source: str, *, ns: int | None = 100_000, **more: Any) -> str:
        """An all-to-all; `sent` and `received` say how many rows go to and come from each rank."""
        return self.collective(f"{_FUNCTIONAL}.all_to_all_single.default", source, ns=ns, **more)

    def collective(self, op: str, *reads: str, group: str | None = "fsdp", **more: Any) -> str:
        """Any launch that is waited for elsewhere; `nbytes` follows from sizes and dtype."""
        return self.add(NodeKind.COLLECTIVE, op, *reads, group=group, **more)

    def wait(self, launch: str) -> str:
        """The wait for a collective, for a graph in which it is not right before its reader."""
        if self._node(launch).kind is not NodeKind.COLLECTIVE:
            raise GraphFormatError(f"wait({launch!r}): {launch!r} is no collective")
        name, op = f"wait_{launch}", f"{_FUNCTIONAL}.wait_tensor.default"
        node = Node(name=name, kind=NodeKind.WAIT, op=op, reads=(launch,), writes=(name,))
        return self._append(node)

    def mm(self, *reads: str, ns: int | None = 100_000, **more: Any) -> str:
        """A matmul, of the input `x` unless it reads something."""
        return self.compute("aten.mm.out", *(reads or ("x",)), ns=ns, **more)

    def cast(self, source: str, *, ns: int | None = 1_000, **more: Any) -> str:
        """A copy to another dtype, as before many weight gathers."""
        return self.compute("aten._to_copy", source, ns=ns, **more)

    def compute(self, op: str, *reads: str, **more: Any) -> str:
        """Any compute."""
        return self.add(NodeKind.COMPUTE, op, *reads, **more)

    def extra_compute(self, count: int = 1, *, ns: int | None = 100_000) -> None:
        """Matmuls that only this rank has and nobody reads: how graphs of ranks come to differ."""
        for _ in range(count):
            self.mm("x", name=self._fresh("extra"), ns=ns)

    def opaque(
        self, op: str, *reads: str, group: str | None = None, ns: int | None = 300_000, **more: Any
    ) -> str:
        """A custom op; with a group, one that communicates inside on it."""
        more = {"issues_collective": group is not None, **more}
        return self.add(NodeKind.OPAQUE, op, *reads, group=group, ns=ns, **more)

    def add(
        self,
        kind: NodeKind,
        op: str,
        *reads: str,
        name: str | None = None,
        ns: int | None = 100_000,
        sizes: Sizes = _SIZES,
        dtype: str = "bfloat16",
        group: str | None = None,
        **more: Any,
    ) -> str:
        """Any node; `more` are further attributes of `Node`.

        Raises:
            GraphFormatError: the name is taken, or read before as an input.
        """
        values: dict[str, Any] = {"sizes": (tuple(sizes),), "dtypes": (dtype,), "cost_ns": ns}
        if group is not None:
            values |= {"group": group, "group_ranks": self._ranks_of(group)}
        if kind is NodeKind.COLLECTIVE:
            values["nbytes"] = _nbytes(sizes, dtype)
        for what in ("mutates", "writes", "after"):
            if isinstance(more.get(what), str):
                raise GraphFormatError(f"{what}={more[what]!r}: expected a tuple of names")
        read = tuple(dict.fromkeys(self._readable(buffer) for buffer in reads))
        for buffer in more.get("mutates", ()):
            self._readable(buffer)
        name = name or self._fresh(_stem(op))
        values = {"writes": (name,), **values, **more}
        return self._append(Node(name=name, kind=kind, op=op, reads=read, **values))

    def constant(self, name: str) -> str:
        """A buffer that is baked into the graph; a gather fed by it alone is not of weights."""
        self._refuse_taken(name)
        self._constants[name] = None
        return name

    def output(self, *names: str) -> None:
        """What the graph returns; without this call, what the last node made."""
        self._outputs = tuple(self._readable(name) for name in names)

    def build(self) -> OverlapGraph:
        """The graph.

        Raises:
            GraphFormatError: the nodes break a rule of the format; says which.
        """
        outputs = self._outputs
        if outputs is None:
            outputs = next(iter(reversed(self._nodes.values()))).writes if self._nodes else ()
        return OverlapGraph(
            rank=self.rank,
            world_size=self.ranks,
            nodes=tuple(self._nodes.values()),
            inputs=tuple(self._inputs),
            constants=tuple(self._constants),
            outputs=outputs,
            symbols=self.symbols,
        )

    def _ranks_of(self, group: str) -> tuple[int, ...]:
        return tuple(self.groups.get(group, range(self.ranks)))

    def _node(self, name: str) -> Node:
        if name not in self._nodes:
            known = ", ".join(self._nodes) or "none"
            raise GraphFormatError(f"no node is named {name!r}; nodes so far: {known}")
        return self._nodes[name]

    def _readable(self, buffer: str) -> str:
        """The buffer that a reader of a name reads, after a wait where one is needed."""
        node = self._nodes.get(buffer)
        if node is not None and node.kind is NodeKind.COLLECTIVE:
            return f"wait_{buffer}" if f"wait_{buffer}" in self._nodes else self.wait(buffer)
        written = any(buffer in known.writes for known in self._nodes.values())
        if not written and buffer not in self._constants:
            self._inputs[buffer] = None
        return buffer

    def _append(self, node: Node) -> str:
        self._refuse_taken(node.name)
        self._nodes[node.name] = node
        return node.name

    def _refuse_taken(self, name: str) -> None:
        if name in self._nodes or name in self._constants:
            raise GraphFormatError(f"the name {name!r} is taken: give this one another name")
        if name in self._inputs:
            raise GraphFormatError(
                f"{name!r} was read before and so became an input of the graph: add what makes it "
                "before what reads it, or give it another name"
            )

    def _fresh(self, stem: str) -> str:
        number = 0
        while f"{stem}{number}" in self._nodes or f"{stem}{number}" in self._inputs:
            number += 1
        return f"{stem}{number}"


def graphs_for_ranks(
    ranks: int, fill: Callable[[GraphBuilder], object], **more: Any
) -> tuple[OverlapGraph, ...]:
    """One graph a rank; `fill` adds the nodes and may look at `builder.rank` to make them differ.

    `more` goes to `GraphBuilder`.
    """
    builders = [GraphBuilder(rank=rank, ranks=ranks, **more) for rank in range(ranks)]
    for builder in builders:
        fill(builder)
    return tuple(builder.build() for builder in builders)


def on_ranks(graph: OverlapGraph, ranks: int) -> list[OverlapGraph]:
    """The same graph for each of several ranks, with groups that hold all of them."""
    everybody = tuple(range(ranks))
    nodes = tuple(
        evolve(node, group_ranks=everybody if node.group_ranks else None) for node in graph.nodes
    )
    return [evolve(graph, rank=r, world_size=ranks, nodes=nodes) for r in everybody]


def _nbytes(sizes: Iterable[Size], dtype: str) -> int | None:
    """Bytes of one tensor; None with a symbolic size or an unknown dtype."""
    static = [size for size in sizes if isinstance(size, int)]
    width = dtype_bytes(dtype)
    if width is None or len(static) != len(tuple(sizes)):
        return None
    return math.ceil(math.prod(static) * width)


def _stem(op: str) -> str:
    """A short name for nodes of an op: `mm` for `aten.mm.out`, `attn` for `mylib::attn`."""
    words = op.replace("::", ".").split(".")
    return (words[1] if len(words) > 1 else words[0]).strip("_") or "node"
