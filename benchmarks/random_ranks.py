"""Random sets of ranks through the whole pipeline; no divergence, no illegal order, no deadlock.

    python benchmarks/random_ranks.py --sets 100000 --seed 0 --jobs 2
    python benchmarks/random_ranks.py --seed 0 --only 4711

A set is determined by the seed and its number (`random_sets.py`); the checks use nothing that the
pass derives (`rank_checks.py`). Exit status: 0 if no set failed, else 1, with the numbers of the
sets that did.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from attrs import frozen
from random_sets import make_set, run_set
from rank_checks import check
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Tally", "check_range", "main"]

_CHUNK = 250


@frozen(kw_only=True)
class Tally:
    """What came of a range of sets."""

    sets: int
    modes: Counter[str]
    """Scopes by mode."""
    ranks: int
    hoisted: int
    """Gathers launched earlier."""
    misfits: int
    """Scopes whose programs did not fit each other before anything was moved."""
    restored: int
    """Those of them that fit in the end."""
    faults: tuple[tuple[int, str], ...]
    """Numbers of sets, and what is wrong with them."""


def check_range(seed: int, first: int, end: int) -> Tally:
    """Make, run and check the sets of some numbers."""
    modes: Counter[str] = Counter()
    ranks = hoisted = misfits = restored = 0
    faults: list[tuple[int, str]] = []
    for number in range(first, end):
        try:
            outcomes = run_set(make_set(seed, number))
            checked = check(outcomes)
        except Exception as error:
            faults.append((number, f"crash: {type(error).__name__}: {error}"))
            continue
        faults += [(number, fault) for fault in checked.faults]
        misfits += checked.misfits
        restored += checked.restored
        modes.update(str(o.mode) for o in outcomes if o.rank == o.scope[0])
        ranks += len(outcomes)
        hoisted += sum(outcome.hoisted for outcome in outcomes)
    return Tally(
        sets=end - first,
        modes=modes,
        ranks=ranks,
        hoisted=hoisted,
        misfits=misfits,
        restored=restored,
        faults=tuple(faults),
    )


def _add(one: Tally, other: Tally) -> Tally:
    return Tally(
        sets=one.sets + other.sets,
        modes=one.modes + other.modes,
        ranks=one.ranks + other.ranks,
        hoisted=one.hoisted + other.hoisted,
        misfits=one.misfits + other.misfits,
        restored=one.restored + other.restored,
        faults=(*one.faults, *other.faults),
    )


def _tallies(seed: int, sets: int, jobs: int) -> Iterator[Tally]:
    firsts = range(0, sets, _CHUNK)
    ends = [min(first + _CHUNK, sets) for first in firsts]
    seeds = [seed] * len(ends)
    if jobs == 1:
        yield from map(check_range, seeds, firsts, ends)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(check_range, seeds, firsts, ends)
        finally:  # a limit of time, or the keyboard, ends it early
            pool.shutdown(cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="begin nothing new after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one set of the seed")
    options = parser.parse_args()
    console = Console(stderr=True)
    started = time.monotonic()
    total = Tally(sets=0, modes=Counter(), ranks=0, hoisted=0, misfits=0, restored=0, faults=())
    if options.only is not None:
        total = check_range(options.seed, options.only, options.only + 1)
    else:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("sets", total=options.sets)
            for tally in _tallies(options.seed, options.sets, options.jobs):
                total = _add(total, tally)
                progress.advance(task, tally.sets)
                if options.seconds and time.monotonic() - started > options.seconds:
                    break
    for number, fault in total.faults:
        print(f"seed {options.seed}, set {number}: {fault}")
    kinds = Counter(fault.split()[0].rstrip(":") for _, fault in total.faults)
    modes = ", ".join(f"{count:,} {mode}" for mode, count in sorted(total.modes.items()))
    print(
        f"seed {options.seed}: {total.sets:,} sets, {total.ranks:,} ranks, "
        f"{total.hoisted:,} gathers launched earlier; scopes: {modes} "
        f"({total.misfits:,} did not fit before, {total.restored:,} of them do now); "
        + ", ".join(f"{kinds.pop(k, 0)} {k}" for k in ("divergent", "illegal", "deadlock"))
        + "".join(f", {count} {kind}" for kind, count in sorted(kinds.items()))
        + f"; {time.monotonic() - started:.0f} s"
    )
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(main())
