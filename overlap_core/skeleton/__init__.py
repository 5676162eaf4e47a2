"""Communication as ranks compare it: skeleton, classification, fingerprint."""

from __future__ import annotations

from .entries import NO_COMMUNICATION, Communication, SkeletonEntry
from .fingerprint import fingerprint, structure
from .merge import Merged, describe_uneven, find_reordered, merge, merge_skeletons
from .order import arrange, captured_order, match_order, occurrences, order_digest
from .skeleton import (
    Skeleton,
    build_skeleton,
    comparable_size,
    describe_entry,
    entry_from_json,
    entry_to_json,
    skeleton_digest,
)
from .uneven import is_exchange, may_differ

__all__ = [
    "NO_COMMUNICATION",
    "Communication",
    "Merged",
    "Skeleton",
    "SkeletonEntry",
    "arrange",
    "build_skeleton",
    "captured_order",
    "comparable_size",
    "describe_entry",
    "describe_uneven",
    "entry_from_json",
    "entry_to_json",
    "find_reordered",
    "fingerprint",
    "is_exchange",
    "match_order",
    "may_differ",
    "merge",
    "merge_skeletons",
    "occurrences",
    "order_digest",
    "skeleton_digest",
    "structure",
]
