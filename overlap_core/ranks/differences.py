"""Where the graphs of two ranks begin to differ, in words."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from overlap_core.registry import canonical_op_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.graph import Node, OverlapGraph
    from overlap_core.skeleton import SkeletonEntry

__all__ = ["describe_more", "encode_nodes", "find_difference"]

_LONGEST_TEXT = 120
_MOST_ORIGINS = 4
_MOST_OPS = 3


def describe_more(ranks: Sequence[int], skeletons: Sequence[Sequence[SkeletonEntry]]) -> str:
    """Which operations the first two skeletons of other numbers of operations do not share.

    Args:
        ranks: one for each skeleton.
        skeletons: those of the scope that differ, in the order of ranks.

    Returns:
        Such as "rank 3's skeleton has one more `mylib::dispatch` than rank 0's"; empty if all have
        the same operations.
    """
    counts = [Counter(canonical_op_name(e.op) or e.op for e in entries) for entries in skeletons]
    for rank, count in zip(ranks, counts, strict=True):
        if count != counts[0]:
            sides = ((rank, ranks[0], count - counts[0]), (ranks[0], rank, counts[0] - count))
            return "; ".join(
                f"rank {which}'s skeleton has {_several(more)} than rank {other}'s"
                for which, other, more in sides
                if more
            )
    return ""


def _several(more: Counter[str]) -> str:
    found = sorted(more.items())
    shown = [f"{'one' if n == 1 else n} more `{op}`" for op, n in found[:_MOST_OPS]]
    if len(found) > _MOST_OPS:
        shown.append("more of other ops")
    return ", ".join(shown)


def encode_nodes(graph: OverlapGraph) -> bytes:
    """What of each node is comparable over ranks, as compressed JSON.

    Texts, of which there are few, come once, and buffers as how many others appeared since: layers
    that repeat then look alike, and cost next to nothing.
    """
    texts: dict[str, int] = {}
    buffers: dict[str, int] = {}
    rows = []
    for node in graph.nodes:
        text = texts.setdefault(_describe(node), len(texts))
        read = [buffers.setdefault(b, len(buffers)) for b in (*node.reads, *node.mutates)]
        used = [len(buffers) - place for place in read]
        for buffer in node.writes:
            buffers.setdefault(buffer, len(buffers))
        rows.append([text, used])
    data = {"texts": list(texts), "rows": rows}
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode())
    return base64.b85encode(packed)  # stores carry text


def find_difference(ranks: Sequence[int], payloads: Sequence[bytes]) -> str:
    """The first node in which the graphs of two ranks differ, on each side.

    Args:
        ranks: both ranks.
        payloads: what `encode_nodes` wrote on them.
    """
    one, other = ranks
    left, right = (_decode(payload) for payload in payloads)
    for place, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine[0] != theirs[0]:
            sides = f"rank {one} has {mine[0]}, rank {other} has {theirs[0]}"
            return f"first difference at node {place}: {sides}"
        if mine[1] != theirs[1]:
            return (
                f"first difference at node {place}: {mine[0]} reads other buffers on rank {one} "
                f"than on rank {other}"
            )
    if len(left) != len(right):
        longer, more = (
            (one, left[len(right)])
            if len(left) > len(right)
            else (
                other,
                right[len(left)],
            )
        )
        shorter = min(len(left), len(right))
        return (
            f"first difference at node {shorter}: rank {longer} has {more[0]}, the other graph ends"
        )
    return f"rank {one} and rank {other} have the same nodes, with sizes that depend otherwise"


def _decode(payload: bytes) -> list[tuple[str, list[int]]]:
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(payload)))
    return [(data["texts"][text], used) for text, used in data["rows"]]


def _describe(node: Node) -> str:
    """A node in words such as ``aten::mm [~x64] bfloat16``; `~` is a symbolic size."""
    name = canonical_op_name(node.op) or ""
    if not name:
        origins = list(dict.fromkeys(canonical_op_name(o) or o for o in node.origins))
        shown = ", ".join(origins[:_MOST_ORIGINS])
        more = f" and {len(origins) - _MOST_ORIGINS} more" * (len(origins) > _MOST_ORIGINS)
        name = f"fused {shown}{more}" if origins else node.op
    sizes = ", ".join(
        "x".join("~" if isinstance(size, str) else str(size) for size in shape) or "scalar"
        for shape in node.sizes
    )
    text = " ".join(filter(None, (name, sizes and f"[{sizes}]", ", ".join(node.dtypes))))
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
