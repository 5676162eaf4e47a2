"""Custom ops that the pass knows more about than torch tells it.

The registry is process-wide, since torch's ops are. An op's entry says how to make consistent
replay inputs for it (`materialize_inputs`) and whether it communicates inside
(`has_internal_collective`).

Entries only grow. A flag that was ever True stays True, and a hook that was ever given stays:
the careful reading wins, whatever was imported first. A second, different hook is refused.

Beside what is declared stands what was seen: ops that called torch.distributed while they were
replayed count as communicating from then on.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

from attrs import evolve, frozen

from .errors import RegistrationError
from .session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tag
    from torch.library import CustomOpDef  # type: ignore[attr-defined,unused-ignore]

    MaterializeInputs = Callable[..., tuple[Any, ...] | list[Any] | None]

__all__ = [
    "OpEntry",
    "OpRegistry",
    "apply_materialize_inputs",
    "canonical_op_name",
    "get_materialize_inputs_hook",
    "is_declared",
    "is_registered",
    "note_communicating",
    "note_compiled",
    "op_has_internal_collective",
    "op_was_seen_communicating",
    "register_custom_op",
    "register_materialize_inputs",
    "registered_ops",
    "registry_digest",
]

_OP_NAME = re.compile(r"(?:torch\.ops\.)?([A-Za-z_]\w*)(?:::|\.)([A-Za-z_]\w*)(?:\.(\w+))?")


@frozen(kw_only=True)
class OpEntry:
    """What is registered of one op."""

    materialize_inputs: MaterializeInputs | None = None
    has_internal_collective: bool = False
    owner: str | None = None
    """Who gave the hook, or registered first: a plugin's name, or None for other code."""
    batch: object = None
    """Identity of the `OpRegistry` through which it came; a later one may replace the hook."""


logger = logging.getLogger(__name__)


@lru_cache(maxsize=4096)
def canonical_op_name(op_name: str) -> str | None:
    """Bring any way to write an op's name to `ns::op`, without its overload.

    `ns::op`, `ns.op`, `ns::op.default`, `ns.op.out` and each with `torch.ops.` before it are
    understood; None for anything else, such as the name of a fused kernel.
    """
    match = _OP_NAME.fullmatch(op_name)
    return f"{match[1]}::{match[2]}" if match else None


def _checked_name(op_name: object) -> str:
    match = _OP_NAME.fullmatch(op_name) if isinstance(op_name, str) else None
    if match is None:
        raise RegistrationError(
            f"cannot register op {op_name!r}: expected a name such as 'mylib::attn' "
            "(namespace and op, both identifiers)"
        )
    if match[3] not in (None, "default"):
        raise RegistrationError(
            f"cannot register op {op_name!r}: register the op itself, "
            f"'{match[1]}::{match[2]}', not its overload {match[3]!r}"
        )
    return f"{match[1]}::{match[2]}"


def _describe(function: object) -> str:
    """`module:qualname`, or the type's for a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', '?')}"


def _same(old: object, new: object) -> bool:
    """Whether two hooks are one function, perhaps from two imports of its module."""
    if old is new:
        return True
    codes = [getattr(function, "__code__", None) for function in (old, new)]
    if None in codes or _describe(old) != _describe(new):
        return False
    if "<" not in _describe(old):
        return True
    # Lambdas and local functions share qualified names; the place tells them apart.
    places = [(code.co_filename, code.co_firstlineno) for code in codes]  # type: ignore[union-attr]
    return places[0] == places[1]


def _merged(name: str, hook: object, flag: object, *, owner: str | None, batch: object) -> OpEntry:
    """The op's entry with a registration added to it, if it fits."""
    if hook is not None and not callable(hook):
        raise RegistrationError(
            f"cannot register op {name!r}: materialize_inputs={hook!r} is not a function; "
            "expected one with the op's own signature"
        )
    if not isinstance(flag, bool):
        raise RegistrationError(
            f"cannot register op {name!r}: has_internal_collective={flag!r}: expected True or False"
        )
    old = session.kept.ops.get(name, OpEntry())
    entry = evolve(old, has_internal_collective=flag or old.has_internal_collective)
    if hook is None:
        return evolve(entry, owner=owner) if name not in session.kept.ops else entry
    known = old.materialize_inputs
    # What a plugin registered at an earlier discovery, it may register anew.
    anew = owner is not None and owner == old.owner and batch is not old.batch
    if known is not None and not anew and not _same(known, hook):
        raise RegistrationError(
            f"op {name!r} is already registered with materialize_inputs {_describe(known)}; "
            f"{_describe(hook)} is another one. Keep one of the two registrations"
        )
    return evolve(entry, materialize_inputs=hook, owner=owner, batch=batch)


