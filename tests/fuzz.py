"""Run the Hypothesis tests with seed after seed, and say how to repeat what they find.

    python tests/fuzz.py --minutes 10                 from a seed that nobody chose
    python tests/fuzz.py --seed 7 --seeds 50          seeds 7 to 56
    python tests/fuzz.py --seed 7 tests/x.py::test_y  one seed and one test: repeats a finding

What isn't known here goes to pytest. Each seed is a run of pytest of its own, as many at once as
there are cores. Exit status: 0 nothing found, 1 something found, 2 a run of pytest that failed by
itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 1_800
"""Of one test: longer than pytest's own setting, since a failing one is made small first."""
SECONDS_SHOWN = 8
"""Tests that are named with what they cost."""


def main() -> int:
    options, rest = parse()
    if options.record:
        return run_tests(options.seed, options.record, rest)
    chosen = options.seed is not None
    first = options.seed if chosen else random.SystemRandom().randrange(10**8)
    minutes = options.minutes
    if minutes is None and options.seeds is None:
        # A seed by itself repeats something; without one there is no end to what can be tried.
        options.seeds, minutes = (1, None) if chosen else (None, 10.0)
    last = None if options.seeds is None else first + options.seeds
    seeds = iter(range(first, last)) if last is not None else itertools.count(first)
    end = None if minutes is None else time.monotonic() + minutes * 60
    print(f"seeds from {first} on, {options.jobs} at once", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), rest, seeds, end)
        with ThreadPoolExecutor(options.jobs) as pool:
            workers = [pool.submit(runs.work) for _ in range(options.jobs)]
            try:
                for worker in workers:
                    worker.result()
            except KeyboardInterrupt:  # which the runs of pytest got as well
                runs.stopped = True
    return runs.summarize()


def parse() -> tuple[argparse.Namespace, list[str]]:
    doc = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=doc[0],
        epilog=doc[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--seed", type=int, help="the first seed; a random one if not given")
    parser.add_argument("--seeds", type=int, help="how many, unless the minutes are over before")
    parser.add_argument("--minutes", type=float, help="no seed begins later; 10 if nothing is said")
    parser.add_argument("--jobs", type=int, default=cores, help="seeds at once (default: cores)")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args()


def run_tests(seed: int, record: Path, rest: list[str]) -> int:
    """One seed, in a process of its own; what happened goes to the file `record`."""
    sys.path[0] = str(Path.cwd())  # as `python -m pytest` has it
    given = ["-m", "hypothesis and not ranks", "--hypothesis-profile=fuzz"]
    given += [f"--hypothesis-seed={seed}", f"--timeout={TIMEOUT_S}", "-p", "no:cacheprovider"]
    return int(pytest.main([*given, *rest], plugins=[Recorder(record)]))


class Recorder:
    """Writes a line of JSON for each test that ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[Any]:
        report: pytest.TestReport = yield
        if report.when == "call" or report.failed:
            found = {"test": item.nodeid, "failed": report.failed, "seconds": report.duration}
            if report.failed and call.excinfo is not None:
                found |= describe(call.excinfo)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        return report


def describe(info: pytest.ExceptionInfo[BaseException]) -> dict[str, str]:
    """Where it failed, and what Hypothesis says of the example: it adds that to the errors."""
    errors: list[BaseException] = [info.value]
    while any(isinstance(error, BaseExceptionGroup) for error in errors):
        errors = [
            inner
            for error in errors
            for inner in (error.exceptions if isinstance(error, BaseExceptionGroup) else [error])
        ]
    text = "".join(line for error in errors for line in traceback.format_exception_only(error))
    last = info.traceback[-1]
    return {"text": text.rstrip(), "where": f"{last.path}:{last.lineno + 1}"}


class Runs:
    """The seeds that are tried, and what came of them."""

    def __init__(
        self, folder: Path, rest: list[str], seeds: Iterator[int], end: float | None
    ) -> None:
        self.folder, self.rest, self.seeds, self.end = folder, rest, seeds, end
        self.lock = threading.Lock()
        self.findings: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        """By test and place, the seeds and what they said."""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.broken = 0
        self.tried = 0
        self.stopped = False

    def work(self) -> None:
        """Take seeds until there are no more, or the time is over; at least one in all."""
        while True:
            with self.lock:
                late = self.end is not None and self.tried and time.monotonic() >= self.end
                seed = None if late or self.stopped else next(self.seeds, None)
                if seed is None:
                    return
                self.tried += 1
            self.run(seed)

    def run(self, seed: int) -> None:
        record, output = self.folder / f"{seed}.jsonl", self.folder / f"{seed}.txt"
        command = [sys.executable, __file__, "--record", str(record), "--seed", str(seed)]
        # One core each; and the order of sets is part of what a seed decides.
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": str(seed % 2**32)}
        began = time.monotonic()
        with output.open("wb") as file:
            rc = subprocess.run(
                [*command, *self.rest], stdout=file, stderr=subprocess.STDOUT, env=env, check=False
            ).returncode
        took = time.monotonic() - began
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        record.unlink(missing_ok=True)
        with self.lock:
            self.add(seed, rc, took, [json.loads(line) for line in lines], output)

    def add(self, seed: int, rc: int, took: float, tests: list[Any], output: Path) -> None:
        failed = [test for test in tests if test["failed"]]
        for test in tests:
            self.seconds[test["test"]].append(test["seconds"])
        for test in failed:
            self.findings[test["test"], test["where"]].append((seed, test["text"]))
        names = "".join(f"\n  {test['test']}" for test in failed)
        count = f"{len(failed)} failed, " if failed else ""
        line = f"seed {seed}: {count}{len(tests) - len(failed)} passed in {took:.0f} s{names}"
        if rc != (1 if failed else 0) and not self.stopped:
            self.broken += 1
            text = output.read_text(encoding="utf-8", errors="replace")
            line += f"\npytest ended with {rc}:\n{text[-5_000:]}"
        print(line, flush=True)
        output.unlink()

    def summarize(self) -> int:
        means = {test: sum(took) / len(took) for test, took in self.seconds.items()}
        print(f"\n{self.tried} seeds, {len(means)} tests; the most expensive, in seconds a seed:")
        for test in sorted(means, key=means.__getitem__, reverse=True)[:SECONDS_SHOWN]:
            print(f"  {means[test]:6.1f} {test}")
        for (test, where), found in self.findings.items():
            seed, text = found[0]
            print(f"\n{'=' * 80}\n{test}\nat {where}, seed {seed}\n\n{text}\n")
            if Path("Makefile").is_file():
                print(f'repeat: make fuzz SEED={seed} ARGS="{shlex.quote(test)}"')
            me = os.path.relpath(__file__)
            print(f"repeat: {shlex.join(['python', me, '--seed', str(seed), test])}")
            if len(found) > 1:
                print(f"also found with the seeds {', '.join(str(one) for one, _ in found[1:])}")
        if not self.findings and not self.broken:
            print("nothing found")
        return 1 if self.findings else 2 if self.broken else 0


if __name__ == "__main__":
    sys.exit(main())
