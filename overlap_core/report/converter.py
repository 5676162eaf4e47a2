"""Reports as plain data and back, without conversions: a value of another type is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar, cast

from attrs import resolve_types
from cattrs import Converter, transform_error
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from overlap_core._json import strictly
from overlap_core.costs import Cost, CostRequest, CostSource, Dim, Machine
from overlap_core.graph import OverlapGraph, Size
from overlap_core.outcome import GatherOutcome
from overlap_core.placement import Coalesced
from overlap_core.ranks import Mode, Vote
from overlap_core.skeleton import SkeletonEntry

from .costs import CostEntry
from .report import Report, Section

__all__ = ["structure", "unstructure"]

_BY_HAND = ("graph", "costs", "requests")
"""Attributes that the file holds in another form."""
_TYPES: dict[str, Any] = {
    "Any": Any,
    "Coalesced": Coalesced,
    "Cost": Cost,
    "CostRequest": CostRequest,
    "GatherOutcome": GatherOutcome,
    "Machine": Machine,
    "Mapping": Mapping,
    "Mode": Mode,
    "OverlapGraph": OverlapGraph,
    "SkeletonEntry": SkeletonEntry,
    "Vote": Vote,
}
"""What annotations name that their own modules import for type checkers only."""
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def unstructure(value: object) -> Any:
    """A report, or an entry of its cost table, as plain data."""
    return _converter.unstructure(value)


def structure(value: object, target: type[T], place: str = "") -> T:
    """Plain data as what `unstructure` was given.

    Raises:
        ValueError: the data doesn't fit; begins with the place, which lies in `place`.
    """
    try:
        return _converter.structure(value, target)
    except BaseValidationError as error:
        reasons = transform_error(error, path=place, format_exception=_say)
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        reason, _, where = reasons[0].rpartition(" @ ")
        where = where.lstrip(".")
        raise ValueError(f"{where}: {reason}{more}" if where else f"{reason}{more}") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}" if place else str(error)) from None


def _say(error: BaseException, _: type | None) -> str:
    if isinstance(error, KeyError):
        return "this key is missing"
    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown key {min(error.extra_fields)!r}"
    return str(error)


def _structure_enum(value: object, target: type[E]) -> E:
    """Text enums are text too, so without this they would be taken for it."""
    try:
        return target(cast("str", value))
    except ValueError:
        raise ValueError(f"expected one of {', '.join(target)}, got {value!r:.60}") from None


def _structure_size(value: object, _: object) -> Size:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise ValueError(f"expected a size, got {value!r:.60}")


def _structure_dim(value: object, _: object) -> Dim:
    match value:
        case bool():
            pass
        case int():
            return value
        case ["~", None | int() as hint] if not isinstance(hint, bool):
            return ("~", hint)
    raise ValueError(f'expected an integer or ["~", hint], got {value!r:.60}')


def _structure_content(value: object, _: object) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"expected an object, got {value!r:.60}")


def _structure_float(value: object, _: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"expected a number, got {value!r:.60}")


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True)

    def structure_tuple(value: object, target: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, got {value!r:.60}")
        return tuple(converter.structure(value, list[target.__args__[0]]))

    for kind in (int, str, bool):
        converter.register_structure_hook(kind, strictly(kind))
    converter.register_structure_hook(float, _structure_float)
    for enum in (Mode, CostSource):
        converter.register_structure_hook(enum, _structure_enum)
    converter.register_structure_hook_func(lambda t: t == Size, _structure_size)
    converter.register_structure_hook_func(lambda t: t == Dim, _structure_dim)
    converter.register_structure_hook_func(
        lambda t: getattr(t, "__origin__", None) is tuple, structure_tuple
    )
    converter.register_structure_hook_func(lambda t: t == Mapping[str, Any], _structure_content)
    for cls in (Report, Section, CostEntry):
        resolve_types(cls, localns=_TYPES)
    omitted = {name: override(omit=True) for name in _BY_HAND}
    converter.register_structure_hook(
        Report,
        make_dict_structure_fn(Report, converter, _cattrs_forbid_extra_keys=True, **omitted),  # type: ignore[arg-type]
    )
    converter.register_unstructure_hook(
        Report,
        make_dict_unstructure_fn(Report, converter, **omitted),  # type: ignore[arg-type]
    )
    return converter


_converter = _make_converter()
