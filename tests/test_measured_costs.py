"""Costs measured on real ranks: the same table where it must be, and nobody left waiting."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import frozen

import overlap_core as oc
from overlap_core.inductor.overlap_pass import OverlapPass
from overlap_core.session import session
from overlap_core.testing import CollectiveRecorder

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

PASSES = "reorder_for_compute_comm_overlap_passes"
TALKS = "overlap_cost_tests::talks"
PACKED = "overlap_cost_tests::packed"
ONE_SIDED = "overlap_cost_tests::one_sided"


@torch.library.custom_op(TALKS, mutates_args=())
def talks(x: torch.Tensor, cp_split_sizes: torch.Tensor, group: str) -> torch.Tensor:
    """Attention-like: exchanges rows by split sizes that are values, not shapes."""
    splits = cp_split_sizes.tolist()
    if sum(splits) != x.shape[0]:
        raise ValueError(f"split sizes {splits} of {x.shape[0]} rows")
    size = len(splits)
    out = torch.empty_like(x)
    rows = [x.shape[0] // size] * size
    sent = torch.ops._c10d_functional.all_to_all_single(x, rows, splits, group)
    out.copy_(torch.ops._c10d_functional.wait_tensor(sent))
    return out


@talks.register_fake
def _(x: torch.Tensor, cp_split_sizes: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(PACKED, mutates_args=())
def packed(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Pure compute whose argument holds values that must fit the shape."""
    if int(cu_seqlens[-1]) != x.shape[0]:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, not at {x.shape[0]}")
    return x * 2


