"""Communication as ranks compare it: skeleton, classification, fingerprint."""

from __future__ import annotations

from .entries import NO_COMMUNICATION, Communication, SkeletonEntry
from .fingerprint import fingerprint
from .order import arrange, captured_order, match_order, occurrences, order_digest
from .skeleton import (
    Skeleton,
    build_skeleton,
    comparable_size,
    describe_entry,
    entry_from_json,
    entry_to_json,
    merge_skeletons,
    skeleton_digest,
)

__all__ = [
    "NO_COMMUNICATION",
    "Communication",
    "Skeleton",
    "SkeletonEntry",
    "arrange",
    "build_skeleton",
    "captured_order",
    "comparable_size",
    "describe_entry",
    "entry_from_json",
    "entry_to_json",
    "fingerprint",
    "match_order",
    "merge_skeletons",
    "occurrences",
    "order_digest",
    "skeleton_digest",
]
