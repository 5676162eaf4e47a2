"""The lockstep step: what all ranks measure together, and how their numbers become one table.

Nothing in here leaves the step early. A rank that has nothing to measure, or cannot build the
arguments of an op, says so in the exchange, and all ranks skip that key together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar
from typing import Protocol as TypingProtocol

from attrs import evolve, frozen

from overlap_core.costs import Cost, CostSource, Machine

from .negotiation import meet, share_distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .negotiation import Protocol

T = TypeVar("T")

__all__ = ["Measurer", "ProbeOffer", "Rehearsal", "agree_on_costs", "agree_on_machine"]

logger = logging.getLogger(__name__)

_PROBES = {"collective": 3, "contention": 2, "kernel": 1, "opaque": 1}
"""How many numbers a probe gives, by the first part of its name."""
_KERNELS_OF_AN_OPAQUE_OP = 10
"""Assumed where no opaque op's host time is known."""
_MOST_SLOWDOWN = 4.0
_PEER_FAILED = "a peer could not make its arguments"


@frozen(kw_only=True)
class ProbeOffer:
    """A probe of the machine that one rank can run."""

    ranks: tuple[int, ...] = ()
    """The group that it communicates on; empty: none."""
    values: tuple[float, ...] = ()
    """What ranks agreed on earlier in this process; empty: it has to run."""


@frozen(kw_only=True)
class Rehearsal:
    """What one rank would issue for a key."""

    calls: tuple[str, ...] = ()
    """Equal on all ranks, or they don't replay it."""
    exchanges: Sequence[Sequence[Any]] = ()
    """Uneven all-to-alls: the ranks of the group, this one's place among them, the rows received
    from and sent to each of them."""

    def encode(self) -> list[Any]:
        """As plain data."""
        return [" ".join(self.calls), [*self.exchanges]]


