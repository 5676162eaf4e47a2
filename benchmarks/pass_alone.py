"""The pass alone, costs given: time, memory and growth from 1,000 to 20,000 nodes.

    python benchmarks/pass_alone.py

Two ranks in memory, each with its own graph, so what is shown is the time of one rank: votes,
skeleton, fingerprint, placement, reconciling, rebuilding, verifying, predicting.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import tracemalloc

from attrs import evolve
from rich.console import Console
from rich.table import Table

from overlap_core import Node, NodeKind, OverlapConfig, OverlapGraph
from overlap_core.host import PluginHost
from overlap_core.pipeline import negotiate, prepare
from overlap_core.ranks import run_loopback

GATHER = "_c10d_functional.all_gather_into_tensor.default"


def make_graph(n_nodes: int, n_gathers: int, dynamic: bool = True) -> OverlapGraph:
    """A transformer-like graph: blocks of gathers, waits, matmuls, and an opaque attention."""
    nodes: list[Node] = []
    inputs = ["x"]
    last = "x"
    rows: int | str = "s0 + s1" if dynamic else 4096
    plain = max(1, (n_nodes - 2 * n_gathers) // n_gathers)
    for gather in range(n_gathers):
        weight = f"w{gather}"
        inputs.append(weight)
        nodes.append(
            Node(
                name=f"ag{gather}",
                kind=NodeKind.COLLECTIVE,
                op=GATHER,
                reads=(weight,),
                writes=(f"g{gather}",),
                sizes=((3072, 3072),),
                dtypes=("bfloat16",),
                group="0",
                group_ranks=(0, 1),
                nbytes=3072 * 3072 * 2,
                cost_ns=90_000,
            )
        )
        nodes.append(
            Node(
                name=f"wait{gather}",
                kind=NodeKind.WAIT,
                op="_c10d_functional.wait_tensor.default",
                reads=(f"g{gather}", weight),
                writes=(f"r{gather}",),
            )
        )
        for step in range(plain):
            attention = gather % 10 == 9 and step == plain - 1
            out = f"c{gather}_{step}"
            nodes.append(
                Node(
                    name=f"op{gather}_{step}",
                    kind=NodeKind.OPAQUE if attention else NodeKind.COMPUTE,
                    op="mylib::attention" if attention else "aten.mm.out",
                    reads=(last, f"r{gather}") if step == 0 else (last,),
                    writes=(out,),
                    sizes=((rows, 3072),),
                    dtypes=("bfloat16",),
                    group="1" if attention else None,
                    group_ranks=(0, 1) if attention else None,
                    issues_collective=attention,
                    cost_ns=400_000 if attention else 60_000,
                    network_ns=100_000 if attention else None,
                )
            )
            last = out
    return OverlapGraph(
        rank=0,
        world_size=2,
        nodes=tuple(nodes),
        inputs=tuple(inputs),
        outputs=(last,),
        symbols={"s0": 2048, "s1": 2048},
        input_bytes=4096 * 3072 * 2 + n_gathers * 3072 * 3072,
    )


def run_once(graph: OverlapGraph, config: OverlapConfig, host: PluginHost) -> float:
    """Seconds of one whole pass over a graph that nothing has been computed of yet."""
    fresh = evolve(graph)  # without what is derived once and kept
    gc.collect()
    start = time.perf_counter()
    outcome = run_loopback(negotiate(prepare(fresh, config, host), (0, 1)), 0, 2)
    seconds = time.perf_counter() - start
    assert outcome.committed, outcome.why
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    config = OverlapConfig()
    host = PluginHost.discover(config)
    table = Table("nodes", "gathers", "median ms", "worst ms", "peak MB", "us / (n log2 n)")
    for n_nodes, n_gathers in (
        (432, 108),
        (1_000, 100),
        (2_000, 200),
        (5_000, 500),
        (10_000, 1_000),
        (20_000, 2_000),
    ):
        graph = make_graph(n_nodes, n_gathers)
        run_once(graph, config, host)
        seconds = [run_once(graph, config, host) for _ in range(options.repeats)]
        tracemalloc.start()
        run_once(graph, config, host)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        median = statistics.median(seconds)
        count = len(graph.nodes)
        table.add_row(
            f"{count:,}",
            f"{n_gathers:,}",
            f"{median * 1e3:.1f}",
            f"{max(seconds) * 1e3:.1f}",
            f"{peak / 1e6:.1f}",
            f"{median * 1e6 / (count * math.log2(count)):.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
