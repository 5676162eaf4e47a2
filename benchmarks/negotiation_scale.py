"""What a negotiation costs one rank, from 8 to 4,096 ranks: bytes, rounds, keys, time.

    python benchmarks/negotiation_scale.py
    python benchmarks/negotiation_scale.py --ranks 64,4096 --profile 4096

The real protocol (`pipeline.negotiate`) runs in memory for the first ranks and the last one, on
graphs that are prepared once and lent to all that share them; what the other ranks say is made of
what these say. Sent and read are counted as the store driver does it: while all ranks agree at a
step, a rank reads two counters; where they don't, it reads every rank's key.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import hashlib
import logging
import pstats
import time
from typing import TYPE_CHECKING

from attrs import define, evolve, frozen
from rich.console import Console
from rich.table import Table

from overlap_core import Node, NodeKind, OverlapConfig, OverlapGraph
from overlap_core.pipeline import negotiate, prepare
from overlap_core.ranks import Decide, Share
from overlap_core.testing import host_with

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlap_core.outcome import RankOutcome
    from overlap_core.pipeline import RankView
    from overlap_core.ranks.negotiation import Protocol

GATHERS, OTHERS = 2_000, 3_000
"""Weight gathers, and further entries of the skeleton."""
DRIVEN = 4
"""Most distinct graphs whose ranks run the protocol; others vary what these say."""
_GATHER = "_c10d_functional.all_gather_into_tensor.default"
_WAIT = "_c10d_functional.wait_tensor.default"
TOO_LONG_S = 4.0
"""CPU time of one rank after which a case is not run with more ranks."""


def make_graph(ranks: int, more_communication: int = 0) -> OverlapGraph:
    """Layers of a gather, its wait, a matmul, and one or two opaque ops that communicate.

    Args:
        ranks: how many there are in each group.
        more_communication: opaque ops that only this graph has.
    """
    everybody = tuple(range(ranks))
    nodes: list[Node] = []
    last = "x"
    for layer in range(GATHERS):
        count = (layer + 1) * OTHERS // GATHERS - layer * OTHERS // GATHERS
        if layer < more_communication:
            count += 1
        nodes += _gather(layer, everybody)
        nodes.append(_compute(f"mm{layer}", last, f"ready{layer}"))
        last = f"mm{layer}"
        for number in range(count):
            name = f"attention{layer}_{number}"
            nodes.append(_attention(name, last, everybody))
            last = name
    return OverlapGraph(
        world_size=ranks,
        nodes=tuple(nodes),
        inputs=("x", *(f"w{layer}" for layer in range(GATHERS))),
        outputs=(last,),
    )


def _gather(layer: int, everybody: tuple[int, ...]) -> tuple[Node, Node]:
    launch = Node(
        name=f"gather{layer}",
        kind=NodeKind.COLLECTIVE,
        op=_GATHER,
        reads=(f"w{layer}",),
        writes=(f"flying{layer}",),
        sizes=((3072, 3072),),
        dtypes=("bfloat16",),
        group="0",
        group_ranks=everybody,
        nbytes=3072 * 3072 * 2,
        cost_ns=90_000,
    )
    wait = Node(
        name=f"wait{layer}",
        kind=NodeKind.WAIT,
        op=_WAIT,
        reads=(f"flying{layer}",),
        writes=(f"ready{layer}",),
    )
    return launch, wait


def _compute(name: str, *reads: str) -> Node:
    return Node(
        name=name,
        kind=NodeKind.COMPUTE,
        op="aten.mm.out",
        reads=reads,
        writes=(name,),
        sizes=((4096, 3072),),
        dtypes=("bfloat16",),
        cost_ns=60_000,
    )


def _attention(name: str, before: str, everybody: tuple[int, ...]) -> Node:
    return Node(
        name=name,
        kind=NodeKind.OPAQUE,
        op="mylib::attention",
        reads=(before,),
        writes=(name,),
        sizes=((4096, 3072),),
        dtypes=("bfloat16",),
        group="1",
        group_ranks=everybody,
        issues_collective=True,
        cost_ns=150_000,
        network_ns=40_000,
    )


@frozen(kw_only=True)
class Case:
    """How the graphs of the ranks differ; rank r has graph number r % distinct."""

    name: str
    distinct: int
    more_communication: bool = False


CASES = (
    Case(name="one graph", distinct=1),
    Case(name="compute differs", distinct=2),
    Case(name="compute differs", distinct=64),
    Case(name="communication differs", distinct=2, more_communication=True),
)


def make_views(case: Case, ranks: int) -> list[RankView]:
    """One view for each distinct graph that is driven, of rank 0.

    Compute that differs stands for itself in two things only, which are all that peers get to
    know of it: another fingerprint, and other costs, which lead to other proposals.
    """
    config = OverlapConfig()
    host = host_with(config=config)
    view = prepare(make_graph(ranks), config, host)
    if case.more_communication:
        return [view, prepare(make_graph(ranks, more_communication=1), config, host)]
    views = [view]
    for number in range(1, min(case.distinct, ranks, DRIVEN)):
        costs = tuple(
            cost if cost.ns is None else evolve(cost, ns=cost.ns * (8 + number) // 8)
            for cost in view.costs
        )
        vote = evolve(view.vote, fingerprint=_renamed(view.vote.fingerprint, number))
        views.append(evolve(view, costs=costs, vote=vote))
    return views


def _renamed(digest: str, number: int) -> str:
    return hashlib.sha256(f"{digest}/{number}".encode()).hexdigest()


def _lend(view: RankView, rank: int) -> RankView:
    """The view on another rank, with all that was computed of its graph so far."""
    graph = copy.copy(view.graph)
    object.__setattr__(graph, "rank", rank)
    return evolve(view, graph=graph, vote=evolve(view.vote, rank=rank))


@define(kw_only=True)
class Spent:
    """What one rank spent in one negotiation."""

    work_s: float = 0.0
    """CPU time within the protocol."""
    sent_bytes: int = 0
    received_bytes: int = 0
    keys_read: int = 0
    rounds: int = 0
    details: int = 0
    """Steps at which it sent more than a digest."""


class Driver:
    """Runs the protocol of some ranks of a world, and counts."""

    def __init__(self, case: Case, ranks: int) -> None:
        self._scope = tuple(range(ranks))
        self._distinct = min(case.distinct, ranks)
        self._views = make_views(case, ranks)
        self._protocols: dict[int, Protocol[RankOutcome]] = {}
        for rank in dict.fromkeys((*range(len(self._views)), ranks - 1)):
            view = _lend(self._views[self._number(rank)], rank)
            self._protocols[rank] = negotiate(view, self._scope)
        self._digests: dict[int, bytes] = {}
        self.spent = {rank: Spent() for rank in self._protocols}

    def _number(self, rank: int) -> int:
        """Of the driven graph that a rank has, or whose words it varies."""
        return rank % self._distinct % len(self._views)

    def run(self) -> dict[int, RankOutcome]:
        """The outcomes of the ranks that were driven."""
        answer: tuple[bytes, ...] | None = None
        while True:
            requests: dict[int, Share | Decide] = {}
            outcomes: dict[int, RankOutcome] = {}
            for rank, protocol in self._protocols.items():
                started = time.process_time()
                try:
                    requests[rank] = next(protocol) if answer is None else protocol.send(answer)
                except StopIteration as stop:
                    outcomes[rank] = stop.value
                self.spent[rank].work_s += time.process_time() - started
            if outcomes:
                assert not requests, "ranks end at different steps"
                return outcomes
            (step,) = {(type(request).__name__, request.step) for request in requests.values()}
            answer = self._answer(step[1], requests)

    def _answer(self, step: str, requests: Mapping[int, Share | Decide]) -> tuple[bytes, ...]:
        said = {rank: request.payload for rank, request in requests.items()}
        decides = isinstance(requests[0], Decide)
        payloads = (said[0],) if decides else tuple(self._all_payloads(step, said))
        agree = decides or (step.endswith("/digest") and len(set(payloads)) == 1)
        for rank, spent in self.spent.items():
            spent.rounds += 1
            spent.sent_bytes += len(said[rank])
            spent.details += step.endswith("/detail") and bool(said[rank])
            spent.keys_read += 1 if decides else 2 if agree else len(payloads)
            spent.received_bytes += 0 if agree else sum(map(len, payloads))
        return payloads

    def _all_payloads(self, step: str, said: Mapping[int, bytes]) -> Iterator[bytes]:
        """What every rank of the world says."""
        if step.endswith("/digest"):
            self._digests = dict(said)
        differ = len(set(said.values())) > 1
        for rank in self._scope:
            if rank in said:
                yield said[rank]
                continue
            own, number = rank % self._distinct, self._number(rank)
            words = said[number]
            if step.endswith("/detail"):
                # Of ranks with one digest only the first speaks.
                digest = self._digests[number]
                full = max((said[r] for r, d in self._digests.items() if d == digest), key=len)
                yield full if rank == own and own != number else b""
            elif own != number and differ:
                yield _renamed(words.decode(), own).encode()
            else:
                yield words


def add_rows(table: Table, ranks: Sequence[int], profile: int | None) -> None:
    """Run all cases at all sizes, none larger once one has taken too long."""
    for case in CASES:
        for size in ranks:
            driver = Driver(case, size)
            profiler = cProfile.Profile()
            if profile == size:
                profiler.enable()
            outcomes = driver.run()
            if profile == size:
                profiler.disable()
                pstats.Stats(profiler).sort_stats("cumulative").print_stats(25)
            first, last = driver.spent[0], driver.spent[size - 1]
            most = max(driver.spent.values(), key=lambda spent: spent.work_s)
            table.add_row(
                case.name,
                f"{min(case.distinct, size)}",
                f"{size:,}",
                str(outcomes[0].mode),
                f"{first.rounds}",
                f"{first.sent_bytes:,}",
                f"{last.sent_bytes:,}",
                f"{first.details}",
                f"{first.keys_read:,}",
                f"{first.received_bytes:,}",
                f"{first.work_s * 1e3:,.0f}",
                f"{most.work_s * 1e3:,.0f}",
            )
            if most.work_s > TOO_LONG_S:
                break


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="8,64,512,4096", help="world sizes")
    parser.add_argument("--profile", type=int, metavar="RANKS", help="profile this world size")
    options = parser.parse_args()
    # Ranks that communicate differently are told that they will hang, which these never do.
    logging.disable(logging.ERROR)
    table = Table(
        "graphs",
        "distinct",
        "ranks",
        "mode",
        "rounds",
        "sent by first",
        "sent by last",
        "details sent",
        "keys read",
        "bytes read",
        "work ms",
        "slowest ms",
        title=f"{GATHERS:,} weight gathers, {GATHERS + OTHERS:,} skeleton entries; of one rank",
    )
    add_rows(table, [int(size) for size in options.ranks.split(",")], options.profile)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
