"""Ranks whose orders of communication had parted before they came, so that one is restored.

Random sets of ranks seldom are like that, so properties have these as explicit examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_core.testing import graphs_for_ranks
from overlap_core.testing.strategies import RankSet

if TYPE_CHECKING:
    from overlap_core.testing import GraphBuilder

__all__ = ["swapped_gather", "swapped_reductions"]


def swapped_reductions() -> RankSet:
    """Two reduce-scatters in other orders, and other compute beside them."""

    def fill(g: GraphBuilder) -> None:
        for size in ((1, 1), (1,)) if g.rank else ((1,), (1, 1)):
            g.reduce_scatter("x", name=f"of{len(size)}", sizes=size)
        g.extra_compute(g.rank)
        g.mm(g.mm("of1", "of2"), g.gather("w"))

    return RankSet(graphs=tuple(graphs_for_ranks(2, fill)), stages=((0, 1),), divergence="skeleton")


def swapped_gather() -> RankSet:
    """A gather that comes before an op that communicates inside, or behind it."""

    def fill(g: GraphBuilder) -> None:
        g.mm(name="a")
        if not g.rank:
            g.gather("w")
        g.opaque("mylib::attn_cp", "a", group="cp", name="op")
        if g.rank:
            g.gather("w")
        g.gather("v", sizes=(512, 256))
        g.mm(g.mm("op", "w"), "v")

    return RankSet(graphs=tuple(graphs_for_ranks(2, fill)), stages=((0, 1),), divergence="skeleton")