@packed.register_fake
def _(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(ONE_SIDED, mutates_args=())
def one_sided(x: torch.Tensor, group: str) -> torch.Tensor:
    """Communicates, but its replay fails on rank 1 before it gets there."""
    if FAILING and dist.get_rank() == 1:
        raise RuntimeError("this rank has a bad day")
    return functional.all_reduce(x, "sum", group) + 0


@one_sided.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


FAILING = False
HAS_POINT_TO_POINT = hasattr(torch.ops._c10d_functional, "isend")
point_to_point = pytest.mark.skipif(
    not HAS_POINT_TO_POINT, reason="this torch has no functional isend and irecv"
)


def even_splits(x: torch.Tensor, cp_split_sizes: torch.Tensor, group: str) -> tuple[Any, ...]:
    count = cp_split_sizes.numel()
    return x, torch.full_like(cp_split_sizes, x.shape[0] // count), group


def whole_sequence(x: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[Any, ...]:
    ends = torch.zeros_like(cu_seqlens)
    ends[-1] = x.shape[0]
    return x, ends


class Stop(BaseException):
    """Ends a compile behind the pass."""


@frozen(kw_only=True)
class Seen:
    """What one rank saw of one compile."""

    mode: str
    entries: dict[str, tuple[int | None, str, str]]
    """By op: time, source, and why; the first node of each op."""
    all_entries: tuple[tuple[str, int | None, str], ...]
    collectives: tuple[Any, ...]
    notes: tuple[str, ...]


def compile_and_look(fn: Any, *args: Any, dynamic: bool | None = None, **config: Any) -> Seen:
    before = len(oc.reports())
    torch.compiler.reset()
    options = oc.inductor_options(
        oc.OverlapConfig(deadline_s=300, recompile_deadline_s=300, warm_start=False, **config)
    )

    def stop(snodes: list[Any]) -> list[Any]:
        raise Stop

    options[PASSES].append(stop)
    with CollectiveRecorder() as recorder, pytest.raises(Stop), torch.no_grad():
        torch.compile(fn, fullgraph=True, dynamic=dynamic, options=options)(*args)
    *_, report = oc.reports()[before:]
    assert report.graph is not None
    rows = [
        (node.op, cost.ns, str(cost.source), cost.why)
        for node, cost in zip(report.graph.nodes, report.costs, strict=True)
    ]
    entries: dict[str, tuple[int | None, str, str]] = {}
    for op, ns, source, why in rows:
        entries.setdefault(op.removesuffix(".default"), (ns, source, why))
    return Seen(
        mode=str(report.mode),
        entries=entries,
        all_entries=tuple(row[:3] for row in rows),
        collectives=tuple(recorder.shared()),
        notes=report.notes,
    )


def gather(shard: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(functional.all_gather_tensor(shard, 0, dist.group.WORLD))


def scenarios(rank: int, world_size: int) -> dict[str, Seen]:
    """All cases in one pair of processes; a hang in one of them ends the whole test."""
    global FAILING  # noqa: PLW0603
    x = torch.randn(64, 32)
    w, v = torch.randn(16, 32), torch.randn(16, 32)
    splits = torch.tensor([32, 32])
    seqlens = torch.tensor([0, 64], dtype=torch.int32)
    seen: dict[str, Seen] = {}

    def base(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ gather(w)) @ gather(v)

    seen["plain"] = compile_and_look(base, x, w, v)

    def with_all(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x @ gather(w), "sum", dist.group.WORLD)
        y = functional.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD)
        y = functional.all_to_all_single(y, [16, 16], [16, 16], dist.group.WORLD)
        a, b = functional.all_gather_into_tensor_coalesced([y, w], dist.group.WORLD)
        return a.sum() + b.sum()

    seen["every collective"] = compile_and_look(with_all, x, w)

    ours, theirs = ([10, 22], [10, 22]) if rank == 0 else ([22, 10], [22, 10])

    def uneven_exchange(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ gather(w)
        return functional.all_to_all_single(y[:32], theirs, ours, dist.group.WORLD) + 1

    seen["uneven exchange"] = compile_and_look(uneven_exchange, x, w)

    # By their shapes the first of one rank is the second of the other, but not by what they send.
    (out1, in1), (out2, in2) = (
        (([4, 6], [4, 4]), ([4, 2], [4, 4])) if rank == 0 else (([4, 2], [6, 2]), ([4, 6], [2, 6]))
    )

    def crossed_exchanges(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ gather(w))[:8]
        one = functional.all_to_all_single(y, out1, in1, dist.group.WORLD)
        two = functional.all_to_all_single(y * 2, out2, in2, dist.group.WORLD)
        return one.sum() + two.sum()

    seen["crossed exchanges"] = compile_and_look(crossed_exchanges, x, w)

    def ring(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        y = x @ gather(w)
        sent = ops.wait_tensor(ops.isend(y, 1 - rank, 0, "0"))
        got = ops.wait_tensor(ops.irecv(torch.zeros_like(y), 1 - rank, 0, "0"))
        return got.sum() + sent.sum()

    if HAS_POINT_TO_POINT:
        seen["ring"] = compile_and_look(ring, torch.randn(2048, 32), w)

    def extra(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = base(x, w, v)
        return y.sum() + (x.T @ x).sum() if rank == 1 else y.sum()

    seen["other compute"] = compile_and_look(extra, x, w, v)

    oc.register_materialize_inputs(TALKS, even_splits, has_internal_collective=True)
    oc.register_materialize_inputs(PACKED, whole_sequence)

    def attention(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, c: torch.Tensor) -> Any:
        return packed(talks(x, s, "0"), c) @ gather(w)

    seen["hooks"] = compile_and_look(attention, x, w, splits, seqlens)
    seen["another size"] = compile_and_look(
        attention, torch.cat([x, x]), w, 2 * splits, 2 * seqlens
    )

    rows = torch.randn(64 - 16 * rank, 32)

    def uneven(y: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return talks(y, s, "0") @ gather(w)

    seen["one rank's collective"] = compile_and_look(uneven, rows, w, splits, dynamic=True)

    bad = Path(tempfile.mkdtemp()) / "costs.json"
    bad.write_text("no table")
    seen["unreadable table"] = compile_and_look(
        lambda x, w: x @ gather(w), x, w, cost_table_path=str(bad)
    )
    elsewhere = "/proc/overlap_core/costs.json"  # not even root makes folders there
    seen["unwritable table"] = compile_and_look(
        lambda x, w: torch.cos(x) @ gather(w), x, w, cost_table_path=elsewhere
    )

    oc.register_materialize_inputs(ONE_SIDED, has_internal_collective=True)
    FAILING = True
    seen["failing replay"] = compile_and_look(lambda x, w: one_sided(x, "0") @ gather(w), x, w)
    FAILING = False
    seen["small limit"] = compile_and_look(base, x, w, v, max_replay_bytes=rank + 1)
    seen["same limit"] = compile_and_look(base, x, w, v, max_replay_bytes=3)
    return seen


class SlowOnOne:
    """Materializes late on rank 1, and raises there for one op."""

    overlap_plugin_name = "slow_on_one"

    @oc.hookimpl
    def overlap_materialize_inputs(self, op_name: str, args: Any, kwargs: Any) -> None:
        if dist.get_rank() == 1 and "all_gather" in op_name:
            time.sleep(1.0)
        if dist.get_rank() == 1 and op_name == "aten::mm":
            raise ValueError("not on this rank")
        if dist.get_rank() == 1 and op_name == "_c10d_functional::all_reduce_":
            raise ValueError("nor this")


def faults(rank: int, world_size: int) -> tuple[Seen, ...]:
    from overlap_core.host import PluginHost

    x, w, v = torch.randn(64, 32), torch.randn(16, 32), torch.randn(16, 32)

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x @ gather(w), "sum", dist.group.WORLD)
        return torch.sin(y) @ gather(v)

    config = oc.OverlapConfig(deadline_s=300)
    slow = OverlapPass(config, PluginHost.discover(config, plugins=[SlowOnOne()]))

    def stop(snodes: list[Any]) -> list[Any]:
        raise Stop

    options = {**oc.inductor_options(config), PASSES: [slow, stop]}
    with CollectiveRecorder() as recorder, pytest.raises(Stop), torch.no_grad():
        torch.compile(fn, fullgraph=True, options=options)(x, w, v)
    report = oc.reports()[-1]
    assert report.graph is not None
    entries = {
        node.op.removesuffix(".default"): (cost.ns, str(cost.source), cost.why)
        for node, cost in zip(report.graph.nodes, report.costs, strict=True)
    }
    seen = Seen(
        mode=str(report.mode),
        entries=entries,
        all_entries=(),
        collectives=tuple(recorder.shared()),
        notes=report.notes,
    )
    return (seen,)


@pytest.fixture(scope="module")
def results(pooled_ranks: RunRanks) -> list[dict[str, Seen]]:
    return pooled_ranks(scenarios, 2, tries=3)


GATHER = "_c10d_functional.all_gather_into_tensor"


def test_what_all_ranks_share_is_measured_and_equal(results: list[dict[str, Seen]]) -> None:
    first, second = (result["plain"] for result in results)
    for seen in (first, second):
        assert seen.mode == "identical"
        assert seen.entries[GATHER][1] == "measured"
        assert seen.entries["aten.mm.out"][1] == "measured"
    measured = [e for e in first.all_entries if e[2] == "measured"]
    assert measured == [e for e in second.all_entries if e[2] == "measured"]


def test_every_functional_collective_is_replayed(results: list[dict[str, Seen]]) -> None:
    for result in results:
        seen = result["every collective"]
        issuing = {op: e for op, e in seen.entries.items() if op.startswith("_c10d_functional")}
        issuing.pop("_c10d_functional.wait_tensor")
        assert len(issuing) == 5
        assert {source for _, source, _ in issuing.values()} == {"measured"}, issuing


def test_uneven_splits_are_replayed_with_each_ranks_own(
    results: list[dict[str, Seen]],
) -> None:
    first, second = (result["uneven exchange"].entries for result in results)
    name = "_c10d_functional.all_to_all_single"
    assert first[name][1] == "measured"
    assert first[name] == second[name]


def test_exchanges_that_only_look_alike_are_not_replayed(results: list[dict[str, Seen]]) -> None:
    for result in results:
        ns, source, why = result["crossed exchanges"].entries["_c10d_functional.all_to_all_single"]
        assert source != "measured", (ns, why)
        assert "the ranks would issue different collectives for it" in why


@point_to_point
def test_what_each_rank_sends_elsewhere_is_not_replayed(results: list[dict[str, Seen]]) -> None:
    for result in results:
        entries = result["ring"].entries
        assert entries[GATHER][1] == "measured"
        for name in ("isend", "irecv"):
            _, source, why = entries[f"_c10d_functional.{name}"]
            assert source != "measured"
            assert "each rank sends or receives with another peer" in why


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "every collective",
        "uneven exchange",
        "crossed exchanges",
        pytest.param("ring", marks=point_to_point),
        "other compute",
        "hooks",
        "one rank's collective",
        "failing replay",
        "small limit",
        "same limit",
    ],
)
def test_ranks_issue_the_same_collectives_while_measuring(
    results: list[dict[str, Seen]], case: str
) -> None:
    first, second = (result[case].collectives for result in results)
    assert first == second


def test_pure_compute_of_one_rank_keeps_its_own_time(results: list[dict[str, Seen]]) -> None:
    first, second = (result["other compute"] for result in results)
    assert first.mode == second.mode == "slot"
    assert first.entries[GATHER] == second.entries[GATHER]
    assert len(second.all_entries) > len(first.all_entries)
    assert all(e[2] == "measured" for e in second.all_entries if e[0] == "aten.mm.out")


def test_ops_that_raise_on_generic_inputs_are_measured_through_their_hooks(
    results: list[dict[str, Seen]],
) -> None:
    for result in results:
        entries = result["hooks"].entries
        assert entries["overlap_cost_tests.talks"][1] == "measured", entries
        assert entries["overlap_cost_tests.packed"][1] == "measured", entries


def test_a_collective_of_one_rank_only_is_analytical(results: list[dict[str, Seen]]) -> None:
    for result in results:
        _, source, why = result["one rank's collective"].entries["overlap_cost_tests.talks"]
        assert source != "measured"
        assert "1 of 2 ranks do not have it" in why


def test_a_replay_that_fails_on_one_rank_is_skipped_by_all(
    results: list[dict[str, Seen]],
) -> None:
    for result in results:
        seen = result["failing replay"]
        _, source, why = seen.entries["overlap_cost_tests.one_sided"]
        assert source != "measured"
        assert "this rank has a bad day" in why
        assert seen.entries[GATHER][1] == "measured"


def test_what_measuring_took_is_noted(results: list[dict[str, Seen]]) -> None:
    pattern = (
        r"measuring took \d+\.\d\d s \(compute \d+\.\d\d, communication \d+\.\d\d, "
        r"machine \d+\.\d\d\) and raised the peak of GPU memory by 0 MiB"
    )
    for result in results:
        assert any(re.fullmatch(pattern, note) for note in result["plain"].notes)


def test_tables_that_cannot_be_read_or_written_are_noted(results: list[dict[str, Seen]]) -> None:
    for result in results:
        for case, start in (
            ("unreadable table", "cost table not used: "),
            ("unwritable table", "cost table not saved: "),
        ):
            seen = result[case]
            assert any(note.startswith(start) for note in seen.notes), seen.notes
            assert seen.mode == "identical"


def test_at_another_size_a_rank_that_follows_scales_what_it_may_not_time(
    results: list[dict[str, Seen]],
) -> None:
    for result in results:
        first, second = result["hooks"], result["another size"]
        assert "compiled alone: follows what was agreed for an earlier graph" in second.notes
        assert second.collectives == ()
        assert second.entries[GATHER] == first.entries[GATHER]
        (one, *_), (other, source, why) = (
            s.entries["overlap_cost_tests.talks"] for s in (first, second)
        )
        # Twice the rows, and a few bytes of split sizes that stay.
        assert other == pytest.approx(2 * one, rel=0.01)
        assert (source, why) == ("analytical", "scaled by 2.00 from a measurement at another size")


def test_large_inputs_are_refused_with_a_note(results: list[dict[str, Seen]]) -> None:
    for result in results:
        _, source, why = result["same limit"].entries["aten.mm.out"]
        assert source == "analytical"
        assert "more than max_replay_bytes=3" in why
        assert result["small limit"].mode == "abort"  # ranks with other configurations


def test_a_slow_rank_and_hooks_that_raise_on_one_rank_only(pooled_ranks: RunRanks) -> None:
    [(first,), (second,)] = pooled_ranks(faults, 2, tries=3)
    assert first.mode == second.mode == "identical"
    assert first.collectives == second.collectives
    assert first.entries[GATHER] == second.entries[GATHER]
    assert first.entries[GATHER][1] == "measured"
    assert first.entries["aten.mm.out"][1] == "measured"
    assert second.entries["aten.mm.out"][1] == "analytical"
    assert "'slow_on_one'" in second.entries["aten.mm.out"][2]
    assert "not on this rank" in second.entries["aten.mm.out"][2]
    for seen in (first, second):
        assert seen.entries["_c10d_functional.all_reduce_"][1] == "analytical"
    assert "nor this" in second.entries["_c10d_functional.all_reduce_"][2]


def save_and_load(rank: int, world_size: int, path: str, disagree: bool) -> tuple[Any, ...]:
    x, w, v = torch.randn(64, 32), torch.randn(16, 32), torch.randn(16, 32)

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ gather(w)) @ gather(v)

    own = path + (str(rank) if disagree else "")
    first = compile_and_look(fn, x, w, v, cost_table_path=own)
    if disagree and rank == 1:
        import json

        data = json.loads(Path(own).read_text())
        for entry in data["entries"].values():
            entry["ns"] += 1
        Path(own).write_text(json.dumps(data))
    dist.barrier()
    session.reset()
    second = compile_and_look(fn, x, w, v, cost_table_path=own)
    return first, second


def test_a_saved_table_is_used_at_the_second_start(tmp_path: Any, pooled_ranks: RunRanks) -> None:
    path = str(tmp_path / "costs.json")
    for first, second in pooled_ranks(save_and_load, 2, path, False, tries=3):
        assert first.collectives
        assert second.collectives == ()  # nothing is measured again
        assert [e for e in first.all_entries if e[2] == "measured"] == [
            e for e in second.all_entries if e[2] == "measured"
        ]


def test_tables_that_differ_between_ranks_are_loaded_by_none(
    tmp_path: Any, pooled_ranks: RunRanks
) -> None:
    path = str(tmp_path / "costs.json")
    for _, second in pooled_ranks(save_and_load, 2, path, True, tries=3):
        assert second.collectives  # measured again, by both
        assert second.entries[GATHER][1] == "measured"
