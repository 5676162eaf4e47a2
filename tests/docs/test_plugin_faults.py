"""A fault of any kind in any hook, on one rank of three, ends alike on all of them.

What raises on one rank is in `tests/test_pipeline.py`, and on real ranks in the fault matrix.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen

import overlap_core as oc
from overlap_core import OverlapConfig
from overlap_core.errors import PluginError
from overlap_core.host import PluginHost
from overlap_core.inductor.overlap_pass import OverlapPass
from overlap_core.ranks import Mode
from overlap_core.simulation import simulate_views
from overlap_core.testing import GraphBuilder, assert_legal, host_with, on_ranks
from overlap_core.views import prepare

from ..virtual_clock import VirtualClock
from .faulty import ASK, HOOKS, blocking, faulty, ladder_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlap_core.outcome import RankOutcome
    from overlap_core.testing import RunRanks

DECIDING = (
    "overlap_classify_node",
    "overlap_measure_cost",
    "overlap_choose_mode",
    "overlap_adjust_plan",
)
"""Hooks whose answers ranks decide by."""

TIMEOUT_S = 60.0

PASSES = "reorder_for_compute_comm_overlap_passes"


def silent(*_: object) -> None:
    """What the plugin does on the other ranks."""


def nonsense(*_: object) -> str:
    return "nonsense"


def spoil(*given: Any) -> None:
    """Change what was given, in the first way that works."""
    value = given[0]
    if isinstance(value, tuple):  # votes
        value[0].rank = 7
    elif hasattr(value, "placements"):
        given[1].symbols["s0"] = 3
    else:
        value.op = "another"


def outcomes_with(
    hook: str, act: Callable[..., Any], clock: VirtualClock | None = None
) -> tuple[RankOutcome, ...]:
    """Three ranks with one plugin, at fault on rank 1 alone; its clock is that rank's."""
    g = GraphBuilder()
    y = g.mm(g.mm("x", ns=None), g.gather("w0", ns=None), ns=None)
    g.mm(y, g.gather("w1", ns=None), ns=None)
    config = OverlapConfig(mode_ladder=ladder_for(hook), plugin_timeout_s=TIMEOUT_S)

    def host(rank: int) -> PluginHost:
        plugin, time = (act, clock) if rank == 1 else (silent, None)
        return PluginHost.discover(
            config,
            plugins=[faulty(hook, plugin)],
            environ={},
            installed=[],
            clock=time or VirtualClock(),
        )

    graphs = on_ranks(g.build(), 3)
    return simulate_views([prepare(graph, config, host(graph.rank)) for graph in graphs])


def check_all_abort(
    hook: str, act: Callable[..., Any], expected: str, clock: VirtualClock | None = None
) -> None:
    outcomes = outcomes_with(hook, act, clock)
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]
    assert len({outcome.why for outcome in outcomes}) == 1
    why = outcomes[0].why
    assert "rank 1" in why
    assert "rank 0" not in why
    assert f"plugin 'faulty' 1.0, hook {hook}" in why
    assert expected in why
    for outcome in outcomes:
        assert (outcome.mode, outcome.committed) == (Mode.ABORT, False)
        assert outcome.graph is not None
        assert list(outcome.order) == [node.name for node in outcome.graph.nodes]
        assert_legal(outcome.graph, outcome.order)


@pytest.mark.parametrize("hook", DECIDING)
def test_without_a_fault_gathers_move(hook: str) -> None:
    assert {outcome.mode for outcome in outcomes_with(hook, silent)} == {Mode.IDENTICAL}


@pytest.mark.parametrize("hook", DECIDING)
def test_a_wrong_type_on_one_rank_aborts_everywhere(hook: str) -> None:
    check_all_abort(hook, nonsense, "returned 'nonsense' of type str: expected ")


@pytest.mark.parametrize("hook", DECIDING)
def test_a_slow_plugin_on_one_rank_aborts_everywhere(hook: str) -> None:
    clock = VirtualClock()
    with blocking() as block:

        def hang(*_: object) -> None:
            clock.sleep(TIMEOUT_S + 1)
            block()

        check_all_abort(hook, hang, "has not returned for 60 s (plugin_timeout_s in", clock)


@pytest.mark.parametrize("hook", DECIDING)
def test_a_changed_argument_on_one_rank_aborts_everywhere(hook: str) -> None:
    changed = "changed the graph that it was given"
    frozen_ = "raised FrozenInstanceError"
    check_all_abort(hook, spoil, changed if hook == "overlap_adjust_plan" else frozen_)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_wrong_signature_is_refused_before_any_rank_waits(hook: str) -> None:
    with pytest.raises(PluginError) as caught:
        host_with(faulty(hook, silent, "rank"))
    text = str(caught.value)
    assert "plugin 'faulty' can't be registered" in text
    assert hook in text
    assert "{'rank'} are declared in the hookimpl but can not be found in the hookspec" in text
    assert "OVERLAP_CORE_DISABLE_PLUGINS=faulty" in text


def test_a_changed_report_is_at_fault() -> None:
    class Report:
        __slots__ = ()

    host = host_with(faulty("overlap_report_section", spoil))
    with pytest.raises(PluginError, match=r"'faulty' 1\.0, hook overlap_report_section: raised A"):
        host.report_sections(Report())


