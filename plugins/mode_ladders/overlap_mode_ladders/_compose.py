"""A ladder from predicates over the votes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from overlap_core import hookimpl
from overlap_core.errors import ConfigError, PluginError
from overlap_core.ranks.votes import Mode, ModeDecision, Vote

from ._limits import allowed, at_most

if TYPE_CHECKING:
    from typing import Any

__all__ = ["Predicate", "Rule", "compose"]

Predicate: TypeAlias = Callable[[tuple[Vote, ...]], bool]
"""A question about all votes of a scope, sorted by rank; it may look at nothing else."""

Rule: TypeAlias = tuple[Predicate, Mode | str, str]
"""Where the predicate holds: this mode at most, for this reason."""

_HOOK = "overlap_choose_mode"
_RESERVED = ("default", _HOOK)


def compose(name: str, rules: Iterable[Rule]) -> Callable[[tuple[Vote, ...]], ModeDecision]:
    """Make the ladder `name` from rules `(predicate, mode, why)`.

    The first rule whose predicate is True counts, and no further one is asked. It can only hold
    back: where the votes allow less than its mode, the decision of `default` stands, as it does
    where no rule applies. A rule with mode `identical` thus exempts from the rules after it.

    Args:
        name: what `OverlapConfig(mode_ladder=...)` will say; an identifier.
        rules: in order of precedence. Each `why` goes into the report.

    Returns:
        A marked function. Put it into your plugin's module, under any name but a hook's.

    Raises:
        ConfigError: a name or a rule can't be used.
        PluginError: from the ladder itself, if a predicate returns anything but True or False.
    """
    _check_name(name)
    checked = tuple(_check(name, number, rule) for number, rule in enumerate(rules, 1))

    @hookimpl(specname=_HOOK)
    def ladder(votes: tuple[Vote, ...]) -> ModeDecision:
        votes = tuple(sorted(votes, key=lambda vote: vote.rank))
        limit = allowed(votes)
        for number, (predicate, mode, why) in enumerate(checked, 1):
            if _holds(f"ladder {name!r}, rule {number}", predicate, votes):
                return at_most(limit, mode, f"{name}: {why}")
        return limit

    ladder.__name__ = ladder.__qualname__ = name
    ladder.__doc__ = "\n".join(
        ("Composed; at most:", *(f"- {mode} if {why}" for _, mode, why in checked))
    )
    return ladder


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
        raise ConfigError(
            f"compose({name!r}, ...): expected an identifier other than {' and '.join(_RESERVED)} "
            "as the ladder's name"
        )


def _check(name: str, number: int, rule: Any) -> tuple[Predicate, Mode, str]:
    where = f"compose({name!r}, ...), rule {number}"
    if not isinstance(rule, (tuple, list)) or len(rule) != 3:
        raise ConfigError(f"{where} is {rule!r}: expected (predicate, mode, why)")
    predicate, mode, why = rule
    if not callable(predicate):
        raise ConfigError(f"{where}: {predicate!r} is no predicate; expected a function of votes")
    if mode not in tuple(Mode):
        raise ConfigError(f"{where}: {mode!r} is no mode; expected one of {', '.join(Mode)}")
    if not isinstance(why, str) or not why.strip():
        raise ConfigError(f"{where}: {why!r} is no reason; the report needs one in words")
    return predicate, Mode(mode), why


def _holds(where: str, predicate: Predicate, votes: tuple[Vote, ...]) -> bool:
    answer = predicate(votes)
    # A forgotten `return` must not read as "does not apply": that would be the freer reading.
    if not isinstance(answer, bool):
        raise PluginError(f"{where}: its predicate returned {answer!r}: expected True or False")
    return answer
