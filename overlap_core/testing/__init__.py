"""Things to try overlap_core with: a sharded small transformer, real ranks, a recorder."""

from overlap_core.testing.models import (
    Diverge,
    Transformer,
    TransformerConfig,
    example_input,
)
from overlap_core.testing.processes import RankFailure, run_ranks
from overlap_core.testing.recorder import CollectiveRecorder, RecordedCollective
from overlap_core.testing.simple_fsdp import check_same_state, shard_module, state_digest
from overlap_core.testing.ulysses import ulysses_attention, visible_ulysses_attention

__all__ = [
    "CollectiveRecorder",
    "Diverge",
    "RankFailure",
    "RecordedCollective",
    "Transformer",
    "TransformerConfig",
    "check_same_state",
    "example_input",
    "run_ranks",
    "shard_module",
    "state_digest",
    "ulysses_attention",
    "visible_ulysses_attention",
]
