"""What a rank does in each case of the fault matrix.

A case ends behind the pass, before code generation: only the order matters.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._inductor.exc import InductorError

from overlap_core import OverlapConfig
from overlap_core._clock import REAL_CLOCK, Clock
from overlap_core.host import PluginHost
from overlap_core.inductor import overlap_pass, records
from overlap_core.inductor.groups import default_store
from overlap_core.inductor.install import _compose, _watch_compiles
from overlap_core.inductor.overlap_pass import OverlapPass
from overlap_core.ranks import StoreExchange

from .pipeline_views import Failing
from .virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CASES", "HOOKS", "ON_FOUR_RANKS", "STEPS", "play"]

PASSES = "reorder_for_compute_comm_overlap_passes"
LONG_S, SHORT_S = 300.0, 1.5
"""A limit for peers that come, however busy the machine is, and one for those that never do."""
PLUGIN_S = 60.0
HOOKS = (
    "overlap_classify_node",
    "overlap_measure_cost",
    "overlap_choose_mode",
    "overlap_adjust_plan",
)
STEPS = 6
"""Enough to die at each operation of a negotiation in which graphs differ."""

_SOURCE = """
def {name}(x, *weights):
    for weight in weights:
        x = torch.sin(x @ gather(weight))
        {extra}
    return reduce(x) @ gather(weights[0]) @ gather(weights[1])
"""


class Stop(BaseException):
    """Ends a compile behind the pass."""


def _stop(snodes: list[Any]) -> list[Any]:
    raise Stop


class Died(BaseException):
    """This rank says nothing more, as if its process had been killed."""


def _gather(shard: torch.Tensor, group: Any = None) -> torch.Tensor:
    ops, group = torch.ops._c10d_functional, group or dist.group.WORLD
    launched = ops.all_gather_into_tensor(shard, group.size(), group.group_name)
    return ops.wait_tensor(launched)


def _reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    ops, group = torch.ops._c10d_functional, group or dist.group.WORLD
    return ops.wait_tensor(ops.all_reduce(x, "sum", group.group_name))


def function(name: str, extra: str = "pass", group: Any = None) -> Callable[..., torch.Tensor]:
    """A function of a code object of its own; `extra` is one statement more in each layer."""
    space: dict[str, Any] = {
        "torch": torch,
        "gather": lambda shard: _gather(shard, group),
        "reduce": lambda x: _reduce(x, group),
    }
    source = _SOURCE.format(name=name, extra=extra)
    exec(compile(source, f"fault/{name}.py", "exec"), space)
    return space[name]


def order_of(
    fn: Callable[..., Any],
    *args: Any,
    plugins: tuple[object, ...] = (),
    clock: Clock = REAL_CLOCK,
    alone: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compile up to the pass; what became of the graph, and how long it took.

    Args:
        fn, args: what is compiled.
        plugins: beside the installed ones.
        clock: by which the time of hooks is taken.
        alone: no peer comes, so every deadline passes at once.
        settings: of the configuration.
    """
    values = {"costs": "analytical", "deadline_s": LONG_S, "recompile_deadline_s": LONG_S}
    config = OverlapConfig(**{**values, **settings})
    host = PluginHost.discover(config, plugins=plugins, clock=clock)
    overlap = OverlapPass(config, host, VirtualClock() if alone else REAL_CLOCK)
    options = _compose(overlap, {})
    _watch_compiles()
    options[PASSES].append(_stop)
    start, before = time.monotonic(), len(records())
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(fn, fullgraph=True, options=options)(*args)
    except Stop:
        pass
    except Died:
        return {"mode": "died"}
    except InductorError as error:
        return {"mode": "refused", "why": str(error)}
    found = records()[before:]
    if not found:
        return {"mode": "none", "seconds": time.monotonic() - start}
    outcome = found[-1]
    ordinals = {entry.node: entry.ordinal for entry in outcome.skeleton}
    return {
        "scope": outcome.scope,
        "mode": str(outcome.mode),
        "why": outcome.why,
        "committed": outcome.committed,
        "sequence": [ordinals[name] for name in outcome.collectives],
        "ops": [entry.op for entry in outcome.skeleton],
        "hoisted": outcome.hoisted,
        "notes": outcome.notes,
        "seconds": time.monotonic() - start,
    }


