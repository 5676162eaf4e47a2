"""Whether what ranks decided is legal, equal in its collectives, and free of deadlocks.

Nothing here uses what the pass derives from a graph: which launches are the same on all ranks
follows from counting equal ones in program order, values are followed symbolically, and the ranks
are run side by side.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, zip_longest
from typing import TYPE_CHECKING, Literal

from attrs import evolve, frozen

from overlap_core import NodeKind
from overlap_core.testing import assert_legal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from overlap_core.graph import Node
    from overlap_core.outcome import RankOutcome

__all__ = ["Checked", "Group", "Launch", "Step", "check", "find_deadlock"]

Group = tuple[str, tuple[int, ...]]
"""The last character of a process group's name, equal on all ranks, and the ranks in it."""
Launch = tuple[Group, str, int]
"""A launch as all ranks know it: its group, what is issued, and its number among these
in program order."""
Step = tuple[Literal["issue", "block"], Launch]


@frozen(kw_only=True)
class Checked:
    """What the checks found in the outcomes of one job."""

    faults: tuple[str, ...] = ()
    """What is wrong, a sentence each."""
    misfits: int = 0
    """Scopes whose programs would hang or mix up data before anything is moved."""
    restored: int = 0
    """Those of them that fit in the end."""


def check(outcomes: Sequence[RankOutcome]) -> Checked:
    """Every order is legal; ranks fit each other, unless they never did and nothing has changed.

    Args:
        outcomes: of all ranks of a job.
    """
    found = [fault for outcome in outcomes for fault in _illegal(outcome)]
    if found:  # what is not an order of the graph has no sequence to compare
        return Checked(faults=tuple(found))
    misfits = restored = 0
    for scope in dict.fromkeys(outcome.scope for outcome in outcomes):
        ranks = [outcome for outcome in outcomes if outcome.rank in scope]
        programs = {outcome.rank: _Issued.in_program(outcome) for outcome in ranks}
        finals = {rank: program.in_final() for rank, program in programs.items()}
        if len({(outcome.mode, outcome.committed) for outcome in ranks}) > 1:
            found.append(f"split: the ranks of scope {scope} decide differently")
        problems = [*_divergent(finals), *_stuck(finals)]
        if not _fits(programs):
            misfits += 1
            restored += not problems
            if all(programs[rank].launches == finals[rank].launches for rank in scope):
                continue
        else:
            found += _slower(ranks)
        found += problems
    return Checked(faults=tuple(found), misfits=misfits, restored=restored)


def _illegal(outcome: RankOutcome) -> Iterator[str]:
    assert outcome.graph is not None
    try:
        assert_legal(outcome.graph, outcome.order)
    except AssertionError as error:
        yield f"illegal: rank {outcome.rank}: {error}"
    program = tuple(node.name for node in outcome.graph.nodes)
    if not outcome.committed and outcome.order != program:
        yield f"illegal: rank {outcome.rank} moves nodes without a commit"


def _slower(ranks: Iterable[RankOutcome]) -> Iterator[str]:
    for outcome in ranks:
        if outcome.exposed_ns_after > outcome.exposed_ns_before:
            yield f"slower: rank {outcome.rank} exposes more than program order"


@frozen(kw_only=True)
class _Issued:
    """What one rank issues and waits for, in one order."""

    rank: int
    outcome: RankOutcome
    order: tuple[Node, ...]
    named: Mapping[str, Launch]
    """By node."""
    awaited: Mapping[str, tuple[Launch, ...]]
    """By waiting node, the launches that it waits for."""

    @classmethod
    def in_program(cls, outcome: RankOutcome) -> _Issued:
        assert outcome.graph is not None
        nodes, named = outcome.graph.nodes, {}
        seen: Counter[tuple[Group, str]] = Counter()
        everybody = tuple(range(outcome.graph.world_size))
        for node in nodes:
            if node.kind is NodeKind.COLLECTIVE or node.issues_collective:
                ranks = everybody if node.group_ranks is None else node.group_ranks
                group = ("?" if node.group is None else node.group[-1], ranks)
                words = _in_words(node)
                named[node.name] = (group, words, seen[group, words])
                seen[group, words] += 1
        awaited = _find_awaited(nodes, named)
        return cls(rank=outcome.rank, outcome=outcome, order=nodes, named=named, awaited=awaited)

    def in_final(self) -> _Issued:
        by_name = {node.name: node for node in self.order}
        return evolve(self, order=tuple(by_name[name] for name in self.outcome.order))

    @property
    def launches(self) -> list[Launch]:
        return [self.named[node.name] for node in self.order if node.name in self.named]

    def shared_with(self, rank: int) -> list[Launch]:
        return [launch for launch in self.launches if rank in launch[0][1]]

    def steps(self, blocking: str) -> list[Step]:
        """For `find_deadlock`, with opaque ops, waits too, or all launches blocking."""
        found: list[Step] = []
        for node in self.order:
            launch = self.named.get(node.name)
            if launch is not None:
                found.append(("issue", launch))
                if blocking == "all" or node.kind is not NodeKind.COLLECTIVE:
                    found.append(("block", launch))
            elif blocking != "opaque":
                found += [("block", launch) for launch in self.awaited.get(node.name, ())]
        return found


