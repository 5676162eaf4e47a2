"""Facts of a rank where all is well, to be changed one at a time."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from overlap_core.doctor.facts import RankFacts

__all__ = ["kinds", "rank"]

_HEALTHY = RankFacts(
    overlap_core="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    torch_wanted=">=2.11,<2.15",
    plugins=("cp_attention 0.1.0", "replay 0.1.0"),
    ops=("mylib::attn (communicates) by cp_attention", "mylib::mm"),
    ops_communicating=1,
    ops_digest="c0ffee",
    config="d1ce",
    switches={
        "deterministic": False,
        "enable_autograd_cache": True,
        "fx_graph_cache": True,
    },
    plan_folder="/plans",
    backends=("gloo", "nccl"),
    gpus=("NVIDIA H200", "NVIDIA H200"),
)


def rank(number: int = 0, *, on: str = "", **changes: Any) -> RankFacts:
    """A rank's facts; `on` names a compiler switch that is on."""
    if on:
        changes["switches"] = {**_HEALTHY.switches, on: True}
    return evolve(_HEALTHY, rank=number, **changes)


def kinds(findings: Any) -> list[str]:
    """The kinds of some findings, in order."""
    return [finding.kind for finding in findings]
