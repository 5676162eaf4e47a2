"""The lockstep step: what all ranks measure together, and how their numbers become one table.

Nothing in here leaves the step early. A rank that has nothing to measure, or cannot build the
arguments of an op, says so in the exchange, and all ranks skip that key together.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar
from typing import Protocol as TypingProtocol

from attrs import evolve

from overlap_core.costs import Cost, CostSource

from .negotiation import Share, share_distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .negotiation import Protocol

T = TypeVar("T")

__all__ = ["Measurer", "agree_on_costs"]


class Measurer(TypingProtocol):
    """What one rank can measure. Keys are digests of structural keys."""

    def saved(self) -> Mapping[str, Cost]:
        """Entries of a saved table, or nothing."""

    def measure_compute(self, known: Mapping[str, Cost]) -> Mapping[str, Cost]:
        """This rank's pure compute, measured alone; keys in `known` need no measurement.

        A key that could not be measured has a cost without a time that says why.
        """

    def offer(self, known: Mapping[str, Cost]) -> Sequence[str]:
        """Keys of what communicates and for which arguments can be made here."""

    def rehearse(self, key: str) -> str:
        """Call one of them without letting it communicate; what it would have issued."""

    def refused(self) -> Mapping[str, str]:
        """Keys of what communicates and was not offered, each with the reason."""

    def compute_part_ns(self, key: str) -> int | None:
        """Time of an opaque op with its communication left out, if it was seen."""

    def replay(self, key: str) -> int:
        """Nanoseconds of one collective, with a fixed number of calls; all ranks call it now."""

    def save(self, table: Mapping[str, Cost]) -> None:
        """Keep what all ranks agreed on, if a table is kept at all."""


def agree_on_costs(measurer: Measurer, index: int) -> Protocol[dict[str, Cost]]:
    """One rank's side of the lockstep step.

    Args:
        measurer: what this rank can measure.
        index: place of this rank in the scope.

    Returns:
        Costs by key digest. Keys that every rank has carry the maximum over ranks; pure compute
        of some ranks only keeps each rank's own time; what communicates on some ranks only, or
        cannot be replayed on one of them, has no time and says why.
    """
    saved = dict(measurer.saved())
    words = {key: [cost.ns, cost.network_ns] for key, cost in saved.items()}
    tables = yield from share_distinct("costs/saved", _pack(words), index)
    if len(set(tables)) > 1:
        saved = {}
    own = dict(measurer.measure_compute(saved))
    offered = sorted(measurer.offer(saved))
    offers = [
        json.loads(o) for o in (yield from share_distinct("costs/offer", _pack(offered), index))
    ]
    everywhere = set(offered).intersection(*offers)
    # Rehearsed by all ranks in one order, so that even an op whose communication cannot be held
    # back (it does not go through torch.distributed) finds its peers.
    rehearsed = {key: _try(measurer.rehearse, key) for key in offered if key in everywhere}
    rehearsals = [
        json.loads(r)
        for r in (yield from share_distinct("costs/rehearsal", _pack(rehearsed), index))
    ]
    common = [
        key
        for key, (ok, signature) in rehearsed.items()
        if all(other[key] == [True, signature] for other in rehearsals) and ok
    ]
    times: dict[str, int | str] = {}
    for key in common:
        # A barrier, so that the timed calls start together.
        yield Share(f"costs/{key[:16]}", b"ready")
        times[key] = _try(measurer.replay, key)[1]
    said = {
        "times": times,
        "inside": {key: measurer.compute_part_ns(key) for key in common},
        "own": {k: cost.ns for k, cost in own.items() if cost.source is CostSource.MEASURED},
    }
    answers = [
        json.loads(a) for a in (yield from share_distinct("costs/times", _pack(said), index))
    ]
    agreed: dict[str, Cost] = {}
    for key in common:
        agreed[key] = _together(
            [a["times"][key] for a in answers], [a["inside"][key] for a in answers]
        )
    for key in sorted(set(answers[0]["own"]).intersection(*(a["own"] for a in answers[1:]))):
        agreed[key] = evolve(own[key], ns=max(answer["own"][key] for answer in answers))
    refused = {key: Cost(why=why) for key, why in measurer.refused().items()}
    missing = {
        key: Cost(why=_why_not_common(key, offers, rehearsals))
        for key in offered
        if key not in agreed
    }
    result = {**refused, **missing, **own, **saved, **agreed}
    measurer.save({k: cost for k, cost in {**saved, **agreed}.items() if cost.ns is not None})
    return result


def _together(times: Sequence[int | str], inside: Sequence[int | None]) -> Cost:
    """One collective-bearing key from what all ranks measured."""
    failures = [time for time in times if isinstance(time, str)]
    if failures:
        return Cost(why=f"the replay failed on a rank: {failures[0]}")
    longest = max(time for time in times if isinstance(time, int))
    parts = [part for part in inside if part is not None]
    network = max(0, longest - max(parts)) if parts else None
    return Cost(ns=longest, network_ns=network, source=CostSource.MEASURED)


def _why_not_common(
    key: str,
    offers: Sequence[Sequence[str]],
    rehearsals: Sequence[Mapping[str, tuple[bool, str]]],
) -> str:
    absent = sum(key not in offer for offer in offers)
    if absent:
        return f"{absent} of {len(offers)} ranks do not have it or cannot replay it"
    failures = [r[key][1] for r in rehearsals if not r[key][0]]
    if failures:
        return f"the replay failed on a rank: {failures[0]}"
    return "the ranks would issue different collectives for it"


def _try(call: Callable[[str], T], key: str) -> tuple[bool, T | str]:
    """Whether a call went well, and its result or what went wrong."""
    try:
        return True, call(key)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _pack(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
