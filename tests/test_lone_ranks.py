"""A rank that compiles alone keeps to what its peers run, on real ranks.

Each job runs a sequence of training steps twice: without the pass, and with it, where ranks compile
some of them alone. No deadline is short enough to be waited out.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from attrs import evolve, frozen
from torch import nn
from torch._dynamo.precompile_context import PrecompileContext
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.errors import DivergenceError
from overlap_core.host import PluginHost
from overlap_core.inductor import adapter
from overlap_core.inductor.install import _compose
from overlap_core.inductor.overlap_pass import OverlapPass
from overlap_core.inductor.versions import SIMPLE_OVERLAP_KEY, has_config_key
from overlap_core.testing import run_ranks, shard_module

from .pipeline_views import Failing
from .virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

OPS = torch.ops._c10d_functional
DIM = 64
SOON_S = 120.0
"""No negotiation waits for its deadline, which is later."""
CONFIG = oc.OverlapConfig(costs="analytical", recompile_deadline_s=300)


def define_exchange() -> None:
    """An op that communicates inside, the same bytes whatever its input's length is."""
    if hasattr(torch.ops.lone, "exchange"):
        return

    @oc.register_custom_op("lone::exchange", has_internal_collective=True)
    def exchange(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        return x + mean

    exchange.register_fake(torch.empty_like)
    exchange.register_autograd(lambda ctx, grad: torch.ops.lone.exchange(grad))


class Block(nn.Module):
    """Two layers around an op that communicates; the second one's gather can move past it."""

    def __init__(self, mine: dist.ProcessGroup, *, parallel: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.second = nn.Linear(DIM, DIM, bias=False)
        self.mine = mine
        self.parallel = parallel
        """Whether each rank of `mine` gets a part of the sequence."""

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        if self.parallel:
            x = funcol.all_gather_tensor_autograd(x, 0, self.mine)
        x = torch.relu(self.first(x))
        if extra:
            x = x + funcol.all_reduce(x.detach(), "sum", self.mine)
        x = self.second(torch.ops.lone.exchange(x))
        if self.parallel:
            x = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, self.mine)
        return x


@frozen(kw_only=True)
class Seen:
    """What one rank saw, as plain data."""

    equal: bool
    """Outputs and gradients of all steps are those without the pass."""
    modes: tuple[str, ...]
    hoisted: tuple[int, ...]
    alone: tuple[bool, ...]
    gathers: tuple[int, ...]
    """Weight gathers of each graph."""
    notes: tuple[tuple[str, ...], ...]
    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    calls: tuple[tuple[int, ...], ...]
    """Sizes of the coalesced calls."""
    """Ops that communicate, in program order and as they are issued."""


def without_pass() -> dict[str, Any]:
    """Options for a baseline, where Inductor's own reorderings part no ranks."""
    options: dict[str, Any] = {
        "fx_graph_cache": False,
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
    }
    if has_config_key(SIMPLE_OVERLAP_KEY):
        options[SIMPLE_OVERLAP_KEY] = False
    return options


def step(model: Any, call: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs and gradients of one training step."""
    for parameter in model.parameters():
        parameter.grad = None
    x = call[0].clone().requires_grad_()
    out = model(x, *call[1:])
    out.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [out.detach(), *(getattr(grad, "_local_tensor", grad) for grad in grads)]


def compare(
    model: nn.Module,
    calls: Sequence[Sequence[Any]],
    dynamic: bool | None = False,
    options: dict[str, Any] | None = None,
    before: Callable[[int], None] = lambda number: None,
) -> Seen:
    """Run the calls without the pass and with it.

    Args:
        model, dynamic: what is compiled.
        calls: arguments of each step.
        options: that install the pass; None: with the default plugins.
        before: called with the number of each step before it, when the pass is on.
    """

    def run(options: dict[str, Any], before: Callable[[int], None]) -> list[list[torch.Tensor]]:
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, options=options)
        found = []
        for number, call in enumerate(calls):
            before(number)
            found.append(step(compiled, call))
        return found

    plain = run(without_pass(), lambda number: None)
    found = run(oc.inductor_options(CONFIG) if options is None else options, before)
    return seen(all(all(map(torch.equal, a, b)) for a, b in zip(plain, found, strict=True)))


def seen(equal: bool) -> Seen:
    reports = oc.reports()

    def ops(report: oc.Report, names: Sequence[str]) -> tuple[str, ...]:
        graph = report.graph
        return tuple(graph.nodes[graph.index[name]].op.split(".")[1] for name in names)

    return Seen(
        equal=equal,
        modes=tuple(str(r.mode) for r in reports),
        hoisted=tuple(r.hoisted for r in reports),
        alone=tuple(any("compiled alone" in note for note in r.notes) for r in reports),
        gathers=tuple(len(r.gathers) for r in reports),
        notes=tuple(r.notes for r in reports),
        before=tuple(ops(r, [entry.node for entry in r.skeleton]) for r in reports),
        after=tuple(ops(r, r.collectives) for r in reports),
        calls=tuple(tuple(len(call.launches) for call in r.coalesced) for r in reports),
    )


def place(rank: int, world_size: int) -> tuple[dist.ProcessGroup, bool]:
    """The rank's replica, of which there are two, and whether it is the one that goes alone."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replica", "inside"))
    return mesh["inside"].get_group(), rank >= world_size // 2


def make(world_size: int, mine: dist.ProcessGroup, **options: Any) -> nn.Module:
    define_exchange()
    torch.manual_seed(0)
    block = Block(mine, **options)
    mesh = init_device_mesh("cpu", (world_size,))
    return shard_module(block, mesh, reshard_after_forward=True)


def check(results: list[Seen], lone: Sequence[int]) -> None:
    """Gathers moved, and the ranks that compiled alone followed."""
    for rank, found in enumerate(results):
        assert found.equal
        assert set(found.modes) == {"identical"}
        assert found.after[:2] != found.before[:2]
        assert found.alone == (False, False) + (True, True) * (rank in lone)


def one_more_all_reduce(rank: int, world_size: int) -> Seen:
    mine, alone = place(rank, world_size)
    model = make(world_size, mine)
    x = torch.randn(24, DIM)
    return compare(model, [(x, False), (x, alone), (x, False)])


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_more_collective_on_a_group_of_its_own(pooled_ranks: RunRanks, world_size: int) -> None:
    results = pooled_ranks(one_more_all_reduce, world_size, deadline_s=SOON_S)
    check(results, range(world_size // 2, world_size))


def another_length(rank: int, world_size: int, dynamic: bool | None) -> Seen:
    mine, alone = place(rank, world_size)
    model = make(world_size, mine, parallel=True)
    x, longer = torch.randn(24, DIM), torch.randn(40, DIM)
    return compare(model, [(x,), (longer if alone else x,), (x,)], dynamic)


@pytest.mark.parametrize(
    ("world_size", "dynamic"),
    [(2, False), (2, None), (4, False), pytest.param(4, None, marks=pytest.mark.full)],
)
def test_another_length_of_a_gathered_input(
    pooled_ranks: RunRanks, world_size: int, dynamic: bool | None
) -> None:
    results = pooled_ranks(another_length, world_size, dynamic, deadline_s=SOON_S)
    check(results, range(world_size // 2, world_size))
    for found in results:
        assert set(found.gathers) == {2}


PLUGIN = """
import os
from overlap_core import hookimpl

@hookimpl
def overlap_classify_node(node):
    if os.environ.get("LONE_PLUGIN") == "raises":
        raise ValueError("no such shape")
"""


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """A plugin as pip leaves it, in a folder of its own."""
    info = folder / "lone_plugin-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / "lone_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lone-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[overlap_core]\nlone = lone_plugin\n")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("lone_plugin", None)
        os.environ.pop("LONE_PLUGIN", None)


def at_fault(rank: int, world_size: int, fault: str, folder: str) -> Seen:
    """Another length on some ranks, and there something fails."""
    mine, alone = place(rank, world_size)
    model = make(world_size, mine)
    x, longer = torch.randn(24, DIM), torch.randn(40, DIM)
    clock = VirtualClock()
    hook = Failing("overlap_classify_node", wait=lambda: clock.sleep(3600))

    def fail(*args: Any) -> None:
        raise ValueError("a size that cannot be read")

    def break_it(number: int) -> None:
        if number == 0 or not alone:
            return
        if fault == "plugin":
            os.environ["LONE_PLUGIN"] = "raises"
        elif fault == "hook is late":
            hook.active = True
        else:
            patch.setattr(adapter, "describe_work", fail)

    with pytest.MonkeyPatch.context() as patch, installed(Path(folder) / str(rank)):
        if fault == "hook is late":
            host = PluginHost.discover(CONFIG, plugins=(hook,), clock=clock)
            options = _compose(OverlapPass(CONFIG, host), {})
        else:
            options = oc.inductor_options(CONFIG)
        calls = [(x,), (longer if alone else x,), (x,)]
        return compare(model, calls, options=options, before=break_it)


@pytest.mark.parametrize(
    ("world_size", "fault"),
    [(2, "plugin"), (4, "plugin"), (2, "hook is late"), (2, "no description")],
)
def test_a_fault_of_the_new_shape_only(
    pooled_ranks: RunRanks, world_size: int, fault: str, tmp_path: Path
) -> None:
    results = pooled_ranks(at_fault, world_size, fault, str(tmp_path), deadline_s=SOON_S)
    lone = range(world_size // 2, world_size)
    check(results, lone)
    for rank in lone:
        for notes in results[rank].notes[2:]:
            assert any("costs and policies are left out" in note for note in notes), notes


class Specialized(nn.Module):
    """At length 1 the cast before the second gather becomes one kernel with an activation."""

    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = map(nn.Parameter, weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x + self.second) @ gather(self.first.bfloat16()).float()
        x = torch.ops.lone.exchange(x)
        return x @ gather(self.second.bfloat16()).float().t()


def gather(shard: torch.Tensor) -> torch.Tensor:
    return funcol.all_gather_tensor_autograd(shard, 0, dist.group.WORLD)


def length_one(rank: int, world_size: int, coalesce: int | str) -> Seen:
    define_exchange()
    torch.manual_seed(0)
    rows = DIM // world_size
    model = Specialized(
        torch.randn(DIM, DIM)[rank * rows :][:rows], torch.randn(world_size, DIM)[rank : rank + 1]
    )
    x, longer, one = (torch.randn(length, DIM) for length in (24, 40, 1))
    options = oc.inductor_options(evolve(CONFIG, coalesce=coalesce))
    return compare(model, [(x,), (longer,), (one if rank else x,), (x,)], None, options)


@pytest.mark.parametrize("coalesce", ["off", 1 << 20])
def test_a_length_that_torch_specializes(pooled_ranks: RunRanks, coalesce: int | str) -> None:
    results = pooled_ranks(length_one, 2, coalesce, deadline_s=SOON_S)
    for rank, found in enumerate(results):
        assert found.equal
        # Where torch specialized, the second gather is none of a weight.
        last = 1 if coalesce == "off" else 2
        assert found.gathers[::2] == ((2, 2), (2, 2, last))[rank]
        assert found.alone[::2] == ((False, True), (False, True, True))[rank]
        assert found.calls[::2] == (((2,) if coalesce != "off" else ()),) * (2 + rank)
        for before, after in zip(found.before[::2], found.after[::2], strict=True):
            assert before == ("all_gather_into_tensor", "exchange", "all_gather_into_tensor")
            assert after == ("all_gather_into_tensor", "all_gather_into_tensor", "exchange")


def layers(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Without a kernel of their own, whose compiler is slow."""
    return torch.ops.lone.exchange(x @ gather(first)) @ gather(second)


def text(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return layers(x, *weights)


def image(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return layers(x, *weights)


def two_functions(
    rank: int, world_size: int, folder: str
) -> tuple[bool, list[Any], list[bool], int]:
    """Outputs are equal, what was reported, and how often a cache had compiled code."""
    define_exchange()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    rows = DIM // world_size
    weights = [torch.randn(DIM, DIM)[rank * rows :][:rows] for _ in range(2)]
    calls = [(text, 512), (image, 768 if rank else 512)]
    inputs = [torch.randn(length, DIM, requires_grad=True) for _, length in calls]
    config = oc.OverlapConfig(costs="analytical", plan_dir=f"{folder}/plans")
    found = []
    for options in (without_pass(), oc.inductor_options(config)):
        torch.compiler.reset()
        compiled = {f: torch.compile(f, fullgraph=True, options=options) for f in (text, image)}
        found.append([compiled[f](x, *weights) for (f, _), x in zip(calls, inputs, strict=True)])
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    alone = [any("compiled alone" in note for note in r.notes) for r in oc.reports()]
    modes = [(str(r.mode), r.hoisted) for r in oc.reports()]
    return all(map(torch.equal, *found)), modes, alone, hits


def test_two_functions_of_equal_code(pooled_ranks: RunRanks, tmp_path: Path) -> None:
    for equal, modes, alone, hits in pooled_ranks(
        two_functions, 2, str(tmp_path), deadline_s=SOON_S
    ):
        assert equal
        assert modes == [("identical", 1)] * 2
        assert alone == [False, False]
        assert hits == 0


def packed(rank: int, world_size: int, folder: str, plans: str, how: str) -> Any:
    """One start of a job whose compiled code is kept by Dynamo, or saved or loaded by the user."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    define_exchange()
    torch.manual_seed(0)
    rows = DIM // world_size
    weights = [torch.randn(DIM, DIM)[rank * rows :][:rows] for _ in range(2)]
    x = torch.randn(24, DIM, requires_grad=how == "keep")
    config = oc.OverlapConfig(costs="analytical", plan_dir=f"{folder}/{plans}{rank}")
    options = oc.inductor_options(config)
    file = Path(folder) / f"function{rank}"
    if how == "load":
        try:
            with file.open("rb") as saved:
                compiled = torch.compiler.load_compiled_function(saved)
        except DivergenceError as error:
            return str(error)
    else:
        compiled = torch.compile(text, fullgraph=True, dynamic=False, options=options)
    if how == "save":
        compiled = compiled.aot_compile(((x, *weights), {}))
        compiled.save_compiled_function(str(file))
    output = compiled(x, *weights)
    if how == "keep":
        PrecompileContext.save_to_dynamo_cache()
    plain = text(x, *weights)
    torch.testing.assert_close(output, plain)
    return {
        "found": counters["dynamo_cache"]["dynamo_cache_hit"],
        "modes": [str(r.mode) for r in oc.reports()],
        "alone": [any("compiled alone" in note for note in r.notes) for r in oc.reports()],
    }


def start(folder: Path, how: str, plans: str = "plans") -> list[Any]:
    env = {"TORCH_CACHING_PRECOMPILE": str(int(how == "keep"))}
    return run_ranks(packed, 2, str(folder), plans, how, deadline_s=SOON_S, env=env)


def test_code_that_dynamo_keeps(tmp_path: Path) -> None:
    for one in start(tmp_path, "keep"):
        assert one == {"found": 0, "modes": ["identical"], "alone": [False]}
    # One node is replaced: its ranks start with nothing, and all agree anew.
    shutil.rmtree(tmp_path / "cache1")
    shutil.rmtree(tmp_path / "plans1")
    for rank, one in enumerate(start(tmp_path, "keep")):
        assert one == {"found": 1 - rank, "modes": ["identical"], "alone": [False]}
    # Plans are lost, code is not.
    for one in start(tmp_path, "keep", "other"):
        assert one == {"found": 1, "modes": ["identical"], "alone": [False]}


@pytest.mark.full
def test_code_that_a_user_saves(tmp_path: Path) -> None:
    for one in start(tmp_path, "save"):
        assert one["modes"] == ["identical"]
    for one in start(tmp_path, "load"):
        assert one["modes"] == ["identical"]
    for one in start(tmp_path, "load", "other"):
        assert "compiled under a plan of overlap_core that the ranks do not share" in one