def inputs(rows: int = 32) -> tuple[torch.Tensor, ...]:
    """Activations, and the shards of two square weights."""
    shards = [torch.randn(32 // dist.get_world_size(), 32) for _ in range(2)]
    return (torch.randn(rows, 32), *shards)


def plain(rank: int) -> list[Any]:
    return [order_of(function("plain"), *inputs())]


def compute_differs(rank: int) -> list[Any]:
    return [order_of(function("compute_differs", "x = x.cos()" if rank else "pass"), *inputs())]


def no_gather(rank: int) -> list[Any]:
    def bare(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return _reduce(x).sin()

    bare.__code__ = bare.__code__.replace(
        co_qualname="no_gather", co_filename="fault/no_gather.py", co_firstlineno=2
    )
    fn = bare if rank == 1 else function("no_gather")
    return [order_of(fn, *inputs())]


def extra_graph(rank: int) -> list[Any]:
    """A helper without communication on one rank, between two graphs of all."""
    first = order_of(function("extra_first"), *inputs())
    if rank == 0:
        order_of(lambda x: x.sin() + 1, torch.ones(3))
    return [first, order_of(function("extra_second"), *inputs())]


def alone_after(rank: int) -> list[Any]:
    """Another shape on one rank: the same order, and nobody is waited for."""
    fn = function("alone_after")
    result = [order_of(fn, *inputs())]
    if rank == 1:
        result += [order_of(fn, *inputs(rows)) for rows in (7, 48)]
    return result


def alone_after_with_another_skeleton(rank: int) -> list[Any]:
    """One more reduction of all ranks, which don't come; what all compile next works."""
    fn, more = function("alone_other"), function("alone_other", "x = reduce(x)")
    result = [order_of(fn, *inputs())]
    if rank == 1:
        result.append(order_of(more, *inputs(), alone=True))
    dist.barrier()
    return [
        *result,
        order_of(function("alone_other", "x = reduce(x).cos() + reduce(x)"), *inputs()),
    ]


def alone_and_broken(rank: int) -> list[Any]:
    """The pass itself fails, before it knows for which function."""
    fn, other = function("alone_and_broken"), function("new_and_broken")
    result = [order_of(fn, *inputs())]
    original = overlap_pass.identify
    if rank == 1:
        overlap_pass.identify = None  # type: ignore[assignment]
        try:
            result += [order_of(one, *inputs(7)) for one in (fn, other)]
        finally:
            overlap_pass.identify = original
    return result


def alone_before(rank: int) -> list[Any]:
    """One rank compiles something else under the same name before all compile the same."""
    first = [order_of(function("alone_before", "x = reduce(x)"), *inputs())] if rank == 1 else []
    return [*first, order_of(function("alone_before"), *inputs(), alone=rank == 1)]


def blocks(rank: int) -> list[Any]:
    """A plugin that doesn't return on one rank."""
    clock, end = VirtualClock() if rank == 1 else REAL_CLOCK, threading.Event()

    def wait() -> None:
        clock.sleep(PLUGIN_S + 1)
        end.wait()

    plugin = Failing("overlap_classify_node", active=rank == 1, wait=wait)
    settings = {"mode_ladder": "careful", "plugin_timeout_s": PLUGIN_S}
    try:
        return [order_of(function("blocks"), *inputs(), plugins=(plugin,), clock=clock, **settings)]
    finally:
        end.set()


def stages(rank: int) -> list[Any]:
    """Two halves of the world with functions and groups of their own, as pipeline stages have."""
    half = dist.get_world_size() // 2
    members = [list(range(half)), list(range(half, 2 * half))]
    groups = [dist.new_group(ranks) for ranks in members]
    stage = rank // half
    extra = "x = x.cos()" if rank == 1 else "pass"
    fn = function(f"stage_{stage}", extra, groups[stage])
    weights = [torch.randn(32 // half, 32) for _ in range(2)]
    return [order_of(fn, torch.randn(32, 32), *weights)]


def late(rank: int) -> list[Any]:
    """One rank comes after its peers have begun to wait."""
    if rank == 1:
        while not default_store().check(["overlap_core/waiting/0"]):
            time.sleep(0.05)
    return [order_of(function("late"), *inputs())]


def too_late(rank: int) -> list[Any]:
    """One rank comes after its peers have given up."""
    if rank == 1:
        default_store().get("gave up")  # waits for it
    result = [order_of(function("too_late"), *inputs(), deadline_s=SHORT_S)]
    default_store().set("gave up", "1")
    return result


def other_order(rank: int) -> list[Any]:
    """Two graphs, compiled in another order on one rank."""
    names = ["other_order_f", "other_order_g"]
    if rank == 1:
        names.reverse()
    found = {n: order_of(function(n), *inputs(), deadline_s=SHORT_S) for n in names}
    return [found[name] for name in sorted(found)]


def threads(rank: int) -> list[Any]:
    """Two graphs at the same time; each meets its own peers."""
    found: dict[str, Any] = {}
    ready = threading.Lock()
    names = ["thread_f", "thread_g"]
    begun = {name: threading.Event() for name in names}

    def one(name: str) -> None:
        # Dynamo compiles one frame at a time; the lock keeps the records apart.
        with ready:
            begun[name].set()
            found[name] = order_of(function(name), *inputs())

    workers = [threading.Thread(target=one, args=(name,)) for name in names]
    for worker, name in zip(workers, names, strict=True):
        worker.start()
        if name == names[0]:
            begun[name].wait()
    for worker in workers:
        worker.join()
    return [found[name] for name in names]


def raises(hook: str) -> Callable[[int], list[Any]]:
    def case(rank: int) -> list[Any]:
        plugin = Failing(hook, active=rank == 1)
        fn = function(f"raises_{hook}")
        return [order_of(fn, *inputs(), plugins=(plugin,), mode_ladder="careful")]

    return case


def dies(step: int, *, before: bool) -> Callable[[int], list[Any]]:
    """One rank falls silent before or after its n-th word."""

    def case(rank: int) -> list[Any]:
        name = f"dies_{step}_{before}"
        fn = function(name, "x = x.cos()" if rank == 1 else "pass")
        if rank != 1:
            return [order_of(fn, *inputs(), deadline_s=SHORT_S)]
        count = 0
        original = {n: getattr(StoreExchange, n) for n in ("publish_scope", "_share", "_decide")}

        def patched(which: str) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == step and before:
                    raise Died
                if count == step and which == "_share":
                    self._store.set(self._key(args[0], self._rank), args[1].decode())
                    raise Died
                answer = original[which](self, *args, **kwargs)
                if count == step:
                    raise Died
                return answer

            return call

        leave = StoreExchange.leave
        try:
            for which in original:
                setattr(StoreExchange, which, patched(which))
            StoreExchange.leave = lambda self: None  # type: ignore[method-assign]
            return [order_of(fn, *inputs(), deadline_s=SHORT_S)]
        finally:
            for which, function_ in original.items():
                setattr(StoreExchange, which, function_)
            StoreExchange.leave = leave  # type: ignore[method-assign]

    return case


CASES: dict[str, Callable[[int], list[Any]]] = {
    case.__name__: case
    for case in (
        plain,
        compute_differs,
        no_gather,
        extra_graph,
        alone_after,
        alone_after_with_another_skeleton,
        alone_and_broken,
        alone_before,
        too_late,
        other_order,
        threads,
        blocks,
        stages,
    )
}
CASES |= {f"raises in {hook}": raises(hook) for hook in HOOKS}
CASES |= {
    f"dies {'before' if before else 'after'} step {step}": dies(step, before=before)
    for step in range(1, STEPS + 1)
    for before in (True, False)
}
CASES["late"] = late
ON_FOUR_RANKS = (
    "compute_differs",
    "no_gather",
    "alone_after",
    "alone_after_with_another_skeleton",
    "blocks",
    "stages",
    "raises in overlap_adjust_plan",
    "dies before step 2",
    "dies after step 4",
)
"""A quarter of the cases; two ranks are enough for what the others show."""


def play(rank: int, world_size: int, name: str) -> list[Any]:
    """Run one case; ranks meet behind it, as a job's next step would make them."""
    result = CASES[name](rank)
    dist.barrier()
    return result
