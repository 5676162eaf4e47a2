"""Communication as ranks compare it: skeleton, classification, fingerprint."""

from __future__ import annotations

from .entries import NO_COMMUNICATION, Communication, SkeletonEntry
from .fingerprint import fingerprint
from .skeleton import (
    Skeleton,
    build_skeleton,
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
    "build_skeleton",
    "describe_entry",
    "entry_from_json",
    "entry_to_json",
    "fingerprint",
    "merge_skeletons",
    "skeleton_digest",
]
