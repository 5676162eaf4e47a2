"""Traces in a few lines, in the format of `torch.profiler`, and reports to set beside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attrs import define, field

import overlap_core as oc
from overlap_core.report import Report
from overlap_core.testing import GraphBuilder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TraceBuilder", "report_of"]

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@define
class TraceBuilder:
    """Events as torch 2.11 writes them on an H200; times are microseconds."""

    host: bool = True
    """Whether the host was profiled: launches, steps and names of groups."""
    rank: int | None = 0
    events: list[dict[str, Any]] = field(factory=list)

    def add(self, cat: str, name: str, start: float, dur: float, **args: Any) -> None:
        """Any complete event."""
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 0, "ts": start, "dur": dur}
            | {"args": args}
        )

    def step(self, number: int, start: float, dur: float) -> None:
        """What `profiler.step()` marks."""
        if self.host:
            self.add("user_annotation", f"ProfilerStep#{number}", start, dur)

    def kernel(
        self, start: float, dur: float, name: str = "triton_mm", stream: int = 7, **more: Any
    ) -> None:
        """A kernel, launched by the host at `launched`, or right when it starts; None: before."""
        launched = more.pop("launched", start)
        correlation = len(self.events)
        if self.host and launched is not None:
            self.add("cuda_runtime", "cudaLaunchKernel", launched, 1, correlation=correlation)
        self.add("kernel", name, start, dur, stream=stream, correlation=correlation, **more)

    def gather(
        self,
        start: float,
        dur: float,
        group: str = "fsdp",
        stream: int = 20,
        name: str = GATHER,
        **more: Any,
    ) -> None:
        """An all-gather."""
        if self.host and more.get("launched", start) is not None:
            more |= {"Process Group Name": group, "Collective name": "_allgather_base"}
        self.kernel(start, dur, name, stream, **more)

    def save(self, path: Path) -> Path:
        """Write the file; return its path."""
        data: dict[str, Any] = {"schemaVersion": 1, "traceEvents": self.events}
        if self.rank is not None:
            data["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": 2}
        path.write_text(json.dumps(data))
        return path


def report_of(*gathers: str, groups: tuple[str, ...] = (), prefix: str = "") -> Report:
    """A report whose final order launches the gathers in the order given, 100 µs each.

    Args:
        gathers: names.
        groups: of each gather; `fsdp` for all if empty.
        prefix: of the other nodes' names.
    """
    named = dict.fromkeys(("fsdp", *groups), (0, 1))
    g = GraphBuilder(rank=0, ranks=2, groups=named)
    x = "x"
    for index, name in enumerate(gathers):
        group = groups[index] if groups else "fsdp"
        weight = g.gather(name, ns=100_000, group=group)
        x = g.mm(x, weight, name=f"{prefix}mm{index}", ns=200_000)
    (outcome,) = oc.simulate([g.build()])
    return Report.of(outcome)
