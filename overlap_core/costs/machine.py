"""What a device and its host cost beside the nodes' own times."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Machine"]


@frozen(kw_only=True)
class Machine:
    """Host times in nanoseconds, and how much compute and gathers slow each other.

    The default is a machine on which only the nodes' own times count: the host is never late and
    nothing slows anything.
    """

    kernel_host_ns: int = 0
    """Host time to issue one compute node."""
    opaque_host_ns: int = 0
    """Host time to issue one opaque op."""
    collective_host_ns: int = 0
    """Host time to issue one collective."""
    member_host_ns: int = 0
    """Host time of each further tensor in a coalesced collective."""
    wait_host_ns: int = 0
    """Host time to issue one wait."""
    gather_slowdown: float = 1.0
    """A collective beside compute takes this many times its time alone."""
    compute_slowdown: float = 1.0
    """Compute beside a collective takes this many times its time alone."""
    measured: bool = False
    """Whether the slowdowns were measured on this machine."""