def _in_words(node: Node) -> str:
    """What is issued, without what is each rank's own: symbolic sizes are."""
    sizes = [["~" if isinstance(size, str) else size for size in output] for output in node.sizes]
    return f"{node.op} {sizes} {','.join(node.dtypes)}"


def _find_awaited(
    nodes: Iterable[Node], named: Mapping[str, Launch]
) -> dict[str, tuple[Launch, ...]]:
    """The launches that each wait waits for, followed through the buffers that unpack them."""
    flying: dict[str, tuple[Launch, ...]] = {}
    awaited: dict[str, tuple[Launch, ...]] = {}
    for node in nodes:
        launches = tuple(
            dict.fromkeys(
                launch for b in (*node.reads, *node.mutates) for launch in flying.get(b, ())
            )
        )
        if node.kind is NodeKind.WAIT:
            awaited[node.name], launches = launches, ()
        elif node.kind is NodeKind.COLLECTIVE:
            launches = (named[node.name],)
        for buffer in (*node.writes, *node.mutates):
            flying[buffer] = launches
    return awaited


def _fits(programs: Mapping[int, _Issued]) -> bool:
    """Whether the ranks' programs fit each other before anything is moved."""
    return not any(_divergent(programs)) and not any(_stuck(programs))


def _stuck(finals: Mapping[int, _Issued]) -> Iterator[str]:
    for blocking in ("opaque", "waits", "all"):
        stuck = find_deadlock({rank: final.steps(blocking) for rank, final in finals.items()})
        if stuck:
            yield f"deadlock ({blocking} block): {stuck}"


def _divergent(finals: Mapping[int, _Issued]) -> Iterator[str]:
    """Pairs of ranks that issue what they share in different orders, on one group or across."""
    for one, other in combinations(finals.values(), 2):
        ours, theirs = one.shared_with(other.rank), other.shared_with(one.rank)
        for place, (our, their) in enumerate(zip_longest(ours, theirs)):
            if our != their:
                yield (
                    f"divergent: ranks {one.rank} and {other.rank} issue {our} and {their} as "
                    f"number {place} of what they share"
                )
                break


def find_deadlock(steps: Mapping[int, Sequence[Step]]) -> str:
    """Let all ranks run; who is stuck at what in the end, or nothing.

    A collective completes when it is the next one of its group on every rank of the group. A
    rank goes on after it has issued one, and at `block` when that one has completed.

    Args:
        steps: what each rank does, in order.
    """
    place = dict.fromkeys(steps, 0)
    queues: dict[tuple[int, Group], list[Launch]] = {}
    done: set[Launch] = set()
    while True:
        touched: set[Group] = set()
        for rank, mine in steps.items():
            while place[rank] < len(mine):
                kind, launch = mine[place[rank]]
                if kind == "issue":
                    queues.setdefault((rank, launch[0]), []).append(launch)
                    touched.add(launch[0])
                elif launch not in done:
                    break
                place[rank] += 1
        if not touched:
            break
        for group in touched:
            members = [queues.setdefault((rank, group), []) for rank in group[1]]
            while all(members) and len({queue[0] for queue in members}) == 1:
                done.add(members[0][0])
                for queue in members:
                    queue.pop(0)
    stuck = [
        f"rank {rank} at {mine[place[rank]][1]}"
        for rank, mine in steps.items()
        if place[rank] < len(mine)
    ]
    stuck += [f"rank {r} issued {queue[0]} alone" for (r, _), queue in queues.items() if queue]
    return "; ".join(stuck)
