"""What came of one graph on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from .costs import IDEAL

if TYPE_CHECKING:
    from .costs import Cost, CostRequest, Machine
    from .graph import OverlapGraph
    from .placement import Coalesced
    from .ranks.votes import Mode, Vote
    from .skeleton import SkeletonEntry

__all__ = ["GatherOutcome", "RankOutcome"]


@frozen(kw_only=True)
class GatherOutcome:
    """What became of one weight gather. Times are predictions in nanoseconds."""

    name: str
    source: int
    """Position in program order."""
    target: int
    """Position in the final order."""
    slot: int
    """Fixed skeleton entries before it in the final order."""
    verdict: str
    why: str
    exposed_ns_before: int
    exposed_ns_after: int
    call: int | None = None
    """Which coalesced call it is part of, counted from 0; None: it is a call of its own."""

    @property
    def hoisted(self) -> bool:
        """Whether it is launched earlier than in program order."""
        return self.target < self.source


@frozen(kw_only=True)
class RankOutcome:
    """The decision for one rank's graph, and everything that led to it."""

    rank: int
    scope: tuple[int, ...]
    """The ranks that decided together, ascending."""
    mode: Mode
    why: str
    order: tuple[str, ...]
    """Node names in the final order."""
    collectives: tuple[str, ...]
    """Names of the nodes that issue communication, in the final order."""
    gathers: tuple[GatherOutcome, ...]
    legal: bool
    committed: bool
    """False: program order was kept."""
    lasting: bool = True
    """False: program order was kept because a rank was late or failed; the next may do better."""
    votes: tuple[Vote, ...] = ()
    skeleton: tuple[SkeletonEntry, ...] = ()
    fingerprint: str = ""
    total_ns_before: int = 0
    total_ns_after: int = 0
    graph: OverlapGraph | None = field(default=None, repr=False)
    costs: tuple[Cost, ...] = field(default=(), repr=False)
    requests: tuple[CostRequest | None, ...] = field(default=(), repr=False)
    """The structural keys of `costs`; empty if only the graph was known."""
    notes: tuple[str, ...] = ()
    machine: Machine = IDEAL
    coalesced: tuple[Coalesced, ...] = ()
    """The coalesced calls of the final order, by position in program order."""

    @property
    def positions(self) -> tuple[int, ...]:
        """The final order as positions in program order; empty without a graph."""
        if self.graph is None:
            return ()
        return tuple(self.graph.index[name] for name in self.order)

    @property
    def exposed_ns_before(self) -> int:
        """Predicted exposed time of the weight gathers in program order."""
        return sum(gather.exposed_ns_before for gather in self.gathers)

    @property
    def exposed_ns_after(self) -> int:
        """Predicted exposed time of the weight gathers in the final order."""
        return sum(gather.exposed_ns_after for gather in self.gathers)

    @property
    def hoisted(self) -> int:
        """How many weight gathers are launched earlier than in program order."""
        return sum(gather.hoisted for gather in self.gathers)
