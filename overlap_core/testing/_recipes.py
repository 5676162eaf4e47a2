"""Recipes of graphs: logical operations, from which each rank's nodes are made."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from overlap_core.graph import Node, NodeKind, OverlapGraph

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "Collective",
    "Compute",
    "Gather",
    "Item",
    "MutateInput",
    "Opaque",
    "Recipe",
    "Variation",
    "Wait",
    "build_graph",
]

Dims = tuple[int | str, ...]


@frozen(kw_only=True)
class Compute:
    """A matmul over activations; `mutates` and `after` refer back to activations and nodes."""

    cost_ns: int | None
    reads: tuple[int, ...]
    mutates: int | None = None
    after: int | None = None
    sizes: Dims = (64,)


@frozen(kw_only=True)
class Gather:
    """An all-gather; its wait and its use come with a later `Wait`, or at the end.

    Styles that may move: `direct` from a shard, through a `cast`, a `pad` of a cast, a cast that
    it has `shared` with the gather before it, a `bucket` with a copy-in chain, `coalesced` with
    multi-output members. Styles that stay: of a `constant`, of an `activation`, `dead` (nobody
    reads it), `unwaited`.
    """

    style: str
    group: int | None
    cost_ns: int | None
    producer_ns: int | None = None
    use_ns: int | None = None
    nbytes: int | None = None
    outputs: int = 1
    after: int | None = None
    early_member: bool = True
    """The members follow the launch at once; else they come with the wait."""
    sizes: Dims = (64,)


@frozen(kw_only=True)
class Collective:
    """Another launch with a wait: a `reduce_scatter`, or an `in_place` all-reduce."""

    style: str
    group: int | None
    cost_ns: int | None
    sizes: Dims = (64,)


@frozen(kw_only=True)
class Opaque:
    """A custom op, which communicates if `issues`."""

    issues: bool
    group: int | None
    cost_ns: int | None
    network_ns: int | None = None
    sizes: Dims = (64,)


@frozen(kw_only=True)
class Wait:
    """Wait for one of the launches that nobody waited for yet, and use it."""

    which: int


@frozen(kw_only=True)
class MutateInput:
    """Change a shard in place, from an activation or from itself."""

    which: int
    from_activation: bool


Item = Compute | Gather | Collective | Opaque | Wait | MutateInput


@frozen(kw_only=True)
class Recipe:
    """The items in program order."""

    items: tuple[Item, ...]
    prompt: bool = False
    """Every gather is waited for at once, as in a graph that nobody has reordered yet."""
    shards: int = 3
    hints: Mapping[str, int] = field(factory=dict)


@frozen(kw_only=True)
class Variation:
    """How one rank differs without any difference in communication."""

    salt: str = ""
    """Goes into all names."""
    extra: tuple[tuple[int, Compute], ...] = ()
    """Further compute, each before the item of a number; nobody else reads it."""
    dropped: frozenset[int] = frozenset()
    """Numbers of `Compute` items that this rank does not have."""
    stretch: float = 1.0
    """Factor on all known costs."""
    static: frozenset[str] = frozenset()
    """Symbols that are plain integers on this rank."""
    symbols: Mapping[str, str] = field(factory=dict)


def build_graph(
    recipe: Recipe, variation: Variation, rank: int, stage: Iterable[int], world_size: int
) -> OverlapGraph:
    """One rank's graph. Group 0 and 1 hold all ranks of the stage, group 2 this rank alone."""
    builder = _Builder(recipe=recipe, variation=variation, rank=rank, stage=tuple(stage))
    for number, item in enumerate(recipe.items):
        for before, compute in variation.extra:
            if before == number:
                builder.add_compute(compute, extra=True)
        if number not in variation.dropped:
            builder.add(item)
            if recipe.prompt and isinstance(item, Gather):
                builder.wait(builder.pending.pop())
    return builder.finish(world_size)


@define(kw_only=True)
class _Pending:
    """A launch that waits to be waited for."""

    buffers: tuple[str, ...]
    waits: bool = True
    in_place: bool = False
    used: bool = True
    members: int = 0
    use_ns: int | None = None


