"""How kernels are compiled to be timed. No GPU here: a stand-in for Inductor's scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.codecache import LambdaFuture

from overlap_core.inductor import kernels
from overlap_core.inductor.kernels import compile_kernels

from ..virtual_clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting Inductor's pool takes seconds, and nothing here is given to it."""
    monkeypatch.setattr(kernels, "_await_pool", lambda timeout_s: None)


class Kernel:
    """What a module's `triton_` is, as far as it is used."""

    mutated_arg_names: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self.compiled_here = False

    def precompile(self) -> None:
        self.compiled_here = True

    def clone_args(self, *args: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, Any]]:
        return [arg.clone() for arg in args], {}


def node(compile_kernel: Callable[[], Any]) -> Any:
    """A scheduler node whose kernel is compiled by a function."""
    scheduler = SimpleNamespace(compile_kernel=lambda nodes: compile_kernel())
    return SimpleNamespace(scheduler=scheduler, get_nodes=list)


def pooled(name: str, *, done: bool = True) -> Any:
    """A node whose kernel a pool compiles, or is still compiling."""
    task: Future[None] = Future()
    if done:
        task.set_result(None)
    future = LambdaFuture(lambda: Kernel(f"{name} of the pool"), future=task)
    return node(lambda: (future, SimpleNamespace(triton_=Kernel(f"{name} of this process"))))


def test_what_the_pool_compiled_is_not_compiled_again() -> None:
    compiled = compile_kernels({"a": pooled("a"), "b": pooled("b")}, clock=VirtualClock())
    assert [m.triton_.name for m in compiled.modules.values()] == ["a of the pool", "b of the pool"]
    assert compiled.missing == {}


def test_a_kernel_that_is_late_is_left_out() -> None:
    nodes = {"late": pooled("late", done=False), "a": pooled("a")}
    compiled = compile_kernels(nodes, budget_s=0.2, clock=VirtualClock())
    assert list(compiled.modules) == ["a"]
    assert compiled.missing == {
        "late": "Inductor compiled it no sooner than 0.2 s, with other kernels to time"
    }


def test_without_a_pool_kernels_are_compiled_here_as_long_as_there_is_time() -> None:
    modules = [SimpleNamespace(triton_=Kernel(str(i))) for i in range(3)]
    clock = VirtualClock()

    def slowly(number: int) -> Any:
        clock.sleep(4)
        return None, modules[number]

    nodes = {str(i): node(lambda i=i: slowly(i)) for i in range(3)}
    compiled = compile_kernels(nodes, budget_s=6, clock=clock)
    assert list(compiled.modules) == ["0", "1"]
    assert [module.triton_.compiled_here for module in modules] == [True, True, False]
    assert "no sooner than 6 s" in compiled.missing["2"]


def test_a_kernel_that_fails_is_left_out_with_the_reason() -> None:
    def fails() -> Any:
        raise RuntimeError("no such layout\nand more")

    def fails_in_the_pool() -> Any:
        task: Future[None] = Future()
        task.set_result(None)
        return LambdaFuture(fails, future=task), SimpleNamespace()

    compiled = compile_kernels(
        {"a": node(fails), "b": node(fails_in_the_pool), "c": pooled("c")}, clock=VirtualClock()
    )
    assert list(compiled.modules) == ["c"]
    assert compiled.missing == dict.fromkeys("ab", "Inductor's benchmark failed: no such layout")


def test_kernels_are_not_compiled_again_for_occupancy() -> None:
    seen: list[bool] = []

    def look() -> Any:
        seen.append(inductor_config.dynamic_scale_rblock)
        return None, SimpleNamespace(triton_=Kernel("a"))

    before = inductor_config.dynamic_scale_rblock
    compile_kernels({"a": node(look)}, clock=VirtualClock())
    assert seen == [False]
    assert inductor_config.dynamic_scale_rblock == before


@pytest.mark.parametrize("mutates", [False, True])
def test_a_kernel_is_timed_on_copies_of_what_it_changes(mutates: bool) -> None:
    kernel = Kernel("a")
    kernel.mutated_arg_names = ("in_out_ptr0",) if mutates else ()
    changed = torch.zeros(4)
    module = SimpleNamespace(
        triton_=kernel, get_args=lambda: (changed,), call=lambda args: args[0].add_(1)
    )
    compiled = compile_kernels({"a": node(lambda: (None, module))}, clock=VirtualClock())
    assert compiled.time("a", "cpu", None) > 0
    assert (changed.sum() == 0) == mutates