def _add(
    op_name: object, hook: object, flag: object, owner: str | None = None, batch: object = None
) -> None:
    name = _checked_name(op_name)
    with session.lock:
        old = session.kept.ops.get(name, OpEntry())
        new = session.kept.ops[name] = _merged(name, hook, flag, owner=owner, batch=batch)
        late = name in session.learned.compiled and not _says_the_same(old, new)
    if late:
        logger.warning(
            "op %r is registered after a graph that uses it was compiled: that graph was ordered "
            "without this knowledge. Register the op before the first compiled call",
            name,
        )


def _says_the_same(old: OpEntry, new: OpEntry) -> bool:
    return old.has_internal_collective == new.has_internal_collective and (
        (old.materialize_inputs is None) == (new.materialize_inputs is None)
    )


class OpRegistry:
    """What `overlap_register_ops` receives. Errors name the plugin that it belongs to."""

    def __init__(self, owner: str | None = None) -> None:
        self.owner = owner

    def register(
        self,
        op_name: str,
        materialize_inputs: MaterializeInputs | None = None,
        has_internal_collective: bool = False,
    ) -> None:
        """Register an op that exists or will exist in torch.

        Raises:
            RegistrationError: the name is malformed, or the op has another hook already.
        """
        _add(op_name, materialize_inputs, has_internal_collective, self.owner, self)


@overload
def register_materialize_inputs(
    op_name: str, fn: None = None, *, has_internal_collective: bool = False
) -> Callable[[MaterializeInputs], MaterializeInputs]: ...
@overload
def register_materialize_inputs(
    op_name: str, fn: MaterializeInputs, *, has_internal_collective: bool = False
) -> MaterializeInputs: ...
def register_materialize_inputs(
    op_name: str, fn: MaterializeInputs | None = None, *, has_internal_collective: bool = False
) -> MaterializeInputs | Callable[[MaterializeInputs], MaterializeInputs]:
    """Tell the pass about an op that somebody else defined; a call and a decorator in one.

    The flag counts from the call on, so `register_materialize_inputs("ns::op",
    has_internal_collective=True)` is complete without a function.

    Returns:
        `fn` as it is; without it a decorator, which returns its function as it is.

    Raises:
        RegistrationError: the name is malformed, or the op has another hook already.
    """
    _add(op_name, fn, has_internal_collective)
    if fn is not None:
        return fn

    def decorate(function: MaterializeInputs) -> MaterializeInputs:
        _add(op_name, function, has_internal_collective)
        return function

    return decorate