@define(kw_only=True)
class _Builder:
    recipe: Recipe
    variation: Variation
    rank: int
    stage: tuple[int, ...]
    nodes: list[Node] = field(factory=list)
    activations: list[str] = field(factory=list)
    pending: list[_Pending] = field(factory=list)
    cast: str | None = None
    shard: int = 0
    buffers: int = 0

    def buffer(self) -> str:
        self.buffers += 1
        return f"{self.variation.salt}buf{self.buffers}"

    def emit(self, kind: NodeKind, op: str, reads: Iterable[str], **values: object) -> str:
        """Add a node with one fresh output, unless `writes` is among the values."""
        writes = values.setdefault("writes", (self.buffer(),))
        cost_ns = values.get("cost_ns")
        if isinstance(cost_ns, int):
            values["cost_ns"] = round(cost_ns * self.variation.stretch)
        group = values.pop("group", None)
        if group is not None:
            ranks = (self.rank,) if group == 2 else self.stage
            values |= {"group": f"{self.variation.salt}g{group}", "group_ranks": ranks}
        dims = values.pop("dims", None)
        if isinstance(dims, tuple):
            values |= {"sizes": (tuple(map(self.size, dims)),), "dtypes": ("bfloat16",)}
        name = f"{self.variation.salt}op{len(self.nodes)}"
        reads = tuple(dict.fromkeys(reads))
        self.nodes.append(Node(name=name, kind=kind, op=op, reads=reads, **values))  # type: ignore[arg-type]
        return writes[0] if isinstance(writes, tuple) and writes else ""

    def size(self, dim: int | str) -> int | str:
        def rename(found: re.Match[str]) -> str:
            if found[0] in self.variation.static:
                return str(self.recipe.hints[found[0]])
            return self.variation.symbols.get(found[0], found[0])

        return dim if isinstance(dim, int) else re.sub(r"\b[su]\d+\b", rename, dim)

    def activation(self, back: int = 0) -> str:
        """A buffer that no weight gather can come from."""
        if not self.activations:
            made = self.emit(NodeKind.COMPUTE, "aten.mm.out", ("x", "x"), cost_ns=5_000)
            self.activations.append(made)
        return self.activations[-1 - back % len(self.activations)]

    def earlier(self, back: int | None) -> tuple[str, ...]:
        if back is None or not self.nodes:
            return ()
        return (self.nodes[-1 - back % len(self.nodes)].name,)

    def next_shard(self) -> str:
        self.shard += 1
        return f"shard{self.shard % self.recipe.shards}"

    def add(self, item: Item) -> None:
        match item:
            case Compute():
                self.add_compute(item)
            case Gather():
                self.add_gather(item)
            case Collective():
                self.add_collective(item)
            case Opaque():
                made = self.emit(
                    NodeKind.OPAQUE,
                    "mylib::attn_cp",
                    (self.activation(),),
                    cost_ns=item.cost_ns,
                    network_ns=item.network_ns,
                    issues_collective=item.issues,
                    group=item.group if item.issues else None,
                    dims=item.sizes,
                )
                self.activations.append(made)
            case Wait():
                if self.pending:
                    self.wait(self.pending.pop(item.which % len(self.pending)))
            case MutateInput():
                shard = f"shard{item.which % self.recipe.shards}"
                reads = (self.activation(),) if item.from_activation else ()
                self.emit(NodeKind.COMPUTE, "aten.copy_", reads, mutates=(shard,), writes=())

    def add_compute(self, item: Compute, *, extra: bool = False) -> None:
        mutates = () if item.mutates is None or extra else (self.activation(item.mutates),)
        made = self.emit(
            NodeKind.COMPUTE,
            "aten.mm.out",
            [self.activation(back) for back in item.reads],
            cost_ns=item.cost_ns,
            mutates=mutates,
            after=self.earlier(item.after),
            dims=item.sizes,
        )
        if not extra:
            self.activations.append(made)

    def add_gather(self, item: Gather) -> None:
        sources, style, producer_ns = [self.next_shard()], item.style, item.producer_ns
        mutates: tuple[str, ...] = ()
        if style == "constant":
            sources = ["constant0"]
        elif style == "activation":
            sources = [self.activation(item.outputs)]
        elif style == "shared" and self.cast is not None:
            sources = [self.cast]
        elif style == "bucket":
            bucket = self.emit(NodeKind.COMPUTE, "aten.empty.memory_format", (), cost_ns=0)
            for source in (*sources, self.next_shard()):
                cast = self.emit(NodeKind.COMPUTE, "aten._to_copy", (source,), cost_ns=producer_ns)
                copied: dict[str, object] = {"mutates": (bucket,), "writes": ()}
                self.emit(NodeKind.COMPUTE, "aten.copy_", (cast,), cost_ns=producer_ns, **copied)
            sources, mutates = [bucket], (bucket,)
        elif style in ("cast", "pad", "shared"):
            sources = [self.emit(NodeKind.COMPUTE, "fused", sources, cost_ns=producer_ns)]
            if style == "pad":
                sources = [self.emit(NodeKind.COMPUTE, "aten.constant_pad_nd", sources)]
            self.cast = sources[0]
        coalesced = style == "coalesced"
        suffix = "_coalesced" if coalesced else "_out" if style == "bucket" else ""
        made = self.emit(
            NodeKind.COLLECTIVE,
            f"_c10d_functional.all_gather_into_tensor{suffix}.default",
            sources,
            mutates=mutates,
            cost_ns=item.cost_ns,
            nbytes=item.nbytes,
            group=item.group,
            after=self.earlier(item.after),
            dims=item.sizes,
        )
        pending = _Pending(
            buffers=mutates or (made,),
            waits=style != "unwaited",
            in_place=bool(mutates),
            used=style not in ("dead", "unwaited"),
            members=item.outputs if coalesced else 0,
            use_ns=item.use_ns,
        )
        if item.early_member:
            self.unpack(pending)
        self.pending.append(pending)

    def unpack(self, pending: _Pending) -> None:
        if pending.members:
            pending.buffers = tuple(
                self.emit(NodeKind.COMPUTE, "multi_output", pending.buffers[:1])
                for _ in range(pending.members)
            )
            pending.members = 0

    def add_collective(self, item: Collective) -> None:
        in_place = item.style == "in_place"
        source = self.activation()
        op = "all_reduce_" if in_place else "reduce_scatter_tensor"
        made = self.emit(
            NodeKind.COLLECTIVE,
            f"_c10d_functional.{op}.default",
            (source,),
            mutates=(source,) if in_place else (),
            cost_ns=item.cost_ns,
            group=item.group,
            dims=item.sizes,
        )
        if in_place:  # nobody may touch it until its wait
            self.activations = [name for name in self.activations if name != source]
        buffers = (source,) if in_place else (made,)
        self.pending.append(_Pending(buffers=buffers, in_place=in_place))

    def wait(self, pending: _Pending) -> None:
        self.unpack(pending)
        if not pending.waits:
            return
        ready = []
        for buffer in pending.buffers:
            in_place: dict[str, object] = {"mutates": (buffer,)} if pending.in_place else {}
            op = "_c10d_functional.wait_tensor.default"
            made = self.emit(NodeKind.WAIT, op, (buffer,), **in_place)
            ready.append(buffer if pending.in_place else made)
        if pending.used:
            reads = (*ready, self.activation())
            cost_ns = pending.use_ns
            self.activations.append(
                self.emit(NodeKind.COMPUTE, "aten.mm.out", reads, cost_ns=cost_ns)
            )

    def finish(self, world_size: int) -> OverlapGraph:
        while self.pending:
            self.wait(self.pending.pop(0))
        names = self.variation.symbols
        shards: Sequence[str] = [f"shard{number}" for number in range(self.recipe.shards)]
        return OverlapGraph(
            rank=self.rank,
            world_size=world_size,
            nodes=tuple(self.nodes),
            inputs=("x", *shards),
            constants=("constant0",),
            outputs=tuple(self.activations[-1:]),
            symbols={names.get(name, name): hint for name, hint in self.recipe.hints.items()},
        )