def test_a_plugin_that_failed_once_is_asked_again() -> None:
    errors = [RuntimeError("once")]

    def once(*_: object) -> None:
        if errors:
            raise errors.pop()

    host = host_with(faulty("overlap_classify_node", once))
    with pytest.raises(PluginError, match="raised RuntimeError: once"):
        ASK["overlap_classify_node"](host)
    ASK["overlap_classify_node"](host)


# The hooks that run while measuring: one op, whose shape says what goes wrong in which hook.


@torch.library.custom_op("plugin_faults::touch", mutates_args=())
def touch(x: torch.Tensor) -> torch.Tensor:
    """Something to measure."""
    return x + 1


@touch.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


MEASURING = {
    8: ("none", ""),
    9: ("materialize", "wrong type"),
    10: ("materialize", "slow"),
    11: ("materialize", "mutates"),
    12: ("realize", "raises"),
    13: ("realize", "wrong type"),
    14: ("realize", "slow"),
    15: ("realize", "mutates"),
}
"""Rows of the op's argument -> hook and fault on rank 1."""

EXPECTED = {
    "wrong type": r"returned 'nonsense' of type str: expected ",
    "slow": r"has not returned for 60 s",
    "mutates": r"raised (FrozenInstanceError|TypeError): ",
    "raises": r"raised RuntimeError: not on this rank",
}


class Measuring:
    """At fault in its two hooks on rank 1, by the rows of a tensor."""

    overlap_plugin_name = "measuring"

    def __init__(self) -> None:
        self.clock = VirtualClock()

    def _act(self, hook: str, rows: int, given: Any) -> Any:
        where, fault = MEASURING.get(rows, ("none", ""))
        if dist.get_rank() != 1 or where != hook:
            return None
        if fault == "raises":
            raise RuntimeError("not on this rank")
        if fault == "slow":
            self.clock.sleep(TIMEOUT_S + 1)
            threading.Event().wait()  # for ever
        if fault == "mutates" and hook == "realize":
            given.dtype = "int64"
        elif fault == "mutates":
            given[0] = None
        return "nonsense" if fault == "wrong type" else None

    @oc.hookimpl
    def overlap_materialize_inputs(self, op_name: str, args: Any, kwargs: Any) -> Any:
        if op_name != "plugin_faults::touch":
            return None
        return self._act("materialize", args[0].shape[0], args)

    @oc.hookimpl
    def overlap_realize_tensor(self, spec: Any) -> Any:
        return self._act("realize", spec.shape[0], spec)


class Stop(BaseException):
    """Ends a compile behind the pass."""


@frozen
class Seen:
    """What one rank reports: mode, whether it committed, and each call's cost by rows."""

    mode: str
    committed: bool
    costs: dict[int, tuple[str, str]]


def measure_with_faults(rank: int, world_size: int) -> Seen:
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        touched = tuple(touch(x[:rows]) for rows in MEASURING)
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(w, world_size, group))
        return (x @ gathered, *touched)

    config = OverlapConfig(deadline_s=300, plugin_timeout_s=TIMEOUT_S)
    plugin = Measuring()
    overlap = OverlapPass(config, PluginHost.discover(config, plugins=[plugin], clock=plugin.clock))

    def stop(snodes: list[Any]) -> list[Any]:
        raise Stop

    options = {**oc.inductor_options(config), PASSES: [overlap, stop]}
    with pytest.raises(Stop), torch.no_grad():
        torch.compile(fn, fullgraph=True, options=options)(
            torch.randn(64, 24), torch.randn(24 // world_size, 24)
        )
    report = oc.reports()[-1]
    assert report.graph is not None
    rows = zip(report.graph.nodes, report.requests, report.costs, strict=True)
    return Seen(
        mode=str(report.mode),
        committed=report.committed,
        costs={
            request.inputs[0][0]: (str(cost.source), cost.why)
            for node, request, cost in rows
            if node.op == "plugin_faults.touch.default" and request is not None
        },
    )


@pytest.fixture(scope="module")
def measured(pooled_ranks: RunRanks) -> list[Seen]:
    return pooled_ranks(measure_with_faults, 3, tries=3)


@pytest.mark.ranks
def test_faults_while_measuring_abort_nothing(measured: list[Seen]) -> None:
    assert {(seen.mode, seen.committed) for seen in measured} == {("identical", True)}
    for seen in measured:
        assert seen.costs.keys() == MEASURING.keys()
        assert seen.costs[8][0] == "measured"
    for healthy in (measured[0], measured[2]):
        assert {source for source, _ in healthy.costs.values()} == {"measured"}


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [rows for rows in MEASURING if rows != 8])
def test_a_fault_while_measuring_leaves_an_estimate_that_says_why(
    measured: list[Seen], rows: int
) -> None:
    hook, fault = MEASURING[rows]
    source, why = measured[1].costs[rows]
    assert source == "analytical"
    assert f"plugin 'measuring', hook overlap_{hook}_" in why
    assert re.search(EXPECTED[fault], why)
