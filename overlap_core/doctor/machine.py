"""What the facts of one rank mean, without looking at its peers. Pure functions."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from overlap_core.config import disabled_by_environment
from overlap_core.errors import ConfigError

from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .facts import RankFacts

__all__ = ["check_process_group", "check_rank", "check_world_size"]

_VARIABLES = ("OVERLAP_CORE", "OVERLAP_CORE_DISABLE_PLUGINS", "OVERLAP_CORE_PLAN_DIR")
_GROUPING_PASS = "enforce_comm_ordering_for_fsdp"
_OPTIMIZATIONS = "aten_distributed_optimizations"


def check_rank(facts: RankFacts) -> tuple[Finding, ...]:
    """All findings about one rank, in the order in which a user should read them."""
    checks = [_check_torch, _check_environment, _check_plugins, _check_ops, _check_devices]
    if not facts.torch_fault:
        checks += [_check_switches, _check_passes, _check_caches, _check_plans]
    return tuple(finding for check in checks for finding in check(facts))


def check_process_group(facts: RankFacts) -> tuple[Finding, ...]:
    """Findings about the process group of a running program."""
    if not facts.process_group:
        return (
            Finding(
                kind="no-process-group",
                what="no process group is initialized",
                do="call torch.distributed.init_process_group before the first compiled call",
            ),
        )
    words = f"process group {facts.process_group} of {facts.world_size} ranks"
    found = [Finding(kind="process-group", what=words)]
    return (*found, *check_world_size(facts.world_size))


def check_world_size(world_size: int) -> tuple[Finding, ...]:
    """One rank alone gathers nothing."""
    if world_size != 1:
        return ()
    return (
        Finding(
            kind="one-rank",
            what="the job has one rank, so there are no gathers to hide",
            do="start it on more ranks",
        ),
    )


def _check_torch(facts: RankFacts) -> Iterator[Finding]:
    install = f"install a release of torch {facts.torch_wanted}".rstrip()
    if facts.torch_fault:
        yield Finding(
            kind="torch-unusable",
            what=f"overlap_core cannot work with torch {facts.torch or '(none)'}: "
            f"{facts.torch_fault}",
            do=install,
        )
        return
    release = Version(Version(facts.torch).base_version)
    if not SpecifierSet(facts.torch_wanted).contains(release, prereleases=True):
        yield Finding(
            kind="torch-unsupported",
            what=f"torch {facts.torch} is not supported: expected {facts.torch_wanted}",
            do=install,
        )
    elif facts.names_missing:
        yield Finding(
            kind="torch-names-missing",
            what=f"torch {facts.torch} lacks {'; '.join(facts.names_missing)}",
            do=f"this build differs from the releases: {install}",
        )
    else:
        yield Finding(
            kind="versions",
            what=f"overlap-core {facts.overlap_core}, torch {facts.torch}, Python {facts.python}; "
            "every private name that is needed is there",
        )


def _check_environment(facts: RankFacts) -> Iterator[Finding]:
    environment = facts.environment
    try:
        if disabled_by_environment(environment):
            yield Finding(
                kind="switched-off",
                what="OVERLAP_CORE=0 switches everything off",
                do="unset OVERLAP_CORE, on all ranks",
            )
    except ConfigError as error:
        yield Finding(kind="switch-invalid", what=str(error), do="unset it, or set it to 0 or 1")
    left_out = environment.get("OVERLAP_CORE_DISABLE_PLUGINS")
    if left_out:
        yield Finding(
            kind="plugins-left-out",
            what=f"OVERLAP_CORE_DISABLE_PLUGINS leaves out {left_out}",
            do="unset it to have them back",
        )
    for name in environment:
        if name not in _VARIABLES:
            meant = difflib.get_close_matches(name, _VARIABLES, n=1, cutoff=0.0)[0]
            yield Finding(
                kind="variable-unknown",
                what=f"{name} is set, and overlap_core reads no variable of this name",
                do=f"did you mean {meant}?",
            )
    said = [f"{name}={environment[name]}" for name in _VARIABLES if environment.get(name)]
    words = ", ".join(said) if said else f"none of {', '.join(_VARIABLES)} is set"
    yield Finding(kind="environment", what=words)


def _check_plugins(facts: RankFacts) -> Iterator[Finding]:
    for fault in facts.plugin_faults:
        yield Finding(
            kind="plugin-unusable",
            what=fault,
            do="fix or uninstall it, or leave it out, on all ranks",
        )
    if not facts.plugin_faults:
        yield Finding(kind="plugins", what=f"in calling order: {', '.join(facts.plugins)}")
    for note in facts.plugin_notes:
        yield Finding(
            kind="plugin-note",
            what=note,
            do="ask its author to declare overlap-core among its dependencies",
        )


def _check_ops(facts: RankFacts) -> Iterator[Finding]:
    yield Finding(
        kind="ops",
        what=f"{len(facts.ops)} registered, {facts.ops_communicating} of them communicate inside",
    )
    for words in facts.ops_unknown:
        what, _, do = words.partition(" Import ")
        yield Finding(kind="op-unknown", what=what, do=f"import {do}")


def _check_devices(facts: RankFacts) -> Iterator[Finding]:
    if not facts.torch:
        return
    if not facts.distributed:
        yield Finding(
            kind="no-distributed",
            what="this torch is built without torch.distributed",
            do="install a build that has it",
        )
        return
    gpus = ", ".join(f"{facts.gpus.count(name)} x {name}" for name in dict.fromkeys(facts.gpus))
    backends = ", ".join(facts.backends) or "none"
    yield Finding(kind="devices", what=f"GPUs: {gpus or 'none'}; backends: {backends}")
    if not facts.gpus:
        yield Finding(
            kind="no-gpu",
            what="no GPU is seen: gathers and compute share the cores, so overlap is exact here "
            "and gains no time",
            do="look at the driver and CUDA_VISIBLE_DEVICES, if there should be one",
        )
    elif "nccl" not in facts.backends:
        yield Finding(
            kind="nccl-missing",
            what="there are GPUs, and this torch is built without NCCL",
            do="install a build of torch for this GPU",
        )


def _check_switches(facts: RankFacts) -> Iterator[Finding]:
    on = facts.switches.get
    if on("deterministic"):
        yield Finding(
            kind="deterministic",
            what="deterministic algorithms are on, and then Inductor runs no reorder pass",
            do="switch off torch.use_deterministic_algorithms, or TORCHINDUCTOR_DETERMINISTIC",
        )
    if on(f"{_OPTIMIZATIONS}.enable_overlap_scheduling"):
        yield Finding(
            kind="overlap-scheduling",
            what="Inductor's own overlap scheduling is on: it moves collectives before "
            "overlap_core does, and ties them to compute, so that gathers have little room left",
            do=f"switch {_OPTIMIZATIONS}.enable_overlap_scheduling off",
        )
    if on(f"{_OPTIMIZATIONS}.enable_simple_overlap"):
        yield Finding(
            kind="simple-overlap",
            what="Inductor's simple_overlap is on, which runs behind overlap_core and would undo "
            "its order; where overlap_core is installed, it is switched off",
        )
    if on("suppress_errors"):
        yield Finding(
            kind="suppress-errors",
            what="torch._dynamo.config.suppress_errors is on: a rank whose compile fails goes on "
            "in eager mode, alone, and may issue collectives in another order than its peers",
            do="switch it off (TORCHDYNAMO_SUPPRESS_ERRORS)",
        )
    if on("triton.cudagraphs"):
        yield Finding(
            kind="cuda-graphs",
            what="CUDA graphs are on: a captured graph keeps the order in which it was captured; "
            "reports and plan files apply as ever, and check_collective_order sees no replays",
            do="install by enable() or enabled(): torch.compile takes options= or mode=, not both",
        )
    if on("cpp_wrapper"):
        yield Finding(
            kind="cpp-wrapper",
            what="cpp_wrapper is on: a graph that is loaded from a cache brings no report back",
            do="save reports after the start that compiles",
        )


def _check_passes(facts: RankFacts) -> Iterator[Finding]:
    grouping = [name for name in facts.reorder_passes if name.endswith(_GROUPING_PASS)]
    others = [name for name in facts.reorder_passes if name not in grouping]
    if grouping:
        yield Finding(
            kind="grouped-nodes",
            what=f"{_GROUPING_PASS} is configured: it groups nodes, which overlap_core refuses",
            do="take it out of reorder_for_compute_comm_overlap_passes",
        )
    if others:
        yield Finding(
            kind="user-passes",
            what=f"reorder passes that run before overlap_core: {', '.join(others)}",
            do="nothing, if they order the communication of all ranks alike",
        )


def _check_caches(facts: RankFacts) -> Iterator[Finding]:
    on = facts.switches.get
    caches = {"FX graphs": "fx_graph_cache", "autograd": "enable_autograd_cache"}
    used = [name for name, key in caches.items() if on(key) and not on("force_disable_caches")]
    if "FX graphs" in used:
        yield Finding(kind="caches", what=f"in use: {', '.join(used)}")
    else:
        yield Finding(
            kind="caches-off",
            what="Inductor's cache of FX graphs is off: every start compiles anew",
            do="set TORCHINDUCTOR_FX_GRAPH_CACHE=1 and no force_disable_caches, for a warm start",
        )
    if on("fx_graph_remote_cache") and not on("force_disable_caches"):
        yield Finding(
            kind="remote-cache",
            what="a remote cache is on: code is found there by the rank that made it, while it "
            "still has the plan file under which it was made",
            do="keep the folder of plan files between starts too (OVERLAP_CORE_PLAN_DIR)",
        )


def _check_plans(facts: RankFacts) -> Iterator[Finding]:
    if not facts.warm_start:
        yield Finding(
            kind="warm-start-off",
            what="OverlapConfig(warm_start=False): every start negotiates and compiles anew",
        )
        return
    if facts.plan_folder_fault:
        yield Finding(
            kind="plan-folder-unusable",
            what=f"no plan file can be written in {facts.plan_folder} ({facts.plan_folder_fault}), "
            "so every start negotiates and compiles anew",
            do="set OVERLAP_CORE_PLAN_DIR to a folder that can be written",
        )
    else:
        yield Finding(kind="plan-files", what=f"{len(facts.plans)} in {facts.plan_folder}")
    for words in facts.plans_broken:
        yield Finding(
            kind="plan-file-broken",
            what=f"a plan file cannot be read: {words}",
            do="delete it; the next start is cold and writes a new one",
        )
