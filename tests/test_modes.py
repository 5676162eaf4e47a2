"""Each mode on real compiled models in real processes, two and four gloo ranks.

Outputs and gradients must be equal bit for bit with the pass off, and the ranks must issue their
collectives in one order at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlap_core as oc
from overlap_core.inductor.versions import SIMPLE_OVERLAP_KEY, has_config_key
from overlap_core.testing import (
    CollectiveRecorder,
    Diverge,
    Transformer,
    TransformerConfig,
    example_input,
    shard_module,
)

if TYPE_CHECKING:
    from overlap_core.testing import RunRanks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

EXPECTED: dict[Diverge, str] = {
    "none": "identical",
    "compute": "slot",
    "skeleton": "pinned",
    "count": "abort",
}


@frozen(kw_only=True)
class Case:
    """One model and how it runs."""

    diverge: Diverge = "none"
    train: bool = False
    lengths: tuple[int, int] = (24, 24)
    """Along the axis on which attention runs."""
    split: bool = False
    """Whether the model gets the lengths as an input."""
    static: bool = False
    """Whether lengths are constants of the graph."""
    visible: bool = False
    """Whether the all-to-alls of attention are in the graph."""
    modulation: bool = False


TRAINING = {f"training, {diverge}": Case(diverge=diverge, train=True) for diverge in EXPECTED}
INFERENCE = {f"inference, {diverge}": Case(diverge=diverge) for diverge in EXPECTED}


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


def run_case(rank: int, world_size: int, case: Case) -> Seen:
    """Compile and run in program order, then with the pass, on the same weights and input."""
    sharded, context = meshes(world_size)
    sizes = TransformerConfig(
        n_blocks=1,
        dim=64,
        ffn_dim=128,
        modulation=case.modulation,
        opaque_attention=not case.visible,
        diverge=case.diverge,
    )
    model = Transformer(sizes, context.get_group())
    shard_module(model, sharded, reshard_after_forward=True)
    inputs: list[Any] = [example_input(sizes, list(case.lengths), context.get_local_rank())]
    dynamic = not case.static and (case.split or case.diverge == "compute")
    if case.split:
        inputs.append(list(case.lengths))

    def run(**options: Any) -> tuple[torch.Tensor, list[torch.Tensor], tuple[Any, ...]]:
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, **options)
        result, gradients = None, []
        for _ in range(2):  # the first call compiles, and ranks negotiate
            model.zero_grad()
            with CollectiveRecorder() as recorder, torch.set_grad_enabled(case.train):
                result = compiled(*inputs)
                if case.train:
                    result.square().mean().backward()
        if case.train:
            gradients = [p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[union-attr]
        assert result is not None
        return result.detach(), gradients, tuple(recorder.shared())

    # torch's caches on disk can give one rank an artifact with the group names of another.
    # And on torch 2.14 Inductor would hoist gathers itself.
    off: dict[str, Any] = {"fx_graph_cache": False}
    if has_config_key(SIMPLE_OVERLAP_KEY):
        off[SIMPLE_OVERLAP_KEY] = False
    expected, expected_gradients, before = run(options=off)
    # Estimated costs are the same each time; measured ones have tests of their own.
    config = oc.OverlapConfig(costs="analytical", recompile_deadline_s=300)
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


def meshes(world_size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Along which weights are sharded, and along which attention runs."""
    if world_size == 2:
        mesh = init_device_mesh("cpu", (2,))
        return mesh, mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "cp"))
    return mesh["fsdp"], mesh["cp"]


def check(results: list[Seen], *modes: str) -> None:
    """All ranks agree, and each graph of a case ended in the given mode."""
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


def run(pooled_ranks: RunRanks, world_size: int, case: Case) -> list[Seen]:
    return pooled_ranks(run_case, world_size, case, deadline_s=700, tries=3)


@pytest.mark.parametrize("diverge", EXPECTED)
def test_a_training_step_on_two_ranks(pooled_ranks: RunRanks, diverge: Diverge) -> None:
    # The extra gather of `count` is not needed in backward.
    backward = "slot" if diverge == "count" else EXPECTED[diverge]
    results = run(pooled_ranks, 2, Case(diverge=diverge, train=True))
    check(results, EXPECTED[diverge], backward)
    assert all(seen.gradients > 0 for seen in results)


@pytest.mark.parametrize(
    "diverge",
    [
        pytest.param("none", marks=pytest.mark.full),
        "compute",
        pytest.param("skeleton", marks=pytest.mark.full),
        pytest.param("count", marks=pytest.mark.full),
    ],
)
def test_two_by_two_ranks(pooled_ranks: RunRanks, diverge: Diverge) -> None:
    """Weights are gathered along one axis of the mesh, attention runs along the other."""
    check(run(pooled_ranks, 4, Case(diverge=diverge)), EXPECTED[diverge])


def test_uneven_splits_are_one_graph_with_other_symbols(pooled_ranks: RunRanks) -> None:
    results = run(pooled_ranks, 2, Case(lengths=(24, 23), split=True))
    check(results, "identical")
    assert len({seen.fingerprints for seen in results}) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(24, 16), split=True, static=True, train=True),
        Case(lengths=(24, 16), split=True, static=True, visible=True),
    ],
    ids=["an opaque op, training", "all-to-alls in the graph"],
)
def test_uneven_splits_at_fixed_lengths_are_one_graph_too(
    pooled_ranks: RunRanks, case: Case
) -> None:
    results = run(pooled_ranks, 2, case)
    check(results, *["identical"] * (1 + case.train))
    assert len({seen.fingerprints for seen in results}) == 2


def test_a_specialized_length_is_another_graph_with_the_same_skeleton(
    pooled_ranks: RunRanks,
) -> None:
    """A local length of 1 makes one rank's graph static."""
    results = run(pooled_ranks, 2, Case(lengths=(24, 1), split=True))
    check(results, "slot")
    assert len({seen.fingerprints for seen in results}) == 2


def test_a_parameter_that_only_one_rank_holds(pooled_ranks: RunRanks) -> None:
    """Its shard is empty elsewhere and padded there, so graphs differ and gathers do not."""
    # The backward is one graph again.
    results = run(pooled_ranks, 2, Case(train=True, modulation=True))
    check(results, "slot", "identical")
