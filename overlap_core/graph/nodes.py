"""One scheduler node as plain data."""

from __future__ import annotations

from enum import StrEnum

from attrs import field, frozen

__all__ = ["InputKind", "Node", "NodeKind", "Size"]

Size = int | str
"""One dimension: an integer, or the text of an expression over the graph's symbols."""


class NodeKind(StrEnum):
    """What a node is to the pass."""

    COLLECTIVE = "collective"
    """Issues communication and returns at once; a `wait` makes the result readable."""
    WAIT = "wait"
    """Blocks the compute stream until the collective whose buffer it reads is done."""
    COMPUTE = "compute"
    """Anything else, including nodes that cost nothing (views, multi-output members)."""
    OPAQUE = "opaque"
    """A custom op whose inside is not visible; it may communicate (`issues_collective`)."""


class InputKind(StrEnum):
    """What the compiler knows of a graph's input."""

    PARAMETER = "parameter"
    """A parameter of a module, or made from parameters alone."""
    BUFFER = "buffer"
    """A tensor that a module holds and that is no parameter."""
    USER = "user"
    """An activation: an argument of the call, or saved for backward."""
    TANGENT = "tangent"
    """A gradient of an output."""

    @property
    def is_activation(self) -> bool:
        """Whether it is never a weight."""
        return self in (InputKind.USER, InputKind.TANGENT)


@frozen(kw_only=True)
class Node:
    """One node of a graph. Buffer and node names are each rank's own and carry no meaning.

    `sizes` and `dtypes` describe the outputs. Times are nanoseconds, sizes bytes. `None` means
    unknown, never zero.
    """

    name: str
    kind: NodeKind
    op: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    """Buffers changed in place: earlier readers stay before, later readers and writers after."""
    after: tuple[str, ...] = ()
    """Names of nodes that must come before this one without passing data to it."""
    sizes: tuple[tuple[Size, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    group: str | None = None
    group_ranks: tuple[int, ...] | None = None
    sent: tuple[Size, ...] = ()
    """Rows that an all-to-all sends to each rank of the group, in its order; empty: unknown."""
    received: tuple[Size, ...] = ()
    """The rows that come from each of them."""
    nbytes: int | None = None
    """Bytes of a gather's output on this rank."""
    cost_ns: int | None = None
    network_ns: int | None = None
    """The part of `cost_ns` in which an opaque op uses the network."""
    issues_collective: bool = False
    """An opaque op that communicates inside."""
    origins: tuple[str, ...] = field(default=())
    """Targets of the captured operations fused into this node, sorted."""
    captured: int | None = None
    """Place of the operation in the captured graph, before Inductor's own passes moved it."""
