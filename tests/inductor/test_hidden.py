"""The search for ops that communicate although nobody said so, where a call can't be tried."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import overlap_core as oc

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSES = "reorder_for_compute_comm_overlap_passes"


opaque_base = pytest.importorskip(
    "torch._opaque_base", reason="this torch has no op arguments that can't be described"
)


class Stop(BaseException):
    """Ends a compile behind the pass."""


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def communicates(name: str) -> Any:
    """A new custom op that communicates and tells nobody: what was seen of one is remembered."""

    @torch.library.custom_op(f"overlap_hidden_tests::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    op.register_fake(torch.empty_like)
    return op


class Factor(opaque_base.OpaqueBase):
    """A constant of a type that no generic value can stand for."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factor) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Factor({self.value})", {"Factor": Factor}


torch._library.opaque_object.register_opaque_type(Factor, typ="value")


@torch.library.custom_op("overlap_hidden_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Communicates with nobody."""
    return x * factor.value


@scaled.register_fake
def _(x: torch.Tensor, factor: Factor) -> torch.Tensor:
    return torch.empty_like(x)


def gather(shard: torch.Tensor) -> torch.Tensor:
    launched = torch.ops._c10d_functional.all_gather_into_tensor(shard, 1, "0")
    return torch.ops._c10d_functional.wait_tensor(launched)


# Of other shapes: a call that was looked at once is known.
@pytest.mark.parametrize(("place", "rows"), [("before", 8), ("after", 16)])
@pytest.mark.usefixtures("_one_rank")
def test_an_op_whose_call_cannot_be_described_is_passed_over(
    place: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes over nothing from the op before, and the op after it is searched all the same."""
    op = communicates(f"sends_{place}")

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x @ gather(w)
        factor = Factor(0.5)
        return op(scaled(x, factor)) if place == "before" else scaled(op(x), factor)

    def stop(snodes: list[Any]) -> list[Any]:
        raise Stop

    options = oc.inductor_options(oc.OverlapConfig(costs="measured"))
    options[PASSES].append(stop)
    with (
        caplog.at_level(logging.DEBUG, "overlap_core"),
        pytest.raises(Stop),
        torch.no_grad(),
    ):
        torch.compile(fn, fullgraph=True, options=options)(torch.ones(rows, 8), torch.ones(8, 8))
    assert "overlap_hidden_tests::scaled could not be replayed: ReplayError" in caplog.text
    report = oc.reports()[-1]
    assert str(report.mode) == "identical", report.why
    opaque = [entry.op for entry in report.skeleton if "hidden_tests" in entry.op]
    assert opaque == [f"overlap_hidden_tests.sends_{place}.default"]
    assert not any("::scaled communicates" in note for note in report.notes)
