"""What an op takes at one size, from what it took at another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .keys import request_digest
from .types import Cost, CostSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .types import CostRequest

__all__ = ["scale_missing"]


def scale_missing(
    requests: Iterable[CostRequest | None],
    table: Mapping[str, Cost],
    measured: Mapping[CostRequest, Cost],
) -> dict[str, Cost]:
    """Costs of ops that cannot be measured now, each from the nearest size that was measured.

    Time is taken to grow with the bytes that an op moves. That says too little where it grows
    faster, as in attention, and is still far nearer than an estimate for an op of which nothing
    is known.

    Args:
        requests: structural keys of the nodes of a graph.
        table: what is known of them, by digest.
        measured: what was measured before, by structural key.

    Returns:
        Analytical costs that name their source, by digest; those that are missing in the table.
    """
    missing = {r: digest for r in requests if r and (digest := request_digest(r)) not in table}
    scaled = {digest: _scale(request, measured) for request, digest in missing.items()}
    return {digest: cost for digest, cost in scaled.items() if cost is not None}


def _scale(request: CostRequest, measured: Mapping[CostRequest, Cost]) -> Cost | None:
    nbytes, family = _bytes_of(request), _family_of(request)
    known = [
        (_bytes_of(other), cost)
        for other, cost in measured.items()
        if cost.ns and _bytes_of(other) and _family_of(other) == family
    ]
    if not nbytes or not known:
        return None
    nearest, cost = min(known, key=lambda other: abs(math.log(nbytes / other[0])))
    factor = nbytes / nearest
    return Cost(
        ns=round((cost.ns or 0) * factor),
        network_ns=None if cost.network_ns is None else round(cost.network_ns * factor),
        source=CostSource.ANALYTICAL,
        why=f"scaled by {factor:.2f} from a measurement at another size",
    )


def _bytes_of(request: CostRequest) -> int:
    return request.nbytes or (request.read_bytes or 0) + (request.write_bytes or 0)


def _family_of(request: CostRequest) -> tuple[object, ...]:
    """What ops have in common whose times may be compared."""
    return (
        request.kind,
        request.op,
        request.device,
        request.group_size,
        (*request.input_dtypes, *request.output_dtypes),
        tuple(len(shape) for shape in (*request.inputs, *request.outputs)),
    )
