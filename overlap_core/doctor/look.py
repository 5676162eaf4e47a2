"""Looks at this process and machine, and gathers the facts: a fault is one, and not raised."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from overlap_core.config import OverlapConfig, check_config, plugins_disabled_by_environment
from overlap_core.errors import OverlapError
from overlap_core.hookspecs import PROJECT_NAME
from overlap_core.host import PluginHost
from overlap_core.registry import is_declared, registered_ops, registry_digest

from .facts import RankFacts
from .plans import look_at_plans

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["look"]

_DISTRIBUTION = "overlap-core"
_PREFIX = "OVERLAP_CORE"


def look(
    config: OverlapConfig | None = None,
    *,
    rank: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RankFacts:
    """The facts of this process.

    Args:
        config: as it would be given to `enable`; None: the defaults.
        rank: in a job; None: the plan files of all ranks are looked at.
        environ: of the process.

    Raises:
        ConfigError: `config` is no `OverlapConfig`.
    """
    config = OverlapConfig() if config is None else check_config(config)
    return RankFacts(
        rank=rank or 0,
        overlap_core=metadata.version(_DISTRIBUTION),
        python=platform.python_version(),
        environment={name: environ[name] for name in sorted(environ) if name.startswith(_PREFIX)},
        config=config.digest(),
        warm_start=config.warm_start,
        **_plugins(config, environ),
        **{**_torch(), **_inside_torch(config, rank)},
        # Last, since plugins register ops.
        ops=tuple(_op_in_words(name, owner) for name, owner in registered_ops()),
        ops_communicating=sum(is_declared(name) for name, _ in registered_ops()),
        ops_digest=registry_digest(),
    )


def _plugins(config: OverlapConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        host = PluginHost.discover(config, environ=environ)
    except OverlapError as error:
        return {"plugin_faults": _each_fault(str(error), environ)}
    except Exception as error:  # built-in plugins need a torch that can be imported
        return {"plugin_faults": (_in_words(error),)}
    return {"plugins": host.plugin_names(), "plugin_notes": host.notes()}


def _each_fault(first: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What is wrong with the plugins together, and with each alone."""
    found = {first: None}
    left_out = plugins_disabled_by_environment(environ)
    for name in sorted({point.name for point in metadata.entry_points(group=PROJECT_NAME)}):
        if name in left_out:
            continue
        try:
            PluginHost.discover(OverlapConfig(), environ={}, installed=(name,))
        except OverlapError as error:
            found[str(error)] = None
    return tuple(found)


def _op_in_words(name: str, owner: str | None) -> str:
    words = f"{name} (communicates)" if is_declared(name) else name
    return words if owner is None else f"{words} by {owner}"


def _torch() -> dict[str, Any]:
    """What torch's public names tell."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return {"torch_fault": _in_words(error)}
    backends: list[str] = []
    group, world_size = "", 1
    if dist.is_available():
        for name, is_there in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available)):
            backends += [name] * is_there()
        if dist.is_initialized():
            group, world_size = str(dist.get_backend()), dist.get_world_size()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "torch": torch.__version__,
        "distributed": dist.is_available(),
        "backends": tuple(backends),
        "gpus": tuple(map(torch.cuda.get_device_name, gpus)),
        "process_group": group,
        "world_size": world_size,
    }


def _inside_torch(config: OverlapConfig, rank: int | None) -> dict[str, Any]:
    """What only that part of overlap_core can tell that uses torch's private names."""
    try:
        from overlap_core.inductor import inspection, missing_names
        from overlap_core.inductor.op_names import unknown_registrations
        from overlap_core.inductor.versions import SUPPORTED
        from overlap_core.inductor.warm_start import find_plan_folder

        missing = missing_names()
        found = {
            "torch_wanted": ">={},<{}".format(*SUPPORTED),
            "names_missing": tuple(f"{n.module}.{n.attribute} (for {n.purpose})" for n in missing),
            "ops_unknown": tuple(words for _, words in unknown_registrations()),
            "switches": inspection.compiler_switches(),
            "reorder_passes": inspection.configured_passes(),
        }
        plans = look_at_plans(find_plan_folder(config), rank)
    except Exception as error:
        return {"torch_wanted": _required_torch(), "torch_fault": _in_words(error)}
    return {**found, **(plans if config.warm_start else {})}


def _required_torch() -> str:
    requirements = map(Requirement, metadata.requires(_DISTRIBUTION) or ())
    return next((str(one.specifier) for one in requirements if one.name == "torch"), "")


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
