"""Ranks whose orders of communication had parted before they came, so that one is restored.

Random sets of ranks seldom are like that, so properties have these as explicit examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.testing import graphs_for_ranks
from overlap_core.testing.strategies import RankSet

if TYPE_CHECKING:
    from overlap_core.testing import GraphBuilder

__all__ = ["swapped_ops", "swapped_reductions"]


def swapped_reductions() -> RankSet:
    """Two reduce-scatters in other orders, and other compute beside them."""

    def fill(g: GraphBuilder) -> None:
        for size in ((1, 1), (1,)) if g.rank else ((1,), (1, 1)):
            g.reduce_scatter("x", name=f"of{len(size)}", sizes=size)
        g.extra_compute(g.rank)
        g.mm(g.mm("of1", "of2"), g.gather("w"))

    return RankSet(graphs=tuple(graphs_for_ranks(2, fill)), stages=((0, 1),), divergence="skeleton")


def swapped_ops() -> RankSet:
    """Two ops that communicate inside; and a gather that one rank cannot launch before them."""

    def fill(g: GraphBuilder) -> None:
        g.mm(name="a")
        if g.rank:
            g.gather("w", ns=500_000)
        for rows in (2, 1) if g.rank else (1, 2):
            g.opaque("mylib::attn_cp", "a", group="cp", name=f"op{rows}", sizes=(rows, 8))
        if not g.rank:
            g.gather("w", ns=500_000, after=("op1", "op2"))
        g.mm(g.mm("op1", "op2"), "w")

    return RankSet(graphs=tuple(graphs_for_ranks(2, fill)), stages=((0, 1),), divergence="skeleton")
