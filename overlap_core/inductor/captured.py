"""What the captured operations say that scheduler nodes no longer show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container

__all__ = ["find_shard_inputs"]

_CARRIERS = frozenset(
    {
        "aten.constant_pad_nd.default",
        "aten.cat.default",
        "aten.view.default",
        "aten.reshape.default",
        "aten._to_copy.default",
        "prims.convert_element_type.default",
    }
)
"""Operations between a sharded parameter and its gather that an empty shard can turn constant."""


def find_shard_inputs(snode: Any, inputs: Container[str]) -> tuple[str, ...]:
    """Graph inputs behind a node that reads nothing, since the shard it pads is empty.

    A parameter whose first dimension does not divide leaves some ranks an empty shard. There the
    padding in front of the gather reads no buffer and looks like a constant, while on the other
    ranks the same gather is fed by a graph input. The captured operations know better.
    """
    origins = [
        origin
        for part in snode.get_nodes()
        for origin in getattr(part.node, "origins", ()) or ()
        if str(origin.target) in _CARRIERS
    ]
    found: dict[str, None] = {}
    seen = set(origins)
    while origins:
        for source in origins.pop().all_input_nodes:
            if source in seen:
                continue
            seen.add(source)
            if source.op == "placeholder" and source.target in inputs:
                found[source.target] = None
            elif str(source.target) in _CARRIERS:
                origins.append(source)
    return tuple(sorted(found))
