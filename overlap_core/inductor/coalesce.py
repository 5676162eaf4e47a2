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
from torch._inductor.utils import is_using_cudagraph_partition
from torch._inductor.virtualized import V

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["coalesce", "find_uncoalescable"]

_PLAIN = "_c10d_functional.all_gather_into_tensor.default"
_CALL = "torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default"
_IMPORT = "from overlap_core.inductor.coalesced_calls import all_gather_coalesced"
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


def coalesce(calls: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> None:
    """Generate one call for each sequence of launches.

    Args:
        calls: launches and waits as scheduler nodes. The launches are plain gathers, in the
            committed order. In the order of all nodes those of one call follow each other, and
            everything that prepares their inputs comes before the first one.
    """
    # Parts of a graph that are captured apart hand over tensors, and no calls.
    functional = bool(inductor_config.triton.cudagraphs) or is_using_cudagraph_partition()
    for launches, waits in calls:
        first = launches[0]
        own = next(iter(first.get_buffer_names()))
        head = first.node
        head.__class__ = _FunctionalHead if functional else _Head
        head.coalesced = [launch.node for launch in launches]
        for launch in launches[1:]:
            # For passes after ours: whatever they move, the call has all inputs, and comes first.
            for dep in launch.read_writes.reads:
                if isinstance(dep, StarDep) and dep.name in first.scheduler.name_to_buf:
                    first.add_fake_dep(WeakDep(dep.name, mutating_buf=own, is_fake=True))
            launch.node.__class__ = _Member
        if not functional:
            for wait in waits:
                wait.node.__class__ = _CallWait
                wait.node.head = head


class _FunctionalHead(ir._CollectiveKernel):
    """The first gather of a call, by torch's functional op; each output is waited for alone."""

    coalesced: list[Any]

    def codegen(self, wrapper: Any) -> None:
        names = ", ".join(kernel.get_name() for kernel in self.coalesced)
        tensors, (size, group) = _arguments(self.coalesced)
        wrapper.writeline(f"{names} = {_CALL}([{tensors}], {size}, {group})")
        _check(self, wrapper)


class _Head(ir._CollectiveKernel):
    """The first gather of a call, by the process group itself; one wait is for all outputs."""

    coalesced: list[Any]

    def codegen(self, wrapper: Any) -> None:
        wrapper.header.writeline(_IMPORT)
        for kernel in self.coalesced:
            wrapper.writeline(wrapper.make_buffer_allocation(kernel))
        names = ", ".join(kernel.get_name() for kernel in self.coalesced)
        tensors, (_, group) = _arguments(self.coalesced)
        wrapper.writeline(
            f"{_call_name(self)} = all_gather_coalesced([{names}], [{tensors}], {group})"
        )
        _check(self, wrapper)


class _Member(ir._CollectiveKernel):
    """Another gather of a call, which its head makes."""

    def codegen(self, wrapper: Any) -> None:
        _check(self, wrapper)


class _CallWait(ir._WaitKernel):
    """The wait for a gather of a call; the first one that is reached is for all of them."""

    head: Any

    def codegen(self, wrapper: Any) -> None:
        wrapper.writeline(f"{_call_name(self.head)}.wait()")


def _call_name(head: Any) -> str:
    return f"{head.get_name()}_call"


def _arguments(kernels: Sequence[Any]) -> tuple[str, list[str]]:
    """The shards, and what else each gather is called with: the ranks and their group."""
    arguments = [kernel.codegen_args() for kernel in kernels]
    return ", ".join(shard for shard, *_ in arguments), arguments[0][1:]


def _check(kernel: Any, wrapper: Any) -> None:
    """What Inductor generates behind each extern kernel, if it is told to."""
    for name in _CHECKS:
        check = getattr(kernel, name, None)
        if check is not None:
            check(wrapper)
