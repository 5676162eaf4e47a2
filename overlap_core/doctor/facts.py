"""Facts about one rank, as plain data that its peers can read."""

from __future__ import annotations

import json
from collections.abc import Mapping  # noqa: TC003  cattrs reads the annotations

import cattrs
from attrs import asdict, field, frozen

__all__ = ["PlanFacts", "RankFacts", "facts_from_text", "facts_to_text", "version_in_text"]


@frozen(kw_only=True)
class PlanFacts:
    """One plan file of this rank."""

    setting: str
    """Name of its folder: a digest of all that must not change between two starts."""
    name: str
    """Given by the cold start that began it; equal on all ranks that may start warm together."""
    world_size: str


@frozen(kw_only=True)
class RankFacts:
    """What one process knows of itself. Nothing in it is judged."""

    rank: int = 0
    overlap_core: str = ""
    python: str = ""
    torch: str = ""
    """Its version; empty: torch cannot be imported."""
    torch_wanted: str = ""
    """Which releases are supported, such as ">=2.11,<2.15"."""
    torch_fault: str = ""
    """Why the part of overlap_core that uses torch's inside cannot be imported."""
    names_missing: tuple[str, ...] = ()
    """Private names that this torch lacks, each with its purpose."""
    environment: Mapping[str, str] = field(factory=dict)
    """Variables whose names begin with OVERLAP_CORE."""
    plugins: tuple[str, ...] = ()
    """Names and versions in calling order."""
    plugin_faults: tuple[str, ...] = ()
    """Why plugins cannot be used; then `plugins` is empty."""
    plugin_notes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    """Registered ops, each with what is declared."""
    ops_communicating: int = 0
    """How many of them are declared to communicate inside."""
    ops_digest: str = ""
    ops_unknown: tuple[str, ...] = ()
    """About registered names that torch doesn't know, with what to do."""
    config: str = ""
    """Digest of the configuration."""
    switches: Mapping[str, bool] = field(factory=dict)
    """Settings of torch's compiler, by their own names; those that this torch lacks are left out.
    """
    reorder_passes: tuple[str, ...] = ()
    """Passes that are configured in Inductor and would run before ours."""
    warm_start: bool = True
    plan_folder: str = ""
    plan_folder_fault: str = ""
    plans: tuple[PlanFacts, ...] = ()
    plans_broken: tuple[str, ...] = ()
    distributed: bool = True
    """Whether this torch was built with torch.distributed."""
    backends: tuple[str, ...] = ()
    """Of torch.distributed, such as "gloo"."""
    gpus: tuple[str, ...] = ()
    """Name of each GPU that this process sees."""
    process_group: str = ""
    """The backend of the initialized process group; empty: there is none."""
    world_size: int = 1


def facts_to_text(facts: RankFacts) -> str:
    """One rank's facts as it sends them."""
    return json.dumps({"overlap_core": facts.overlap_core, "facts": asdict(facts)})


def version_in_text(text: str | bytes) -> str:
    """Which overlap_core sent this; it may be one whose facts look otherwise."""
    return str(json.loads(text)["overlap_core"])


def facts_from_text(text: str | bytes) -> RankFacts:
    """The facts that a rank of the same version sent."""
    return _converter.structure(json.loads(text)["facts"], RankFacts)


_converter = cattrs.Converter(forbid_extra_keys=True)
