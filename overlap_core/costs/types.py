"""A cost, and the question that a cost source answers."""

from __future__ import annotations

from enum import StrEnum

from attrs import field, frozen

__all__ = ["Cost", "CostRequest", "CostSource", "Dim"]

Dim = int | tuple[str, int | None]
"""A static dimension, or ("~", hint) for a symbolic one."""


class CostSource(StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    ANALYTICAL = "analytical"
    UNKNOWN = "unknown"


@frozen(kw_only=True)
class Cost:
    """Time of one node. `ns` is None only where the source is `unknown`."""

    ns: int | None = None
    network_ns: int | None = None
    """The part in which an opaque op uses the network; None: unknown."""
    source: CostSource = CostSource.UNKNOWN
    why: str = ""
    """What kept a better source from answering."""


@frozen(kw_only=True)
class CostRequest:
    """The structural key of a cost: equal for all isomorphic nodes, whatever their symbols."""

    kind: str
    op: str
    inputs: tuple[tuple[Dim, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    outputs: tuple[tuple[Dim, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    device: str = ""
    """Device type and model, for instance `cuda:NVIDIA H200` or `cpu`."""
    flops: int | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None
    group_size: int | None = None
    """Ranks in the group of a collective; None for compute."""
    nbytes: int | None = None
    """Bytes of a collective's output on one rank."""
    node: str = field(default="", eq=False)
    """Name of one node that asks, for messages; no part of the key."""
