"""Things to try overlap_core and its plugins with.

Small graphs, ranks in memory and real ones, hosts of chosen plugins, assertions, a conformance
suite for plugins, a sharded small transformer, a recorder of collectives. Hypothesis strategies
are in `overlap_core.testing.strategies`, fixtures in the pytest plugin that comes with the
package. `overlap-core[testing]` installs what all of it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_core.testing.checks import assert_legal, assert_same_collective_sequence
    from overlap_core.testing.conformance import OpCall, PluginConformance, tensor_spec
    from overlap_core.testing.fake_ranks import FakeRanks
    from overlap_core.testing.graphs import GraphBuilder, graphs_for_ranks, on_ranks
    from overlap_core.testing.hosts import HookCall, HookRecorder, host_with
    from overlap_core.testing.leaks import ProcessState, find_leaks
    from overlap_core.testing.models import Diverge, Transformer, TransformerConfig, example_input
    from overlap_core.testing.processes import RankFailure, RankPool, RunRanks, run_ranks
    from overlap_core.testing.recorder import CollectiveRecorder, RecordedCollective
    from overlap_core.testing.simple_fsdp import check_same_state, shard_module, state_digest
    from overlap_core.testing.torchrun import run_torchrun
    from overlap_core.testing.ulysses import ulysses_attention, visible_ulysses_attention

__all__ = [
    "CollectiveRecorder",
    "Diverge",
    "FakeRanks",
    "GraphBuilder",
    "HookCall",
    "HookRecorder",
    "OpCall",
    "PluginConformance",
    "ProcessState",
    "RankFailure",
    "RankPool",
    "RecordedCollective",
    "RunRanks",
    "Transformer",
    "TransformerConfig",
    "assert_legal",
    "assert_same_collective_sequence",
    "check_same_state",
    "example_input",
    "find_leaks",
    "graphs_for_ranks",
    "host_with",
    "on_ranks",
    "run_ranks",
    "run_torchrun",
    "shard_module",
    "state_digest",
    "tensor_spec",
    "ulysses_attention",
    "visible_ulysses_attention",
]

_MODULES = {
    "CollectiveRecorder": "recorder",
    "Diverge": "models",
    "FakeRanks": "fake_ranks",
    "GraphBuilder": "graphs",
    "HookCall": "hosts",
    "HookRecorder": "hosts",
    "OpCall": "conformance",
    "PluginConformance": "conformance",
    "ProcessState": "leaks",
    "RankFailure": "processes",
    "RankPool": "processes",
    "RecordedCollective": "recorder",
    "RunRanks": "processes",
    "Transformer": "models",
    "TransformerConfig": "models",
    "assert_legal": "checks",
    "assert_same_collective_sequence": "checks",
    "check_same_state": "simple_fsdp",
    "example_input": "models",
    "find_leaks": "leaks",
    "graphs_for_ranks": "graphs",
    "host_with": "hosts",
    "on_ranks": "graphs",
    "run_ranks": "processes",
    "run_torchrun": "torchrun",
    "shard_module": "simple_fsdp",
    "state_digest": "simple_fsdp",
    "tensor_spec": "conformance",
    "ulysses_attention": "ulysses",
    "visible_ulysses_attention": "ulysses",
}


def __getattr__(name: str) -> Any:
    """Load at first use: most of it needs torch, and the pytest plugin must start fast."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