def register_custom_op(
    name: str,
    *,
    materialize_inputs: MaterializeInputs | None = None,
    has_internal_collective: bool = False,
    mutates_args: str | Iterable[str] = (),
    device_types: str | Sequence[str] | None = None,
    schema: str | None = None,
    tags: Tag | Sequence[Tag] | None = None,
) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Define a custom op in torch and tell the pass about it: `torch.library.custom_op` and more.

    The decorated function becomes torch's `CustomOpDef`, so `.register_fake` and
    `.register_autograd` work as usual. `materialize_inputs` has the op's own signature; it is
    called with generic arguments and returns positional ones whose values are consistent, or
    None to keep the generic ones. `mutates_args`, `device_types`, `schema` and `tags` are
    torch's.

    Raises:
        RegistrationError: the name is malformed, the op has another hook already, or the hook
            doesn't take the op's arguments.
    """
    op_name = _checked_name(name)

    def decorate(function: Callable[..., object]) -> CustomOpDef:
        import torch

        if materialize_inputs is not None:
            _check_signature(op_name, function, materialize_inputs)
        with session.lock:  # refuse before torch defines anything
            _merged(op_name, materialize_inputs, has_internal_collective, owner=None, batch=None)
        op = torch.library.custom_op(
            op_name,
            function,
            mutates_args=mutates_args,
            device_types=device_types,
            schema=schema,
            tags=tags,
        )
        _add(op_name, materialize_inputs, has_internal_collective)
        return op

    return decorate


def _check_signature(op_name: str, function: object, hook: object) -> None:
    if not callable(hook) or not callable(function):
        return  # `_add` and torch say it better
    try:
        takes = inspect.signature(hook)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return  # a builtin without a signature
    keywords = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        takes.bind(*[p for p in parameters if p.name not in keywords], **keywords)
    except TypeError as error:
        raise RegistrationError(
            f"op {op_name!r}: materialize_inputs {_describe(hook)}{takes} does not take the op's "
            f"arguments {inspect.signature(function)}: {error}. Give it the op's own signature"
        ) from None


def get_materialize_inputs_hook(op_name: str) -> MaterializeInputs | None:
    """The replay-input hook registered for an op, under any way to write its name.

    None: there is none, because the op isn't registered, or without one.
    """
    entry = session.kept.ops.get(canonical_op_name(op_name) or "")
    return entry.materialize_inputs if entry else None


def op_has_internal_collective(op_name: str) -> bool:
    """Whether an op is registered, or was seen, to communicate inside.

    Any way to write its name is understood.
    """
    return is_declared(op_name) or op_was_seen_communicating(op_name)


def is_declared(op_name: str) -> bool:
    """Whether an op is registered as communicating inside."""
    entry = session.kept.ops.get(canonical_op_name(op_name) or "")
    return entry is not None and entry.has_internal_collective


def is_registered(op_name: str) -> bool:
    """Whether somebody has said of an op whether it communicates inside."""
    return canonical_op_name(op_name) in session.kept.ops


def op_was_seen_communicating(op_name: str) -> bool:
    """Whether an op called torch.distributed while it was replayed, whatever is declared."""
    return canonical_op_name(op_name) in session.learned.communicating


def note_communicating(op_names: Iterable[str]) -> tuple[str, ...]:
    """Remember ops that were seen to communicate; returns those that nobody knew of, sorted."""
    names = {name for name in map(canonical_op_name, op_names) if name is not None}
    with session.lock:
        new = {name for name in names if not op_has_internal_collective(name)}
        session.learned.communicating.update(names)
    return tuple(sorted(new))


def note_compiled(op_names: Iterable[str]) -> None:
    """Remember opaque ops of a graph, so that a later registration can say that it is late."""
    names = {name for name in map(canonical_op_name, op_names) if name is not None}
    session.learned.compiled.update(names)


def registered_ops() -> tuple[tuple[str, str | None], ...]:
    """Names of all registered ops, sorted, each with the plugin that registered it, if one did."""
    with session.lock:
        return tuple((name, session.kept.ops[name].owner) for name in sorted(session.kept.ops))


def apply_materialize_inputs(
    hook: MaterializeInputs, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a hook with generic arguments and return `(args, kwargs)` for the replay.

    None from the hook keeps the generic values. A tuple or list becomes the positional
    arguments; keyword arguments that the hook could have taken by position are covered by it,
    the others are kept.

    Raises:
        RegistrationError: the hook returned something else; names the hook and the type.
    """
    result = hook(*args, **kwargs)
    if result is None:
        return tuple(args), dict(kwargs)
    if not isinstance(result, (tuple, list)):
        raise RegistrationError(
            f"materialize_inputs hook {_describe(hook)} returned {type(result).__name__}: expected "
            "None, or a tuple or list of positional arguments"
        )
    try:
        parameters = dict(inspect.signature(hook).parameters)
    except (TypeError, ValueError):
        parameters = {}
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    covered = {name for name, p in parameters.items() if p.kind is by_position}
    return tuple(result), {name: v for name, v in kwargs.items() if name not in covered}


def registry_digest() -> str:
    """Hex digest of what is registered (names, whether with a hook, flags), for the votes."""
    with session.lock:
        rows = sorted(
            (name, entry.materialize_inputs is not None, entry.has_internal_collective)
            for name, entry in session.kept.ops.items()
        )
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