class Measurer(TypingProtocol):
    """What one rank can measure. Keys are digests of structural keys."""

    def saved(self) -> Mapping[str, Cost]:
        """Entries of a saved table, or nothing."""

    def measure_compute(self, known: Mapping[str, Cost]) -> Mapping[str, Cost]:
        """This rank's pure compute, measured alone; keys in `known` need no measurement.

        A key that could not be measured has a cost without a time that says why.
        """

    def offer(self, known: Mapping[str, Cost]) -> Mapping[str, tuple[int, ...]]:
        """Keys of what communicates and for which arguments can be made here.

        Each with the ranks of the group that the replay communicates on; empty: unknown.
        """

    def rehearse(self, key: str) -> Rehearsal:
        """Call one of them without letting it communicate; what it would have issued.

        With a fixed number of calls: what does not go through torch.distributed can't be held back.
        """

    def refused(self) -> Mapping[str, str]:
        """Keys of what communicates and was not offered, each with the reason."""

    def compute_part_ns(self, key: str) -> int | None:
        """Time of an opaque op with its communication left out, if it was seen."""

    def workspace_bytes(self, key: str) -> int:
        """Bytes that an opaque op allocates beside its outputs while it runs; 0: none, unknown."""

    def prepare(self, key: str) -> None:
        """Make all that `replay` needs, so that it fails for no reason of this rank alone."""

    def replay(self, key: str) -> int:
        """Nanoseconds of one collective, with a fixed number of calls; all ranks call it now."""

    def save(self, table: Mapping[str, Cost]) -> None:
        """Keep what all ranks agreed on, if a table is kept at all."""

    def offer_probes(self) -> Mapping[str, ProbeOffer]:
        """Probes of the machine that can run here, by name; nothing where compute is the host's.

        What the parts of a name after the first tell (a group by its place in the graph, bytes)
        is equal on all ranks that run the probe together.
        """

    def probe(self, name: str) -> Sequence[float]:
        """Run one of them, with a fixed number of calls; all ranks run it now.

        Returns, by the first part of the name:
            `collective`: host nanoseconds to issue a collective, a wait, and each further tensor
            of a coalesced collective. `contention`: how many times longer a gather takes beside
            compute, and compute beside a gather. `kernel`, `opaque`: host nanoseconds to issue
            one.
        """

    def keep_probes(self, values: Mapping[str, Sequence[float]]) -> None:
        """Remember what all ranks agreed on, by the probe's name."""


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
    groups = measurer.offer(saved)
    offered = sorted(groups)
    on = {key: _pack_group(groups[key]) for key in offered}
    offers = [json.loads(o) for o in (yield from share_distinct("costs/offer", _pack(on), index))]
    everywhere = set(offered).intersection(*offers)
    everywhere = {key for key in everywhere if _is_split([offer[key] for offer in offers])}
    # Rehearsed by all ranks in one order, so that even an op whose communication cannot be held
    # back (it does not go through torch.distributed) finds its peers.
    rehearsed: dict[str, tuple[bool, Any]] = {}
    if everywhere and (yield from meet("costs/rehearse")):
        rehearsed = {key: _try(_plain_rehearsal, measurer, key) for key in sorted(everywhere)}
    rehearsals = [
        json.loads(r)
        for r in (yield from share_distinct("costs/rehearsal", _pack(rehearsed), index))
    ]
    common = [key for key in rehearsed if _fits([other[key] for other in rehearsals])]
    times: dict[str, int | str] = {}
    for key in common:
        able, trouble = _try(measurer.prepare, key)
        # They start together, or not at all.
        together = yield from meet(f"costs/{key[:16]}", ready=able)
        if together:
            times[key] = _try(measurer.replay, key)[1]
        else:
            times[key] = _PEER_FAILED if able else str(trouble)
    measured = {
        "times": times,
        "inside": {key: measurer.compute_part_ns(key) for key in common},
        "own": {k: cost.ns for k, cost in own.items() if cost.source is CostSource.MEASURED},
    }
    answers = [
        json.loads(a) for a in (yield from share_distinct("costs/times", _pack(measured), index))
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


def agree_on_machine(measurer: Measurer, index: int) -> Protocol[Machine]:
    """One rank's side of probing the machine; all ranks come here, or none.

    Args:
        measurer: what this rank can probe.
        index: place of this rank in the scope.

    Returns:
        The same on all ranks: maxima over the ranks of what every rank offered and nobody failed
        at; where nothing is left, the default, in which the host is never late.
    """
    ok, offered = _try(_plain_offers, measurer)
    said = {"probes": offered, "why": ""} if ok else {"probes": {}, "why": offered}
    answers = [
        json.loads(a) for a in (yield from share_distinct("machine/offer", _pack(said), index))
    ]
    for why in sorted({answer["why"] for answer in answers} - {""}):
        logger.info("the machine is not probed, since a rank cannot: %s", why)
    offers = [answer["probes"] for answer in answers]
    common = _common_probes(offers)
    values = {name: [o[name][1] for o in offers] for name in common}
    missing = [name for name in common if not all(values[name])]
    if missing:
        results: dict[str, Any] = {}
        for name in missing:
            yield from meet(f"machine/{name}")
            results[name] = _try(_plain_values, measurer, name)[1]
        answers = [
            json.loads(a)
            for a in (yield from share_distinct("machine/values", _pack(results), index))
        ]
        values.update({name: [answer[name] for answer in answers] for name in missing})
    worst = _worst(values)
    _try(measurer.keep_probes, worst)
    return _machine(worst)


def _plain_rehearsal(measurer: Measurer, key: str) -> list[Any]:
    return measurer.rehearse(key).encode()


def _plain_offers(measurer: Measurer) -> dict[str, Any]:
    offers = measurer.offer_probes()
    return {name: [_pack_group(o.ranks), [*map(float, o.values)]] for name, o in offers.items()}


def _plain_values(measurer: Measurer, name: str) -> list[float]:
    return [float(value) for value in measurer.probe(name)]


def _common_probes(offers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that all ranks offer, in one order, without those on which the groups do not meet."""
    names = set(offers[0]).intersection(*offers[1:])
    return sorted(
        name
        for name in names
        if name.partition("/")[0] in _PROBES and _is_split([o[name][0] for o in offers])
    )


def _pack_group(ranks: Sequence[int]) -> list[Any]:
    """Size and digest of a group: as short for a thousand ranks as for two."""
    return [len(ranks), hashlib.sha256(_pack([*ranks])).hexdigest()[:16]]


def _is_split(groups: Sequence[Sequence[Any]]) -> bool:
    """Whether every group that a rank names is named by as many ranks as it has."""
    counts = Counter((size, digest) for size, digest in groups)
    return all(size in (0, count) for (size, _), count in counts.items())


def _worst(values: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    """Maxima over ranks of each probe that went well on all of them."""
    worst = {}
    for name, said in values.items():
        count = _PROBES[name.partition("/")[0]]
        wrong = [value for value in said if not _is_right(value, count)]
        if wrong:
            logger.info("the probe %s of the machine failed on a rank: %s", name, wrong[0])
        else:
            worst[name] = [max(column) for column in zip(*said, strict=True)]
    return worst


def _machine(worst: Mapping[str, Sequence[float]]) -> Machine:
    """The machine from what all ranks agreed on, by probe."""
    races = [values for name, values in worst.items() if name.startswith("contention/")]
    collective, wait, member = map(round, worst.get("collective", [0, 0, 0]))
    [kernel] = map(round, worst.get("kernel", [0]))
    [opaque] = map(round, worst.get("opaque", [_KERNELS_OF_AN_OPAQUE_OP * kernel]))
    gather_slowdown, compute_slowdown = (
        min(_MOST_SLOWDOWN, max(column)) for column in zip((1.0, 1.0), *races, strict=True)
    )
    return Machine(
        kernel_host_ns=kernel,
        opaque_host_ns=opaque,
        collective_host_ns=collective,
        member_host_ns=member,
        wait_host_ns=wait,
        gather_slowdown=gather_slowdown,
        compute_slowdown=compute_slowdown,
        # So it is in profiles: a kernel of a step fills the device up to its last wave.
        waits_for_kernel=bool(races),
        measured=bool(races),
    )


def _is_right(values: Any, count: int) -> bool:
    """Whether a rank gave numbers and not words, and as many as it should."""
    return isinstance(values, list) and len(values) == count and all(map(math.isfinite, values))


def _fits(rehearsals: Sequence[Sequence[Any]]) -> bool:
    """Whether all ranks were able to rehearse, and what they would issue meets."""
    if not all(ok for ok, _ in rehearsals):
        return False
    calls, exchanges = zip(*(said for _, said in rehearsals), strict=True)
    if len(set(calls)) > 1 or len({len(each) for each in exchanges}) > 1:
        return False
    return all(map(_is_exchange, zip(*exchanges, strict=True)))


def _is_exchange(sides: Sequence[Sequence[Any]]) -> bool:
    """Whether each rank receives what the others of its group send, by what each rank says."""
    by_group: dict[tuple[int, ...], dict[int, tuple[Sequence[int], Sequence[int]]]] = {}
    for ranks, place, received, sent in sides:
        if len(received) != len(ranks) or len(sent) != len(ranks):
            return False
        by_group.setdefault(tuple(ranks), {})[place] = (received, sent)
    return all(
        len(members) == len(ranks)
        and all(
            members[i][0][j] == members[j][1][i]
            for i in range(len(ranks))
            for j in range(len(ranks))
        )
        for ranks, members in by_group.items()
    )


def _together(times: Sequence[int | str], inside: Sequence[int | None]) -> Cost:
    """One collective-bearing key from what all ranks measured."""
    failures = [time for time in times if isinstance(time, str)]
    if failures:
        # The rank that could not knows why.
        why = next((failure for failure in failures if failure != _PEER_FAILED), _PEER_FAILED)
        return Cost(why=f"the replay failed on a rank: {why}")
    longest = max(time for time in times if isinstance(time, int))
    parts = [part for part in inside if part is not None]
    network = max(0, longest - max(parts)) if parts else None
    return Cost(ns=longest, network_ns=network, source=CostSource.MEASURED)


def _why_not_common(
    key: str,
    offers: Sequence[Mapping[str, Any]],
    rehearsals: Sequence[Mapping[str, Sequence[Any]]],
) -> str:
    absent = sum(key not in offer for offer in offers)
    if absent:
        return f"{absent} of {len(offers)} ranks do not have it or cannot replay it"
    if any(key not in rehearsal for rehearsal in rehearsals):
        return "a rank would replay it on a group that others do not"
    failures = [r[key][1] for r in rehearsals if not r[key][0]]
    if failures:
        return f"the replay failed on a rank: {failures[0]}"
    return "the ranks would issue different collectives for it"


def _try(call: Callable[..., T], *args: Any) -> tuple[bool, T | str]:
    """Whether a call went well, and its result or what went wrong."""
    try:
        return True, call(*args)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def _pack(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
