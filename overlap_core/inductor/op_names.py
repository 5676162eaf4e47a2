"""Registered ops that torch doesn't know: a misspelt name, or a library that isn't imported."""

from __future__ import annotations

import difflib
import logging
from typing import TYPE_CHECKING

import torch

from overlap_core.registry import registered_ops
from overlap_core.session import session

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["unknown_registrations", "warn_of_unknown_registrations"]

logger = logging.getLogger(__name__)


def unknown_registrations(said: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Names that nobody has defined in torch by now and that are not in `said`: what to do.

    A plugin may register the ops of a library that this process doesn't use: its name is passed
    over while torch knows no op at all of that namespace.
    """
    known = set(torch._C._dispatch_get_all_op_names())
    names = {name.partition(".")[0] for name in known}
    namespaces = {name.partition("::")[0] for name in names}
    for op_name, owner in registered_ops():
        namespace = op_name.partition("::")[0]
        if (
            op_name in names
            or op_name in said
            or (owner is not None and namespace not in namespaces)
        ):
            continue
        close = difflib.get_close_matches(op_name, sorted(names), n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        who = "" if owner is None else f" (by plugin {owner!r})"
        words = (
            f"op {op_name!r} is registered{who}, but torch knows no op of this name{hint} Import "
            "the library that defines it before the first compiled call, or correct the name"
        )
        yield op_name, words


def warn_of_unknown_registrations() -> None:
    """Warn once of each unknown name."""
    said = session.learned.said
    for op_name, words in unknown_registrations(said):
        said.add(op_name)
        logger.warning("%s", words)
