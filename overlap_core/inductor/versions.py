"""The one place that knows torch versions, and every private name that the pass rests on."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen
from packaging.version import Version

from overlap_core._discovery import core_version
from overlap_core.errors import UnsupportedTorchError

__all__ = [
    "SIMPLE_OVERLAP_KEY",
    "SUPPORTED",
    "PrivateName",
    "check_torch",
    "has_config_key",
    "missing_names",
    "software",
]

SUPPORTED = (Version("2.11"), Version("2.15"))
"""First supported release, and the first one that is not."""

SIMPLE_OVERLAP_KEY = "aten_distributed_optimizations.enable_simple_overlap"
"""From torch 2.14 on: a pass after ours that moves collectives again, on by default."""


@frozen
class PrivateName:
    """A name inside torch without a promise of stability, and what it is needed for."""

    module: str
    attribute: str
    purpose: str


REQUIRED = (
    PrivateName("torch._inductor.config", "reorder_for_compute_comm_overlap", "the pass's gate"),
    PrivateName(
        "torch._inductor.config", "reorder_for_compute_comm_overlap_passes", "the list of passes"
    ),
    PrivateName("torch._inductor.config", "get_config_copy", "known configuration keys"),
    PrivateName("torch._inductor.compile_fx", "compile_fx", "process-wide installation"),
    PrivateName("torch._inductor.codecache", "BypassFxGraphCache", "keeping artifacts uncached"),
    PrivateName("torch._inductor.custom_graph_pass", "CustomGraphPass", "captured positions"),
    PrivateName("torch._inductor.runtime.runtime_utils", "cache_dir", "where plan files lie"),
    PrivateName("torch._guards", "TracingContext.get_traced_code", "which function is compiled"),
    PrivateName("torch._inductor.dependencies", "WeakDep", "ordering between nodes"),
    PrivateName("torch._inductor.scheduler", "BaseSchedulerNode.set_read_writes", "new ordering"),
    PrivateName("torch._inductor.scheduler", "BaseSchedulerNode.add_fake_dep", "new ordering"),
    PrivateName("torch._inductor.scheduler", "GroupedSchedulerNode", "refusing grouped nodes"),
    PrivateName("torch._inductor.scheduler", "FusedSchedulerNode", "reading fused nodes"),
    PrivateName("torch._inductor.scheduler", "NopKernelSchedulerNode", "nodes that cost nothing"),
    PrivateName("torch._inductor.scheduler", "Scheduler.compile_kernel", "measuring"),
    PrivateName("torch._inductor.async_compile", "AsyncCompile", "measuring"),
    PrivateName("torch._C._distributed_c10d", "FakeWork", "replays that do not communicate"),
    PrivateName("torch._subclasses.fake_tensor", "unset_fake_temporarily", "replays"),
    PrivateName("torch._guards", "tracing", "replays"),
    PrivateName("torch._logging", "trace_structured", "the report in torch's trace log"),
    PrivateName("torch._dispatch.python", "no_python_dispatcher", "replays"),
    PrivateName("torch._inductor.ir", "_CollectiveKernel", "finding collectives"),
    PrivateName("torch._inductor.ir", "_WaitKernel", "finding waits"),
    PrivateName("torch._inductor.ir", "FallbackKernel", "finding custom ops"),
    PrivateName("torch._inductor.ir", "MultiOutput", "finding multi-output members"),
    PrivateName("torch._inductor.ir", "MultiOutputLayout", "reading sizes"),
    PrivateName("torch._inductor.ir", "NoneLayout", "reading sizes"),
    PrivateName("torch._inductor.virtualized", "V", "the graph being compiled"),
    PrivateName(
        "torch._inductor.sizevars", "SizeVarAllocator.optimization_hint", "hints without guards"
    ),
    PrivateName("torch.utils._ordered_set", "OrderedSet", "new ordering"),
    PrivateName("torch._guards", "CompileContext", "which frame is compiled"),
    PrivateName(
        "torch.distributed.distributed_c10d", "_resolve_process_group", "groups of collectives"
    ),
    PrivateName("torch.distributed.distributed_c10d", "_get_default_store", "agreement"),
)


def missing_names(names: tuple[PrivateName, ...] = REQUIRED) -> tuple[PrivateName, ...]:
    """Those of the names that the installed torch does not have."""
    missing = []
    for name in names:
        try:
            found: Any = importlib.import_module(name.module)
            for part in name.attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            missing.append(name)
    return tuple(missing)


def check_torch(
    version: str = torch.__version__, names: tuple[PrivateName, ...] = REQUIRED
) -> None:
    """Refuse a torch that the pass cannot work with.

    Raises:
        UnsupportedTorchError: the release is outside the range, or names are missing; says which.
    """
    first, beyond = SUPPORTED
    release = Version(Version(version).base_version)
    if not first <= release < beyond:
        raise UnsupportedTorchError(
            f"torch {version} is not supported: overlap_core works with torch >={first},<{beyond}. "
            "Install one of those, or leave overlap off (OVERLAP_CORE=0)"
        )
    missing = missing_names(names)
    if missing:
        words = "; ".join(f"{n.module}.{n.attribute} (for {n.purpose})" for n in missing)
        raise UnsupportedTorchError(
            f"torch {version} lacks {words}. This build differs from the releases that "
            "overlap_core knows; install a release, or leave overlap off (OVERLAP_CORE=0)"
        )


def software() -> dict[str, str]:
    """Versions by name, of which ranks must run the same to agree on anything."""
    return {"overlap_core": core_version(), "torch": str(torch.__version__)}


@lru_cache(maxsize=64)
def has_config_key(key: str) -> bool:
    """Whether Inductor's configuration of this torch knows a key."""
    import torch._inductor.config as inductor_config

    return key in inductor_config.get_config_copy()
