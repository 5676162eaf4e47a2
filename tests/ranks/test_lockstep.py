"""The lockstep step for several ranks in memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from attrs import asdict, define, field
from hypothesis import given
from hypothesis import strategies as st

from overlap_core.costs import Cost, CostSource, Machine
from overlap_core.inductor.groups import default_store
from overlap_core.ranks import StoreExchange, agree_on_costs, run_in_memory
from overlap_core.ranks.lockstep import ProbeOffer, Rehearsal, agree_on_machine
from overlap_core.testing import CollectiveRecorder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlap_core.testing import RunRanks


@define
class Bench:
    """A rank that measures what it is told."""

    compute: dict[str, int] = field(factory=dict)
    issuing: dict[str, int] = field(factory=dict)
    signatures: dict[str, str] = field(factory=dict)
    broken: tuple[str, ...] = ()
    """Keys whose rehearsal fails here."""
    late: tuple[str, ...] = ()
    """Keys whose replay fails here."""
    table: dict[str, Cost] = field(factory=dict)
    kept: dict[str, Cost] = field(factory=dict)
    calls: list[str] = field(factory=list)
    probes: dict[str, Sequence[float]] = field(factory=dict)
    """What each probe gives here."""
    exchanges: dict[str, list[Any]] = field(factory=dict)
    """Uneven all-to-alls that a key would issue."""
    unprepared: tuple[str, ...] = ()
    """Keys whose arguments cannot be made in the end."""
    groups: dict[str, tuple[int, ...]] = field(factory=dict)
    known: dict[str, tuple[float, ...]] = field(factory=dict)
    """What probes gave before."""
    no_probes: str = ""
    """Why none can be offered."""
    probed: list[str] = field(factory=list)

    def saved(self) -> Mapping[str, Cost]:
        return self.table

    def measure_compute(self, known: Mapping[str, Cost]) -> Mapping[str, Cost]:
        return {
            key: Cost(ns=ns, source=CostSource.MEASURED)
            for key, ns in self.compute.items()
            if key not in known
        }

    def offer(self, known: Mapping[str, Cost]) -> Mapping[str, tuple[int, ...]]:
        return {key: self.groups.get(key, ()) for key in self.issuing if key not in known}

    def rehearse(self, key: str) -> Rehearsal:
        if key in self.broken:
            raise ValueError("no rehearsal")
        return Rehearsal(
            calls=(self.signatures.get(key, "all_gather"),),
            exchanges=self.exchanges.get(key, ()),
        )

    def refused(self) -> Mapping[str, str]:
        return {}

    def workspace_bytes(self, key: str) -> int:
        return 0

    def compute_part_ns(self, key: str) -> int | None:
        return self.issuing[key] // 2

    def prepare(self, key: str) -> None:
        if key in self.unprepared:
            raise RuntimeError("no memory")

    def replay(self, key: str) -> int:
        self.calls.append(key)
        if key in self.late:
            raise RuntimeError("no replay")
        return self.issuing[key]

    def save(self, table: Mapping[str, Cost]) -> None:
        self.kept = dict(table)

    def offer_probes(self) -> Mapping[str, ProbeOffer]:
        if self.no_probes:
            raise RuntimeError(self.no_probes)
        return {
            name: ProbeOffer(ranks=self.groups.get(name, ()), values=self.known.get(name, ()))
            for name in self.probes
        }

    def probe(self, name: str) -> Sequence[float]:
        self.probed.append(name)
        if name in self.broken:
            raise RuntimeError(f"no {name} today")
        return self.probes[name]

    def keep_probes(self, values: Mapping[str, Sequence[float]]) -> None:
        self.known = {name: tuple(value) for name, value in values.items()}


def agree(*benches: Bench) -> tuple[dict[str, Cost], ...]:
    results = run_in_memory([agree_on_costs(bench, i) for i, bench in enumerate(benches)])
    assert len({tuple(bench.calls) for bench in benches}) == 1, "ranks replayed different things"
    return results


EXCHANGES = {
    "fits": ([[0, 1], 0, [1, 2], [1, 3]], [[0, 1], 1, [3, 5], [2, 5]]),
    "not what was sent": ([[0, 1], 0, [1, 2], [1, 3]], [[0, 1], 1, [3, 5], [4, 5]]),
    "equal, but not each other's": ([[0, 1], 0, [4, 2], [2, 4]], [[0, 1], 1, [4, 2], [2, 4]]),
    "another group": ([[0, 1], 0, [1, 2], [1, 3]], [[1], 0, [3], [3]]),
    "fits, but the group is not in order": (
        [[1, 0], 1, [2, 1], [3, 1]],
        [[1, 0], 0, [5, 3], [5, 2]],
    ),
    "splits are missing": ([[0, 1], 0, [], [1, 3]], [[0, 1], 1, [], [2, 5]]),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_uneven_exchanges_are_replayed_where_they_fit(case: str) -> None:
    first, second = (
        Bench(issuing={"a2a": 10}, exchanges={"a2a": [side]}) for side in EXCHANGES[case]
    )
    for costs in agree(first, second):
        assert (costs["a2a"].ns is not None) == case.startswith("fits")


def test_an_uneven_exchange_is_not_replayed_beside_an_even_one() -> None:
    uneven = Bench(issuing={"a2a": 10}, exchanges={"a2a": [[[0, 1], 0, [1, 2], [1, 3]]]})
    assert agree(uneven, Bench(issuing={"a2a": 10}))[0]["a2a"].ns is None


def test_what_one_rank_cannot_prepare_is_replayed_by_none() -> None:
    first = Bench(issuing={"gather": 10, "other": 3})
    second = Bench(issuing={"gather": 8, "other": 4}, unprepared=("gather",))
    for costs in agree(first, second):
        assert costs["gather"].ns is None
        assert costs["gather"].why == ("the replay failed on a rank: RuntimeError: no memory")
        assert costs["other"].ns == 4
    assert first.calls == second.calls == ["other"]


def test_what_all_share_gets_the_maximum_and_the_rest_stays_ones_own() -> None:
    first = Bench(compute={"mm": 5, "mine": 1}, issuing={"gather": 10})
    second = Bench(compute={"mm": 7, "theirs": 2}, issuing={"gather": 8})
    one, two = agree(first, second)
    assert one["mm"] == two["mm"] == Cost(ns=7, source=CostSource.MEASURED)
    assert one["gather"] == two["gather"]
    assert (one["gather"].ns, one["gather"].network_ns) == (10, 5)
    assert one["mine"].ns == 1
    assert "mine" not in two


def test_a_rank_with_an_empty_table_still_takes_part() -> None:
    full, empty = agree(Bench(compute={"mm": 5}, issuing={"gather": 10}), Bench())
    assert empty == {}
    assert full["mm"].ns == 5
    assert full["gather"].ns is None
    assert "1 of 2 ranks do not have it" in full["gather"].why


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (Bench(issuing={"gather": 1}, broken=("gather",)), "no rehearsal"),
        (Bench(issuing={"gather": 1}, late=("gather",)), "no replay"),
        (Bench(issuing={"gather": 1}, signatures={"gather": "other"}), "different collectives"),
    ],
)
def test_a_collective_that_fails_on_one_rank_is_an_estimate_on_all(second: Bench, why: str) -> None:
    for result in agree(Bench(issuing={"gather": 9}), second):
        assert result["gather"].ns is None
        assert why in result["gather"].why


def test_a_collective_is_replayed_only_where_all_members_of_its_group_do() -> None:
    """Ranks of a 2 x 2 mesh with gathers of one size on both dimensions."""
    benches = [Bench(issuing={"gather": 9, "other": 4}) for _ in range(4)]
    for bench, row in zip(benches, [(0, 1), (0, 1), (2, 3), (2, 3)], strict=True):
        bench.groups = {"gather": row}
    assert {result["gather"].ns for result in agree(*benches)} == {9}
    benches[3].groups = {"gather": (1, 3)}
    for bench in benches:
        bench.calls.clear()
    for result in agree(*benches):
        assert result["gather"].ns is None
        assert result["gather"].why == "a rank would replay it on a group that others do not"
        assert result["other"].ns == 4
    assert benches[0].calls == ["other"]


def test_equal_saved_tables_leave_nothing_to_measure() -> None:
    table = {"gather": Cost(ns=3, source=CostSource.MEASURED)}
    benches = [Bench(issuing={"gather": 9}, table=dict(table)) for _ in range(3)]
    assert all(result["gather"].ns == 3 for result in agree(*benches))
    assert all(bench.calls == [] for bench in benches)


def test_unequal_saved_tables_are_used_by_none() -> None:
    benches = [
        Bench(issuing={"gather": 9}, table={"gather": Cost(ns=ns, source=CostSource.MEASURED)})
        for ns in (3, 4)
    ]
    assert all(result["gather"].ns == 9 for result in agree(*benches))
    assert benches[0].kept == benches[1].kept


ALL_PROBES: dict[str, Sequence[float]] = {
    "collective": (60_000, 9_000, 4_000),
    "contention/0/1048576": (1.5, 1.1),
    "kernel": (8_000,),
    "opaque": (300_000,),
}


def probe(*benches: Bench) -> Machine:
    machines = run_in_memory([agree_on_machine(bench, i) for i, bench in enumerate(benches)])
    assert len({tuple(bench.probed) for bench in benches}) == 1, "ranks probed different things"
    assert len(set(machines)) == 1
    return machines[0]


def test_a_machine_is_the_worst_that_a_rank_measured() -> None:
    second = {
        "collective": (50_000, 10_000, 4_500),
        "contention/0/1048576": (1.2, 1.3),
        "kernel": (8_500,),
        "opaque": (200_000,),
    }
    assert probe(Bench(probes=dict(ALL_PROBES)), Bench(probes=second)) == Machine(
        kernel_host_ns=8_500,
        opaque_host_ns=300_000,
        collective_host_ns=60_000,
        member_host_ns=4_500,
        wait_host_ns=10_000,
        gather_slowdown=1.5,
        compute_slowdown=1.3,
        waits_for_kernel=True,
        measured=True,
    )


def test_where_nothing_can_be_probed_the_host_is_never_late() -> None:
    assert probe(Bench(), Bench(), Bench()) == Machine()


def test_nobody_probes_what_one_rank_cannot() -> None:
    benches = [Bench(probes=dict(ALL_PROBES)) for _ in range(3)]
    del benches[1].probes["opaque"]
    machine = probe(*benches)
    assert benches[0].probed == ["collective", "contention/0/1048576", "kernel"]
    assert machine.opaque_host_ns == 10 * machine.kernel_host_ns == 80_000
    assert probe(Bench(probes=dict(ALL_PROBES)), Bench()) == Machine()


def test_a_rank_that_cannot_offer_says_why(caplog: pytest.LogCaptureFixture) -> None:
    benches = [Bench(probes=dict(ALL_PROBES)), Bench(probes=dict(ALL_PROBES), no_probes="no room")]
    assert probe(*benches) == Machine()
    assert benches[0].probed == []
    assert "a rank cannot: RuntimeError: no room" in caplog.text


@pytest.mark.parametrize("name", sorted(ALL_PROBES))
@pytest.mark.parametrize("values", [None, (), (1.0, 2.0, 3.0, 4.0), (float("nan"),)])
def test_a_probe_that_goes_wrong_on_one_rank_is_used_by_none(
    name: str, values: Sequence[float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = Bench(probes=dict(ALL_PROBES))
    if values is None:
        wrong.broken = (name,)
    else:
        wrong.probes[name] = values
    benches = [Bench(probes=dict(ALL_PROBES)), wrong, Bench(probes=dict(ALL_PROBES))]
    found = probe(*benches)
    assert wrong.probed == sorted(ALL_PROBES), "a failure never ends the step early"
    full = probe(*(Bench(probes=dict(ALL_PROBES)) for _ in range(2)))
    default, kind = Machine(), name.partition("/")[0]
    lost = {
        "collective": ("collective_host_ns", "wait_host_ns", "member_host_ns"),
        "contention": ("gather_slowdown", "compute_slowdown", "waits_for_kernel", "measured"),
        "kernel": ("kernel_host_ns",),
        "opaque": (),
    }[kind]
    for part in asdict(full):
        expected = default if part in lost else full
        if (kind, part) == ("opaque", "opaque_host_ns"):
            assert found.opaque_host_ns == 10 * found.kernel_host_ns
        else:
            assert getattr(found, part) == getattr(expected, part)
    assert f"the probe {name} of the machine failed on a rank" in caplog.text


def test_slowdowns_are_those_of_the_worst_group_and_bounded() -> None:
    probes = {"contention/0/1048576": (1.2, 1.4), "contention/1/2097152": (9.0, 0.7)}
    machine = probe(*(Bench(probes=dict(probes)) for _ in range(2)))
    assert (machine.gather_slowdown, machine.compute_slowdown) == (4.0, 1.4)
    machine = probe(Bench(probes={"contention/0/1048576": (0.9, 0.8)}))
    assert (machine.gather_slowdown, machine.compute_slowdown) == (1.0, 1.0)


def test_ranks_probe_a_group_only_where_all_its_members_do() -> None:
    """Ranks of a 2 x 2 mesh, one of which met the other dimension first."""
    rows, columns = [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]
    benches = [Bench(probes=dict(ALL_PROBES)) for _ in rows]
    for bench, row, column in zip(benches, rows, columns, strict=True):
        bench.groups = {"collective": row, "contention/0/1048576": column}
    assert probe(*benches).measured
    benches[3].groups["contention/0/1048576"] = rows[3]
    for bench in benches:
        bench.known, bench.probed = {}, []
    machine = probe(*benches)
    assert benches[0].probed == ["collective", "kernel", "opaque"]
    assert not machine.measured
    assert machine.collective_host_ns == 60_000


def test_what_all_ranks_know_is_not_probed_again() -> None:
    benches = [Bench(probes=dict(ALL_PROBES)) for _ in range(2)]
    first = probe(*benches)
    benches[1].probes["kernel"] = (9_000,)
    for bench in benches:
        assert bench.known == {name: tuple(values) for name, values in ALL_PROBES.items()}
        bench.probed.clear()
    assert probe(*benches) == first
    assert benches[0].probed == []
    benches[1].probes["kernel"] = ALL_PROBES["kernel"]
    benches[1].known = {"kernel": (8_000,)}
    assert probe(*benches) == first
    assert benches[0].probed == ["collective", "contention/0/1048576", "opaque"]


def test_an_unknown_probe_is_left_alone() -> None:
    assert probe(Bench(probes={"weather": (1.0,)})) == Machine()


class Talking(Bench):
    """A rank whose probe of collectives communicates, and which is late, or fails, at others."""

    def probe(self, name: str) -> Sequence[float]:
        rank = dist.get_rank()
        if name == "collective":
            value = torch.tensor([float(rank)])
            dist.all_reduce(value)
            return [value.item(), rank, 3]
        if rank == 1 and name == "kernel":
            time.sleep(0.3)
        if rank == 0 and name == "opaque":
            raise RuntimeError("no opaque op today")
        return [1.25 + rank, 1.5] if name.startswith("contention") else [7.0 + rank]


def probe_for_real(rank: int, world_size: int) -> tuple[Machine, tuple[Any, ...]]:
    bench = Talking(probes=dict(ALL_PROBES), groups={"collective": tuple(range(world_size))})
    scope = tuple(range(world_size))

    def agree_on(name: str, bench: Bench) -> Machine:
        exchange = StoreExchange(default_store(), rank, name, deadline_s=300)
        return exchange.run(agree_on_machine(bench, rank), scope)

    with CollectiveRecorder() as recorder:
        machine = agree_on("probing", bench)
        idle = agree_on("nothing to probe", Bench())
    assert idle == Machine()
    return machine, tuple(recorder.shared())


@pytest.mark.ranks
def test_real_ranks_agree_on_a_machine(pooled_ranks: RunRanks) -> None:
    (first, issued), *others = pooled_ranks(probe_for_real, 3)
    assert all(other == (first, issued) for other in others)
    assert len(issued) == 1
    assert first == Machine(
        kernel_host_ns=9,
        opaque_host_ns=90,
        collective_host_ns=3,
        wait_host_ns=2,
        member_host_ns=3,
        gather_slowdown=3.25,
        compute_slowdown=1.5,
        waits_for_kernel=True,
        measured=True,
    )


keys = st.sampled_from("abcdef")
times = st.dictionaries(keys, st.integers(0, 1000), max_size=6)
some = st.lists(keys, max_size=2).map(tuple)


@given(st.lists(st.builds(Bench, times, times, broken=some, late=some), min_size=1, max_size=4))
def test_ranks_replay_the_same_and_agree_on_what_communicates(benches: list[Bench]) -> None:
    for bench in benches:
        bench.compute = {f"compute {key}": ns for key, ns in bench.compute.items()}
    results = agree(*benches)
    for key in "abcdef":
        found = {result[key].ns for result in results if key in result}
        assert len(found) <= 1
