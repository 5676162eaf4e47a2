"""Inductor's own reorderings left on, where they part two real ranks' orders of communication.

`reorder_for_locality` moves gathers across the attention op, over one gather on one rank and over
two on the other. Without overlap_core that hangs, so outputs are compared with a run in which both
of Inductor's reorderings are off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import frozen
from torch.distributed.device_mesh import init_device_mesh

import overlap_core as oc
from overlap_core.testing import (
    CollectiveRecorder,
    Transformer,
    TransformerConfig,
    example_input,
    shard_module,
)

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

LENGTHS = [1024, 1152]


@frozen(kw_only=True)
class Seen:
    """What one rank saw, as plain data."""

    mode: str
    why: str
    committed: bool
    legal: bool
    notes: tuple[str, ...]
    program: tuple[int | None, ...]
    """Captured places of the communication in the order that Inductor gave it."""
    after: tuple[Any, ...]
    before: tuple[Any, ...]
    outputs_equal: bool
    largest_difference: float


def run_with_reorderings(rank: int, world_size: int) -> Seen:
    """As `overlap-core demo --diverge compute` with one block, and nothing switched off."""
    mesh = init_device_mesh("cpu", (world_size,))
    sizes = TransformerConfig(n_blocks=1, diverge="compute")
    model = shard_module(Transformer(sizes, mesh.get_group()), mesh)
    inputs = (example_input(sizes, LENGTHS, rank), LENGTHS)

    def run(options: dict[str, Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=True, options=options)
        with torch.no_grad():
            compiled(*inputs)
            with CollectiveRecorder() as recorder:
                output = compiled(*inputs)
        return output, tuple(recorder.shared())

    off = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    expected, before = run({**off, "fx_graph_cache": False})
    output, after = run(oc.inductor_options(oc.OverlapConfig(costs="analytical")))
    report = oc.reports()[-1]
    assert report.graph is not None
    issuing = set(report.collectives)
    return Seen(
        mode=str(report.mode),
        why=report.why,
        committed=report.committed,
        legal=report.legal,
        notes=report.notes,
        program=tuple(node.captured for node in report.graph.nodes if node.name in issuing),
        after=after,
        before=before,
        outputs_equal=torch.equal(expected, output),
        largest_difference=(expected - output).abs().max().item(),
    )


def order_of(places: tuple[int | None, ...]) -> tuple[int, ...]:
    known = [place for place in places if place is not None]
    assert len(known) == len(places), "communication without a captured place"
    return tuple(sorted(known).index(place) for place in known)


def test_orders_that_inductor_parted_are_restored_and_gathers_still_move(
    pooled_ranks: RunRanks,
) -> None:
    results = pooled_ranks(run_with_reorderings, 2, tries=3)
    orders = [order_of(seen.program) for seen in results]
    assert orders[0] != orders[1], "Inductor no longer parts them: the test shows nothing"
    for seen in results:
        assert (seen.mode, seen.committed) == ("slot", True), seen.why
        assert seen.legal
        assert any("one order was restored" in note for note in seen.notes)
        assert seen.outputs_equal, seen.largest_difference
    assert results[0].after == results[1].after
    assert results[0].before == results[1].before
