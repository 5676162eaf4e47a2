"""Where the graphs of two ranks begin to differ, in words."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from overlap_core.registry import canonical_op_name
from overlap_core.skeleton import comparable_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlap_core.graph import Node, OverlapGraph
    from overlap_core.skeleton import SkeletonEntry

__all__ = ["describe_more", "encode_nodes", "find_difference"]

_LONGEST_TEXT = 120
_MOST_ORIGINS = 4
_MOST_OPS = 3
_SHAPES = re.compile(r" \[[^\]]*")
_NUMBER = re.compile(r"\d+")


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

    What nodes are comes once, and buffers as how many others appeared since: layers that repeat
    then look alike, and cost next to nothing.
    """
    kinds: dict[tuple[str, int], int] = {}
    buffers: dict[str, int] = {}
    rows = []
    for node in graph.nodes:
        kind = kinds.setdefault((_describe(node), _summarize(node)), len(kinds))
        read = [buffers.setdefault(b, len(buffers)) for b in (*node.reads, *node.mutates)]
        used = [len(buffers) - place for place in read]
        for buffer in node.writes:
            buffers.setdefault(buffer, len(buffers))
        rows.append([kind, used])
    data = {"kinds": list(kinds), "rows": rows}
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode())
    return base64.b85encode(packed)  # stores carry text


def find_difference(ranks: Sequence[int], payloads: Sequence[bytes], *, static: bool = True) -> str:
    """The first node in which the graphs of two ranks differ, on each side.

    Args:
        ranks: both ranks.
        payloads: what `encode_nodes` wrote on them.
        static: False: static sizes are each rank's own, and no difference.
    """
    one, other = ranks
    left, right = (_decode(payload) for payload in payloads)
    if not static:
        left, right = ([row.without_sizes() for row in rows] for rows in (left, right))
    for place, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine == theirs:
            continue
        if mine.text != theirs.text:
            what = f"rank {one} has {mine.text}, rank {other} has {theirs.text}"
        elif mine.used != theirs.used:
            what = f"{mine.text} reads other buffers on rank {one} than on rank {other}"
        else:
            what = (
                f"{mine.text} is not the same on rank {one} and on rank {other}, by what is not "
                "shown here, such as an overload or the ops that were fused"
            )
        return f"first difference at node {place}: {what}"
    if len(left) != len(right):
        longer, more = (one, left) if len(left) > len(right) else (other, right)
        shorter = min(len(left), len(right))
        return (
            f"first difference at node {shorter}: rank {longer} has {more[shorter].text}, "
            "the other graph ends"
        )
    return (
        f"rank {one} and rank {other} have the same nodes, which differ in what is not shown here, "
        "such as how symbolic sizes or other nodes determine them"
    )


class _Row(NamedTuple):
    text: str
    summary: int
    used: list[int]

    def without_sizes(self) -> _Row:
        """With `#` for every static size."""
        text = _SHAPES.sub(lambda found: _NUMBER.sub("#", found[0]), self.text)
        return self._replace(text=text)


def _decode(payload: bytes) -> list[_Row]:
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(payload)))
    rows = []
    for kind, used in data["rows"]:
        text, summary = data["kinds"][kind]
        rows.append(_Row(text, summary, used))
    return rows


def _summarize(node: Node) -> int:
    """Tells nodes apart of which `_describe` says the same."""
    touched = [len(node.reads), len(node.mutates), len(node.writes)]
    whole = [node.kind, node.op, sorted(set(node.origins)), touched]
    return zlib.crc32(json.dumps(whole).encode())


def _describe(node: Node) -> str:
    """A node in words such as ``aten::mm [~x64] bfloat16``; `~` is a symbolic size."""
    name = canonical_op_name(node.op) or ""
    if not name:
        origins = sorted({canonical_op_name(origin) or origin for origin in node.origins})
        shown = ", ".join(origins[:_MOST_ORIGINS])
        more = f" and {len(origins) - _MOST_ORIGINS} more" * (len(origins) > _MOST_ORIGINS)
        name = f"fused {shown}{more}" if origins else node.op
    sizes = ", ".join(
        "x".join(str(comparable_size(size)) for size in shape) or "scalar" for shape in node.sizes
    )
    text = " ".join(filter(None, (name, sizes and f"[{sizes}]", ", ".join(node.dtypes))))
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
