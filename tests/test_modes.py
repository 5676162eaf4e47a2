"""Each mode on real compiled models in real processes, two and four gloo ranks.

Outputs and gradients must be equal bit for bit with the pass off, and the ranks must issue their
collectives in one order at run time.
"""

from __future__ import annotations

from typing import Any

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
    run_ranks,
    shard_module,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(800)]

LENGTHS = (24, 24)
EXPECTED = {"none": "identical", "compute": "slot", "skeleton": "pinned", "count": "abort"}


@frozen(kw_only=True)
class Seen:
    """What one rank saw, as plain data."""

    modes: tuple[str, ...]
    whys: tuple[str, ...]
    committed: tuple[bool, ...]
    hoisted: int
    legal: bool
    not_worse: bool
    outputs_equal: bool
    gradients_equal: bool
    gradients: int
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    fingerprints: tuple[str, ...]


def run_both_ways(
    rank: int,
    world_size: int,
    diverge: str,
    train: bool,
    lengths: tuple[int, ...],
    split: bool,
    modulation: bool = False,
) -> Seen:
    """Compile and run in program order, then with the pass, on the same weights and input."""
    if world_size == 2:
        mesh = init_device_mesh("cpu", (2,))
        sharded, context = mesh, mesh
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "cp"))
        sharded, context = mesh["fsdp"], mesh["cp"]
    sizes = TransformerConfig(
        n_blocks=1,
        dim=64,
        ffn_dim=128,
        modulation=modulation,
        diverge=diverge,  # type: ignore[arg-type]
    )
    model = Transformer(sizes, context.get_group())
    shard_module(model, sharded, reshard_after_forward=True)
    place = context.get_local_rank()
    inputs: list[Any] = [example_input(sizes, list(lengths), place)]
    dynamic = split or diverge == "compute"
    if split:
        inputs.append(list(lengths))

    def run(**options: Any) -> tuple[torch.Tensor, list[torch.Tensor], tuple[Any, ...]]:
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, **options)
        result, gradients = None, []
        for _ in range(2):  # the first call compiles, and ranks negotiate
            model.zero_grad()
            with CollectiveRecorder() as recorder, torch.set_grad_enabled(train):
                result = compiled(*inputs)
                if train:
                    result.square().mean().backward()
        if train:
            gradients = [p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[union-attr]
        assert result is not None
        return result.detach(), gradients, tuple(recorder.shared())

    # torch's caches on disk can give one rank an artifact with the group names of another.
    expected, expected_gradients, before = run(options={"fx_graph_cache": False})
    # Estimated costs are the same each time; measured ones have tests of their own.
    config = oc.OverlapConfig(costs="analytical")
    result, gradients, after = run(options=oc.inductor_options(config))
    reports = oc.reports()
    return Seen(
        modes=tuple(str(report.mode) for report in reports),
        whys=tuple(report.why for report in reports),
        committed=tuple(report.committed for report in reports),
        hoisted=sum(report.hoisted for report in reports),
        legal=all(report.legal for report in reports),
        not_worse=all(r.exposed_ns_after <= r.exposed_ns_before for r in reports),
        outputs_equal=torch.equal(expected, result),
        gradients_equal=all(map(torch.equal, expected_gradients, gradients)),
        gradients=len(gradients),
        before=before,
        after=after,
        fingerprints=tuple(report.fingerprint for report in reports),
    )


def check(results: list[Seen], *modes: str) -> None:
    """All ranks agree, and each graph ended in the given mode."""
    for seen in results:
        assert seen.modes == modes, seen.whys
        assert seen.outputs_equal
        assert seen.gradients_equal
        assert seen.legal
        assert seen.not_worse
        assert seen.committed == tuple(mode != "abort" for mode in modes)
        assert seen.after == results[0].after
        assert (seen.hoisted > 0) == any(seen.committed)
    assert len({seen.whys for seen in results}) == 1
    if {"pinned", "abort"}.issuperset(modes):
        assert results[0].after == results[0].before


@pytest.mark.parametrize("diverge", ["none", "compute", "skeleton", "count"])
def test_a_training_step_on_two_ranks(diverge: str) -> None:
    results = run_ranks(run_both_ways, 2, diverge, True, LENGTHS, False, deadline_s=300, tries=3)
    assert all(seen.gradients > 0 for seen in results)
    # The extra gather of `count` is not needed in backward.
    backward = "slot" if diverge == "count" else EXPECTED[diverge]
    check(results, EXPECTED[diverge], backward)


@pytest.mark.parametrize("diverge", ["none", "compute", "skeleton", "count"])
def test_two_by_two_ranks(diverge: str) -> None:
    """Weights are gathered along one axis of the mesh, attention runs along the other."""
    results = run_ranks(run_both_ways, 4, diverge, False, LENGTHS, False, deadline_s=380, tries=3)
    check(results, EXPECTED[diverge])


def test_uneven_splits_are_one_graph_with_other_symbols() -> None:
    results = run_ranks(run_both_ways, 2, "none", False, (24, 23), True, deadline_s=300, tries=3)
    check(results, "identical")
    assert len({seen.fingerprints for seen in results}) == 1


def test_a_specialized_length_is_another_graph_with_the_same_skeleton() -> None:
    """A local length of 1 makes one rank's graph static."""
    results = run_ranks(run_both_ways, 2, "none", False, (24, 1), True, deadline_s=300, tries=3)
    check(results, "slot")
    assert len({seen.fingerprints for seen in results}) == 2


def test_a_parameter_that_only_one_rank_holds() -> None:
    """Its shard is empty elsewhere and padded there, so graphs differ and gathers do not."""
    results = run_ranks(
        run_both_ways, 2, "none", True, LENGTHS, False, True, deadline_s=300, tries=3
    )
    check(results, "slot", "identical")  # the backward is one graph again
