"""Finding ops that communicate although nobody said so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from overlap_core.costs import request_digest
from overlap_core.graph import NodeKind
from overlap_core.registry import (
    canonical_op_name,
    note_communicating,
    op_has_internal_collective,
)
from overlap_core.replay.realize import needed_bytes, realize_arguments
from overlap_core.session import session

from .eager import eager_world
from .intercept import SilentCollectives
from .replays import replay_item

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from overlap_core.config import OverlapConfig
    from overlap_core.host import PluginHost

    from .adapter import AdaptedGraph

__all__ = ["describe_hidden", "note_hidden", "opaque_ops", "search_hidden"]

logger = logging.getLogger(__name__)


def opaque_ops(adapted: AdaptedGraph) -> tuple[str, ...]:
    """Names of the custom ops in a graph, sorted."""
    names = {canonical_op_name(n.op) for n in adapted.graph.nodes if n.kind is NodeKind.OPAQUE}
    return tuple(sorted(name for name in names if name is not None))


def search_hidden(
    snodes: Sequence[Any], adapted: AdaptedGraph, config: OverlapConfig, host: PluginHost
) -> frozenset[str]:
    """Call each custom op that nobody declared once, without letting it communicate.

    Only what goes through torch.distributed is seen. An op whose arguments cannot be made is
    passed over.

    Returns:
        Names of those that communicate.
    """
    found: set[str] = set()
    for op_name, snode in _candidates(snodes, adapted):
        if op_name in found:
            continue
        silent = SilentCollectives()
        try:
            item = replay_item(snode, adapted.sizes)
            if needed_bytes(item) > config.max_replay_bytes:
                continue
            with eager_world(), silent:
                args, kwargs = realize_arguments(item, host.materialize, host.realize_tensor)
                item.call(*args, **kwargs)
        except Exception as error:
            logger.debug("%s could not be replayed: %s: %s", op_name, type(error).__name__, error)
        if silent.issued:
            found.add(op_name)
    return frozenset(found)


def _candidates(snodes: Sequence[Any], adapted: AdaptedGraph) -> Iterator[tuple[str, Any]]:
    """One node for each kind of call of a custom op that is not known to communicate."""
    rows = zip(snodes, adapted.graph.nodes, adapted.requests, strict=True)
    for snode, node, request in rows:
        if node.kind is not NodeKind.OPAQUE or request is None:
            continue
        op_name = canonical_op_name(node.op)
        if op_name is None or op_has_internal_collective(op_name):
            continue
        key = request_digest(request)
        if key not in session.learned.searched:
            session.learned.searched.add(key)
            yield op_name, snode


def note_hidden(op_names: Iterable[str]) -> tuple[str, ...]:
    """From now on these ops communicate, as far as the pass is concerned; warns of new ones."""
    new = note_communicating(op_names)
    for op_name in new:
        logger.warning("%s", describe_hidden(op_name))
    return new


def describe_hidden(op_name: str) -> str:
    """What a user should know and do."""
    return (
        f"{op_name} communicates inside and is not registered; it is treated as a collective from "
        f"now on. Register it on all ranks: register_materialize_inputs({op_name!r}, "
        "has_internal_collective=True)"
    )
