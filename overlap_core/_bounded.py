"""Calling code of others that may never return.

Python can't stop a thread, so a call that exceeds its limit is left behind in a daemon thread
and its answer is ignored. What is called this way must not change anything.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StillRunningError", "run_bounded"]

T = TypeVar("T")

_LOOK_EVERY_S = 0.25


class StillRunningError(Exception):
    """A call was given up while it was still running."""


def run_bounded(function: Callable[[], T], is_over: Callable[[], bool]) -> T:
    """Call a function in a thread of its own; what it raises is raised here.

    Args:
        function: sees the caller's context variables and current GPU, not its dispatch modes.
        is_over: asked a few times a second; True gives the call up.

    Raises:
        StillRunningError: the call was given up.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()
    enter_device = _device_setter()

    def work() -> None:
        try:
            enter_device()
            results.append(context.run(function))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="overlap_core hook", daemon=True)
    thread.start()
    thread.join(_LOOK_EVERY_S)
    while thread.is_alive():
        if is_over():
            raise StillRunningError
        thread.join(_LOOK_EVERY_S)
    if errors:
        raise errors[0]
    return results[0]


def _device_setter() -> Callable[[], None]:
    """Makes this thread's current GPU that of another thread, where GPUs are in use at all."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
