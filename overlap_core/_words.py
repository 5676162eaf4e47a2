"""Sizes and numbers in words, for reasons and reports alike."""

from __future__ import annotations

__all__ = ["bytes_apart_in_words", "bytes_in_words", "counted"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_DIGITS = 12
"""Tell any two sizes of the largest unit apart that are told apart below it."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Such as `1 gather` or `3 gathers`; the plural is made with an s if none is given."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def bytes_in_words(nbytes: int, digits: int = 1) -> str:
    """A size such as `18 MiB` or `1.5 GiB`, in the largest unit of which there is one at least.

    Args:
        nbytes: the size.
        digits: how many may stand behind the point; zeros at the end are left out.
    """
    return _in_unit(nbytes, _power_of(nbytes), digits)


def bytes_apart_in_words(left: int, right: int) -> tuple[str, str]:
    """Two sizes in one unit, with as many digits as it takes to see that they differ."""
    power = _power_of(max(left, right))
    for digits in range(1, _MOST_DIGITS):
        words = _in_unit(left, power, digits), _in_unit(right, power, digits)
        if words[0] != words[1] or left == right:
            break
    return words


def _power_of(nbytes: int) -> int:
    return min((max(nbytes, 1).bit_length() - 1) // 10, len(_UNITS) - 1)


def _in_unit(nbytes: int, power: int, digits: int) -> str:
    number = f"{nbytes / 1024**power:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {_UNITS[power]}"
