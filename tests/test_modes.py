"""Each mode on real compiled models in real processes, two and four gloo ranks.

Outputs and gradients must be equal bit for bit with the pass off, and the ranks must issue their
collectives in one order at run time. All cases of one number of ranks run in the same processes,
each as a job of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlap_core as oc
from overlap_core.session import session
from overlap_core.testing import (
    CollectiveRecorder,
    Diverge,
    Transformer,
    TransformerConfig,
    example_input,
    run_ranks,
    shard_module,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(800)]

EXPECTED = {"none": "identical", "compute": "slot", "skeleton": "pinned", "count": "abort"}


@frozen(kw_only=True)
class Case:
    """One model and how it runs."""

    diverge: Diverge = "none"
    train: bool = False
    lengths: tuple[int, int] = (24, 24)
    """Along the axis on which attention runs."""
    split: bool = False
    """Whether the model gets the lengths as an input."""
    modulation: bool = False


TRAINING = {f"training, {diverge}": Case(diverge=diverge, train=True) for diverge in EXPECTED}
INFERENCE = {f"inference, {diverge}": Case(diverge=diverge) for diverge in EXPECTED}
CASES = {
    2: {
        **TRAINING,
        "uneven": Case(lengths=(24, 23), split=True),
        "specialized": Case(lengths=(24, 1), split=True),
        "one rank's parameter": Case(train=True, modulation=True),
    },
    4: INFERENCE,
}
"""By number of ranks."""


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


def run_case(case: Case, sharded: DeviceMesh, context: DeviceMesh, plan_dir: str) -> Seen:
    """Compile and run in program order, then with the pass, on the same weights and input."""
    sizes = TransformerConfig(
        n_blocks=1, dim=64, ffn_dim=128, modulation=case.modulation, diverge=case.diverge
    )
    model = Transformer(sizes, context.get_group())
    shard_module(model, sharded, reshard_after_forward=True)
    inputs: list[Any] = [example_input(sizes, list(case.lengths), context.get_local_rank())]
    dynamic = case.split or case.diverge == "compute"
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
    expected, expected_gradients, before = run(options={"fx_graph_cache": False})
    # Estimated costs are the same each time; measured ones have tests of their own.
    config = oc.OverlapConfig(costs="analytical", plan_dir=plan_dir)
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


def run_cases(rank: int, world_size: int) -> dict[str, Seen]:
    """Every case for this number of ranks; none knows what was agreed in another."""
    if world_size == 2:
        sharded = context = init_device_mesh("cpu", (2,))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "cp"))
        sharded, context = mesh["fsdp"], mesh["cp"]
    seen = {}
    for name, case in CASES[world_size].items():
        session.reset()
        plan_dir = str(Path(os.environ["OVERLAP_CORE_PLAN_DIR"], name))
        seen[name] = run_case(case, sharded, context, plan_dir)
    return seen


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Seen]]:
    return run_ranks(run_cases, 2, deadline_s=700, tries=3)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Seen]]:
    # Coverage of two ranks is enough: it makes a compile half as long again.
    env = {"COVERAGE_PROCESS_CONFIG": ""}
    return run_ranks(run_cases, 4, deadline_s=700, env=env, tries=3)


def check(ranks: list[dict[str, Seen]], name: str, *modes: str) -> list[Seen]:
    """All ranks agree, and each graph of a case ended in the given mode; what they saw."""
    results = [rank[name] for rank in ranks]
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
    return results


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_step_on_two_ranks(two_ranks: list[dict[str, Seen]], name: str) -> None:
    diverge = TRAINING[name].diverge
    # The extra gather of `count` is not needed in backward.
    backward = "slot" if diverge == "count" else EXPECTED[diverge]
    results = check(two_ranks, name, EXPECTED[diverge], backward)
    assert all(seen.gradients > 0 for seen in results)


@pytest.mark.parametrize("name", INFERENCE)
def test_two_by_two_ranks(four_ranks: list[dict[str, Seen]], name: str) -> None:
    """Weights are gathered along one axis of the mesh, attention runs along the other."""
    check(four_ranks, name, EXPECTED[INFERENCE[name].diverge])


def test_uneven_splits_are_one_graph_with_other_symbols(two_ranks: list[dict[str, Seen]]) -> None:
    results = check(two_ranks, "uneven", "identical")
    assert len({seen.fingerprints for seen in results}) == 1


def test_a_specialized_length_is_another_graph_with_the_same_skeleton(
    two_ranks: list[dict[str, Seen]],
) -> None:
    """A local length of 1 makes one rank's graph static."""
    results = check(two_ranks, "specialized", "slot")
    assert len({seen.fingerprints for seen in results}) == 2


def test_a_parameter_that_only_one_rank_holds(two_ranks: list[dict[str, Seen]]) -> None:
    """Its shard is empty elsewhere and padded there, so graphs differ and gathers do not."""
    # The backward is one graph again.
    check(two_ranks, "one rank's parameter", "slot", "identical")
