"""Which of Inductor's dependencies between scheduler nodes are correctness, and which are not.

Four kinds of ordering carry `is_fake=True`: the order of communication, write after read,
control, and conditional order. Only the first may be dropped, by whoever orders communication
itself; it is told by `mutating_buf`, which names the dependent collective's own kernel buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch.utils._ordered_set import OrderedSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "comm_buffer_names",
    "comm_order_deps",
    "is_collective_kernel",
    "is_wait_kernel",
    "issues_collective",
    "operations_inside",
    "reorder_comm_deps",
]


def is_collective_kernel(snode: Any) -> bool:
    """A node that Inductor itself knows to issue communication."""
    return issues_collective(snode.node)


def issues_collective(inner: Any) -> bool:
    """The same of what such a node holds."""
    return isinstance(inner, ir._CollectiveKernel) and not isinstance(inner, ir._WaitKernel)


def is_wait_kernel(snode: Any) -> bool:
    """A node that waits for a collective."""
    return isinstance(snode.node, ir._WaitKernel)


def operations_inside(inner: Any) -> Iterator[Any]:
    """Operations of the graphs that a node calls, such as the branches of `torch.cond`."""
    # Subgraphs are attributes of their own in each class that has some, or (2.14) a list of them.
    for value in vars(inner).values() if isinstance(inner, ir.ExternKernel) else ():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, ir.Subgraph):
                for operation in getattr(part.graph, "operations", ()):
                    yield operation
                    yield from operations_inside(operation)


def comm_order_deps(snode: Any, comm_buffers: frozenset[str]) -> tuple[Any, ...]:
    """The dependencies of a collective that only keep the order of communication.

    Args:
        snode: any scheduler node.
        comm_buffers: buffers that collectives and waits write.
    """
    if not is_collective_kernel(snode):
        return ()
    own = next(iter(snode.get_buffer_names()))
    return tuple(
        dep
        for dep in snode.read_writes.reads
        if isinstance(dep, WeakDep)
        and getattr(dep, "is_fake", False)
        and dep.mutating_buf == own
        and dep.name in comm_buffers
    )


def reorder_comm_deps(communicating: Sequence[Any], comm_buffers: frozenset[str]) -> None:
    """Make the order of communication that a committed order has known to Inductor's later passes.

    Each collective loses the ordering it came with and is put behind the launch (not the wait) of
    the one before it. Opaque ops that communicate join the chain, of which Inductor knows nothing.

    Args:
        communicating: the nodes that issue communication, in the committed order.
        comm_buffers: buffers that collectives and waits write.
    """
    previous: str | None = None
    for snode in communicating:
        own = next(iter(snode.get_buffer_names()))
        stale = comm_order_deps(snode, comm_buffers)
        if stale:
            snode.set_read_writes(snode.read_writes.remove_reads(OrderedSet(stale)))
        if previous is not None:
            snode.add_fake_dep(WeakDep(previous, mutating_buf=own, is_fake=True))
        previous = own


def comm_buffer_names(snodes: Iterable[Any]) -> frozenset[str]:
    """Buffers that collectives and waits write."""
    return frozenset(
        name
        for snode in snodes
        if is_collective_kernel(snode) or is_wait_kernel(snode)
        for name in snode.get_buffer_names()
    )
