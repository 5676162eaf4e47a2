"""Configuration of one installation of the pass."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from attrs import asdict, field, frozen

from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attrs import Attribute

__all__ = [
    "OverlapConfig",
    "check_config",
    "disabled_by_environment",
    "plugins_disabled_by_environment",
]

_MOST_BITS = 63


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not write integers of thousands of digits
        return "..."


def _refused(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"OverlapConfig({name}={_shown(value)}): expected {expected}")


def _at_least(low: float, *, whole: bool = False, optional: bool = False) -> Any:
    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and (optional or attribute.default is None):
            return
        good = _is_whole(value) or (not whole and isinstance(value, float) and math.isfinite(value))
        if not good or value < low:  # type: ignore[operator]  # it is a number by now
            kind = "an integer" if whole else "a number"
            raise _refused(attribute.name, value, f"{kind} of at least {low}{_width(value)}")

    return check


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer that others can hold as well: graph and report files, and C."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value.bit_length() <= _MOST_BITS


def _width(value: object) -> str:
    """For messages: the upper bound, if that is what the value breaks."""
    wide = isinstance(value, int) and value.bit_length() > _MOST_BITS
    return f" and below 2**{_MOST_BITS}" if wide else ""


def _is_bool(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise _refused(attribute.name, value, "True or False")


def _is_name(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _refused(attribute.name, value, "a non-empty name")


def _is_one_of(*choices: str) -> Any:
    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value not in choices:
            raise _refused(attribute.name, value, f"one of {', '.join(choices)}")

    return check


def _is_path(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise _refused(attribute.name, value, "a path as text")


def _is_coalescing(instance: object, attribute: Attribute[Any], value: object) -> None:
    if value not in ("auto", "off") and not (_is_whole(value) and value >= 1):
        expected = f"'auto', 'off' or a number of bytes{_width(value)}"
        raise _refused(attribute.name, value, expected)


def _names(value: object) -> object:
    """Accept any list of names; order and repetition mean nothing, so drop them."""
    names = None if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if names is None or not all(isinstance(name, str) for name in names):
        raise _refused("disable_plugins", value, "a list of names")
    return tuple(sorted(set(names)))


@frozen(kw_only=True)
class OverlapConfig:
    """How the pass behaves. Equal on all ranks, or the ranks abort together and say so.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    enabled: bool = field(default=True, validator=_is_bool)
    """False keeps every graph in program order, without negotiating."""
    mode_ladder: str = field(default="default", validator=_is_name)
    """Name of the ladder that `overlap_choose_mode` implementations answer to."""
    disable_plugins: tuple[str, ...] = field(default=(), converter=_names)
    """Names of plugins to leave out, beside those in `OVERLAP_CORE_DISABLE_PLUGINS`."""
    contention: float | None = field(default=None, validator=_at_least(1))
    """A gather beside compute takes this many times its time alone; None: as measured on GPUs
    while compiling, 1.5 elsewhere."""
    slack_ns: int = field(default=50_000, validator=_at_least(0, whole=True))
    """Extra nanoseconds between the predicted end of a gather and its wait."""
    max_in_flight_bytes: int | None = field(default=None, validator=_at_least(1, whole=True))
    """Most bytes of gathered weights between launch and wait on one rank; None: twice the largest
    region."""
    max_peak_growth: float | None = field(default=0.05, validator=_at_least(0, optional=True))
    """By how much the peak of memory may grow over program order's, as a share of it; growing by
    32 MiB is always allowed. None: as much as `max_in_flight_bytes` lets it."""
    coalesce: str | int = field(default="auto", validator=_is_coalescing)
    """Gathers of a region, of one group and dtype, become one call. `auto`: regions of a size
    that pays by measured costs, none where the host costs nothing; a number: regions of so many
    bytes; `off`: each gather is a call of its own."""
    costs: str = field(default="measured", validator=_is_one_of("measured", "analytical"))
    """`measured` times each kind of op once while compiling; `analytical` never times anything."""
    cost_table_path: str | None = field(default=None, validator=_is_path)
    """File in which measured costs are kept for the next start; None: nowhere."""
    max_replay_bytes: int = field(default=1 << 30, validator=_at_least(0, whole=True))
    """Most bytes of arguments that one op may get for its measurement."""
    plugin_timeout_s: float = field(default=60.0, validator=_at_least(0.001))
    """Longest time in seconds that one plugin may take for one graph; then it is at fault."""
    warm_start: bool = field(default=True, validator=_is_bool)
    """Keep what was agreed on, and use Inductor's caches, for the next start of the job."""
    plan_dir: str | None = field(default=None, validator=_is_path)
    """Folder in which agreements are kept; None: what `OVERLAP_CORE_PLAN_DIR` says, else one in
    Inductor's cache folder."""
    deadline_s: float = field(default=300.0, validator=_at_least(0.001))
    """Longest time in seconds that one negotiation may take before program order is kept."""
    recompile_deadline_s: float = field(default=30.0, validator=_at_least(0.001))
    """The same for a graph of a function that was compiled before: peers may never come."""

    def digest(self) -> str:
        """Hex digest over the values that ranks must share; they compare it in their votes.

        Where a rank keeps its files is its own affair: ranks compare what they loaded.
        """
        values = asdict(self)
        for place in ("cost_table_path", "plan_dir"):
            del values[place]
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def check_config(config: object) -> OverlapConfig:
    """The configuration, for whoever takes one from a user.

    Raises:
        ConfigError: it is something else, such as a dict of its fields.
    """
    if isinstance(config, OverlapConfig):
        return config
    raise ConfigError(
        f"config: expected an OverlapConfig, got {type(config).__name__} {_shown(config)}; "
        "write OverlapConfig(...) with its fields by name"
    )


def disabled_by_environment(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `OVERLAP_CORE=0` switches everything off.

    Raises:
        ConfigError: the variable has a value other than empty, 0 or 1.
    """
    value = environ.get("OVERLAP_CORE", "").strip()
    if value not in ("", "0", "1"):
        raise ConfigError(f"OVERLAP_CORE={value!r} in the environment: expected 0 or 1")
    return value == "0"


def plugins_disabled_by_environment(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names listed in `OVERLAP_CORE_DISABLE_PLUGINS`, sorted, without empty ones."""
    names = environ.get("OVERLAP_CORE_DISABLE_PLUGINS", "").split(",")
    return tuple(sorted({name.strip() for name in names} - {""}))
