"""Reading JSON files that people pass around, with reasons in words where they are no good."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["parse_json", "read_bytes", "read_json", "strictly"]

_MOST_BITS = 63
"""Of an integer, without its sign."""
T = TypeVar("T")


def read_bytes(path: str | PathLike[str]) -> bytes:
    """A file's content.

    Raises:
        ValueError: it can't be read; says why, without the path.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # also a path with a null character
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot be read: {reason}") from None


def read_json(path: str | PathLike[str], what: str) -> object:
    """A JSON file's content.

    Args:
        path: of the file.
        what: what it should be, with its article, for messages: `a report`.

    Raises:
        ValueError: it can't be read, or is no JSON; says why, without the path.
    """
    return parse_json(read_bytes(path), what)


def parse_json(raw: bytes, what: str, *, any_number: bool = False) -> object:
    """The content of JSON text; see `read_json`.

    Args:
        raw: the text, as UTF-8.
        what: what it should be.
        any_number: take numbers that are no damage in files of other programs: of more than 64
            bits, and what is not finite.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"not {what}: the file is no text") from None
    if not text.strip():
        raise ValueError(f"not {what}: the file is empty")
    try:
        if any_number:
            return json.loads(text)
        return json.loads(
            text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("not JSON, or cut off: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON, or cut off: {error}") from None


def strictly(kind: type[T]) -> Any:
    """For `cattrs`: take a value only if it is of the type already; JSON has no need to convert."""

    def structure(value: object, _: object) -> T:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return _check_width(value) if kind is int else value
        raise ValueError(f"expected {kind.__name__}, got {value!r:.60}")

    return structure


def _check_width(value: T) -> T:
    """Times and bytes beyond this are damage, and would overflow where they are shown."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of more than 64 bits: {value!s:.12}...")
    return value


def _parse_int(text: str) -> int:
    if len(text) > _MOST_BITS:  # more digits than bits: not worth reading, and Python may refuse
        raise ValueError(f"a number of more than 64 bits: {text:.12}...")
    return _check_width(int(text))


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"a number that is too large: {text:.12}")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")
