"""Any number of ranks in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from overlap_core.errors import OverlapError

from .negotiation import Decide, Share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .negotiation import Protocol

__all__ = ["run_in_memory", "run_loopback"]

T = TypeVar("T")


def run_in_memory(protocols: Sequence[Protocol[T]]) -> tuple[T, ...]:
    """Drive all ranks of one scope, step by step.

    Raises:
        OverlapError: two ranks are at different steps, which is a fault of the protocol.
    """
    results: dict[int, T] = {}
    requests: dict[int, Share | Decide] = {}
    answers: list[tuple[bytes, ...] | None] = [None] * len(protocols)
    while len(results) < len(protocols):
        requests.clear()
        for index, protocol in enumerate(protocols):
            if index in results:
                continue
            try:
                answer = answers[index]
                requests[index] = next(protocol) if answer is None else protocol.send(answer)
            except StopIteration as stop:
                results[index] = stop.value
        if not requests:
            continue
        steps = {(type(request).__name__, request.step) for request in requests.values()}
        if len(steps) > 1 or results:
            raise OverlapError(
                f"ranks are at different steps: {sorted(steps)}, finished: {sorted(results)}"
            )
        payloads = tuple(request.payload for request in requests.values())
        if isinstance(requests[0], Decide):
            payloads = (payloads[0],)
        answers = [payloads] * len(protocols)
    return tuple(results[index] for index in range(len(protocols)))


def run_loopback(protocol: Protocol[T], index: int, size: int) -> T:
    """Drive one rank as if every peer said what it says; for one rank, and for a fake group."""
    answer: tuple[bytes, ...] | None = None
    while True:
        try:
            request = next(protocol) if answer is None else protocol.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        # A detail is never asked for, since all digests are equal.
        answer = (request.payload,) * (1 if isinstance(request, Decide) else size)
