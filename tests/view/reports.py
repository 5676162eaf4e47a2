"""Reports of layered graphs, small and large, as the pipeline makes them in memory."""

from __future__ import annotations

import overlap_core as oc
from overlap_core.report import Report
from overlap_core.testing import GraphBuilder

__all__ = ["layered_graph", "layered_reports"]

_KERNELS = 8
"""Small fused kernels in each layer."""


def layered_graph(rank: int, layers: int, *, extra: int = 0) -> oc.OverlapGraph:
    """Attention that communicates, products behind gathered weights, small kernels between.

    Times are those of a model whose gathers mostly find enough compute; `extra` matmuls at the
    head are this rank's own.
    """
    g = GraphBuilder(rank=rank, ranks=2, groups={"fsdp": (0, 1), "cp": (0, 1)})
    g.extra_compute(extra, ns=150_000)
    x = "x"
    for layer in range(layers):
        for part in ("qkv", "out", "up", "down"):
            shard = g.cast(f"shard_{layer}_{part}", ns=4_000)
            weight = g.gather(f"gather_{layer}_{part}", shard, ns=90_000)
            x = g.mm(x, weight, name=f"mm_{layer}_{part}", ns=140_000)
            for number in range(_KERNELS // 4):
                name = f"fused_{layer}_{part}_{number}"
                x = g.compute("fused", x, name=name, ns=9_000)
            if part == "qkv":
                name = f"attention_{layer}"
                x = g.opaque("mylib::attn_cp", x, name=name, group="cp", ns=260_000)
        if layer % 4 == 3:
            x = g.all_reduce(x, name=f"statistics_{layer}", ns=30_000, group="fsdp")
    return g.build()


def layered_reports(layers: int, extras: tuple[int, ...] = (0,)) -> tuple[Report, ...]:
    """One report a rank; ranks differ in the extra matmuls at their head."""
    graphs = [layered_graph(r, layers, extra=extra) for r, extra in enumerate(extras)]
    return tuple(Report.of(outcome) for outcome in oc.simulate(graphs))
