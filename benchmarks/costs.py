"""Measured costs beside the profiler: is what the pass believes of each node true?

    python benchmarks/costs.py --ranks 2 --tokens 8192 --out DIR

runs the benchmark model with `step_time.py`, in program order (where nothing runs beside compute)
and with the pass, dumps the costs that the pass measured while it compiled, and compares them with
the kernel times of a profiled step. `--trace FILE --costs FILE` compares files that exist.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

STEPS = 3
WRAPPERS = ("Torch-Compiled Region", "## Call CompiledFxGraph", "ProfilerStep", "Inductor")


@attrs.frozen(kw_only=True)
class Launch:
    """The kernels of one call on the compute stream, in the order of the host."""

    name: str
    shapes: str
    ns: float


def read_launches(path: Path) -> list[Launch]:
    """Calls of one profiled step: of an op with all kernels inside it, or of one Triton kernel."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    ops = sorted(
        (e for e in events if e.get("cat") == "cpu_op" and not e["name"].startswith(WRAPPERS)),
        key=lambda e: (e["ts"], -e["dur"]),
    )
    outer: list[dict[str, Any]] = []
    end = -1.0
    for event in ops:
        if event["ts"] >= end:
            outer.append(event)
            end = event["ts"] + event["dur"]
    starts = [event["ts"] for event in outer]
    runtime = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    calls: dict[tuple[str, float], list[Any]] = {}
    for kernel in events:
        if kernel.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = runtime.get(kernel.get("args", {}).get("correlation"))
        if launch is None:
            continue
        index = bisect_right(starts, launch["ts"]) - 1
        op = outer[index] if index >= 0 else None
        if op is not None and launch["ts"] <= op["ts"] + op["dur"]:
            key, shapes = (op["name"], op["ts"]), str(op.get("args", {}).get("Input Dims", ""))
        else:
            key, shapes = (kernel["name"], launch["ts"]), ""
        entry = calls.setdefault(key, [shapes, 0.0, kernel["ts"], 0.0])
        entry[1] += kernel["dur"] * 1000
        entry[3] = max(entry[3], kernel["ts"] + kernel["dur"])
    found = []
    for (name, _), (shapes, total, first, last) in sorted(calls.items(), key=lambda c: c[0][1]):
        # Inside an op, kernels of two streams overlap: count from the first to the last.
        inside = (last - first) * 1000 if "ulysses" in name else total
        found.append(Launch(name=name, shapes=shapes, ns=inside))
    return found


def kind_of_launch(name: str) -> str:
    """A word that launches and nodes have in common."""
    if "c10d" in name or "nccl" in name.lower():
        return "communication"
    if name.startswith("triton_"):
        return "fused"
    return name.rpartition("::")[2].lstrip("_").partition(".")[0]


def kind_of_node(op: str) -> str:
    if op in ("fused", "ComputedBuffer"):
        return "fused"
    return op.split(".")[1].lstrip("_") if "." in op else op


def compare(costs: dict[str, Any], launches: list[Launch]) -> Table:
    """Predicted and profiled time for each kind of entry, longest first."""
    calls: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        calls[kind_of_launch(launch.name)].append(launch.ns)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in costs["nodes"]:
        if node["kind"] in ("compute", "opaque") and node.get("ns"):
            rows[kind_of_node(node["op"])].append(node)
    entries: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    total_predicted = total_profiled = measured = 0.0
    unmatched = []
    for kind, nodes in rows.items():
        found = calls.get(kind, [])
        if len(found) != STEPS * len(nodes):
            unmatched.append(f"{kind}: {len(nodes)} nodes, {len(found) / STEPS:g} calls a step")
            continue
        for index, node in enumerate(nodes):
            times = [found[step * len(nodes) + index] for step in range(STEPS)]
            entries[kind, node["ns"], str(node["sizes"])[:40]].append(statistics.median(times))
            total_predicted += node["ns"]
            total_profiled += statistics.median(times)
            measured += node["ns"] if node["source"] == "measured" else 0
    table = Table("entry", "nodes", "predicted us", "profiled us", "ratio", "total ms")
    for (kind, ns, sizes), times in sorted(entries.items(), key=lambda e: -sum(e[1]))[:10]:
        mean = statistics.mean(times)
        table.add_row(
            f"{kind} {sizes}",
            str(len(times)),
            f"{ns / 1e3:.1f}",
            f"{mean / 1e3:.1f}",
            f"{ns / mean:.2f}",
            f"{sum(times) / 1e6:.2f}",
        )
    table.add_row(
        "all that could be matched",
        str(sum(map(len, entries.values()))),
        f"{total_predicted / 1e3:.0f}",
        f"{total_profiled / 1e3:.0f}",
        f"{total_predicted / max(1, total_profiled):.3f}",
        f"{total_profiled / 1e6:.2f}",
    )
    gathers = [n for n in costs["nodes"] if "all_gather" in n["op"]]
    share = measured / max(1.0, total_predicted)
    table.caption = (
        f"{share:.1%} of compute time measured; "
        f"{sum(n['source'] == 'measured' for n in gathers)} of {len(gathers)} gathers measured"
        + (f"; not matched: {'; '.join(unmatched)}" if unmatched else "")
    )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="8192")
    parser.add_argument("--out", type=Path, default=Path("costs-out"))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--costs", type=Path)
    options = parser.parse_args()
    pairs = [(options.trace, options.costs)]
    if options.trace is None:
        command = [sys.executable, str(Path(__file__).with_name("step_time.py"))]
        command += ["--ranks", str(options.ranks), "--tokens", options.tokens]
        command += ["--contenders", "program,ours", "--repeats", "2", "--steps", "10"]
        command += ["--profile", "--profile-host", "--deadline", "300"]
        command += ["--out", str(options.out), "--dump", str(options.out / "dump")]
        subprocess.run(command, check=False)  # 1: an output differs, which is not the question
        pairs = [
            (
                options.out / f"trace.video.program.{tokens}.json.gz",
                options.out / "dump" / f"video.ours.{tokens}.rank0.0.costs.json",
            )
            for tokens in options.tokens.split(",")
        ]
    for trace, costs in pairs:
        data = json.loads(costs.read_text(encoding="utf-8"))
        # In program order the nodes stand as they were captured.
        data["nodes"].sort(key=lambda node: node["position"])
        table = compare(data, read_launches(trace))
        table.title = f"{costs.name} against {trace.name}"
        Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
