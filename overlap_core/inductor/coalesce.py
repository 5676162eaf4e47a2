"""Several gathers as one coalesced call, by what is generated for them.

The scheduler's nodes stay what they are: each still writes its own buffer, so that dependencies,
lifetimes and the nodes that wait for it don't change. The first one generates the call for all,
the others generate nothing but what checks their own buffer. No copy is made: the call takes the
shards where they lie and returns one tensor for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.virtualized import V

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["coalesce", "find_uncoalescable"]

_PLAIN = "_c10d_functional.all_gather_into_tensor.default"
_CALL = "torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default"
_CHECKS = ("codegen_size_asserts", "codegen_alignment_asserts")


def find_uncoalescable(snodes: Iterable[Any]) -> frozenset[str]:
    """Names of the gathers for which no coalesced call can be generated."""
    generates_python = not (V.graph.cpp_wrapper or getattr(inductor_config, "fx_wrapper", False))
    return frozenset(
        snode.get_name()
        for snode in snodes
        if isinstance(snode.node, ir._CollectiveKernel)
        and not (generates_python and _is_plain(snode.node))
    )


def _is_plain(kernel: Any) -> bool:
    return (
        type(kernel) is ir._CollectiveKernel
        and str(kernel.op_overload) == _PLAIN
        and isinstance(kernel.layout, ir.FixedLayout)
        and len(kernel.inputs) == 1
        and len(kernel.constant_args) == 2
        and not kernel.kwargs
    )


def coalesce(calls: Sequence[Sequence[Any]]) -> None:
    """Generate one call for each sequence of launches.

    Args:
        calls: scheduler nodes of plain gathers, in the committed order. In the order of all nodes
            those of one call follow each other, and everything that prepares their inputs comes
            before the first one.
    """
    for launches in calls:
        first = launches[0]
        own = next(iter(first.get_buffer_names()))
        _Head.take(first.node, [launch.node for launch in launches])
        for launch in launches[1:]:
            # For passes after ours: whatever they move, the call has all inputs, and comes first.
            for dep in launch.read_writes.reads:
                if isinstance(dep, StarDep) and dep.name in first.scheduler.name_to_buf:
                    first.add_fake_dep(WeakDep(dep.name, mutating_buf=own, is_fake=True))
            _Member.take(launch.node)


class _Head(ir._CollectiveKernel):
    """The first gather of a call."""

    coalesced: list[Any]

    @classmethod
    def take(cls, kernel: Any, kernels: list[Any]) -> None:
        kernel.__class__ = cls
        kernel.coalesced = kernels

    def codegen(self, wrapper: Any) -> None:
        names = ", ".join(kernel.get_name() for kernel in self.coalesced)
        arguments = [kernel.codegen_args() for kernel in self.coalesced]
        tensors = ", ".join(shard for shard, *_ in arguments)
        wrapper.writeline(f"{names} = {_CALL}([{tensors}], {', '.join(arguments[0][1:])})")
        _check(self, wrapper)


class _Member(ir._CollectiveKernel):
    """Another gather of a call, which its head makes."""

    @classmethod
    def take(cls, kernel: Any) -> None:
        kernel.__class__ = cls

    def codegen(self, wrapper: Any) -> None:
        _check(self, wrapper)


def _check(kernel: Any, wrapper: Any) -> None:
    """What Inductor generates behind each extern kernel, if it is told to."""
    for name in _CHECKS:
        check = getattr(kernel, name, None)
        if check is not None:
            check(wrapper)
