"""What a device and its host cost beside the nodes' own times."""

from __future__ import annotations

from attrs import frozen

from overlap_core.graph import NodeKind

__all__ = ["IDEAL", "Machine"]


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
    waits_for_kernel: bool = False
    """A collective that is ready while a kernel runs, or together with one, starts at its end:
    kernels that fill the device leave no room before."""
    measured: bool = False
    """Whether the slowdowns were measured on this machine."""

    def host_ns(self, kind: NodeKind, ns: int) -> int:
        """Host time to issue one node by itself.

        Args:
            kind: of the node.
            ns: its time on the device; a compute node that takes none is not launched at all.
        """
        if kind is NodeKind.COLLECTIVE:
            return self.collective_host_ns
        if kind is NodeKind.WAIT:
            return self.wait_host_ns
        if kind is NodeKind.OPAQUE:
            return self.opaque_host_ns
        return self.kernel_host_ns if ns else 0

    def call_host_ns(self, tensors: int) -> int:
        """Host time to issue a coalesced collective of some tensors."""
        return self.collective_host_ns + (tensors - 1) * self.member_host_ns


IDEAL = Machine()
"""Where only the nodes' own times count."""
