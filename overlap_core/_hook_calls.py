"""Registering plugins with pluggy, and calling their implementations one at a time.

pluggy checks and collects; the calls are ours, because a hook called as a whole doesn't say
which plugin gave the answer or raised.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import pluggy

from . import hookspecs
from ._bounded import StillRunningError, run_bounded
from ._clock import REAL_CLOCK, Clock
from ._discovery import remedy
from .errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pluggy import HookImpl

    from ._discovery import Candidate

__all__ = ["HookCalls"]

T = TypeVar("T")


class HookCalls:
    """All implementations in calling order: plugins by name, then built-ins by name.

    A plugin that takes longer than `limit_s` seconds, in one call or in all calls of one
    `bounded` block, is at fault as if it had raised.

    Raises:
        PluginError: a plugin implements a hook that doesn't exist or with other arguments, as a
            wrapper, without the mark, or implements none.
    """

    def __init__(
        self, candidates: tuple[Candidate, ...], limit_s: float, clock: Clock = REAL_CLOCK
    ) -> None:
        self._candidates = {candidate.name: candidate for candidate in candidates}
        self._limit_s = limit_s
        self._clock = clock
        self._block = _Block()
        manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        manager.add_hookspecs(hookspecs)
        self._specs = sorted(name for name in vars(manager.hook) if name.startswith("overlap_"))
        for candidate in candidates:
            self._register(manager, candidate)
        position = {candidate.name: number for number, candidate in enumerate(candidates)}

        def order(impl: HookImpl) -> tuple[bool, int, int, str]:
            half = self._candidates[impl.plugin_name].builtin
            wish = impl.trylast - impl.tryfirst
            return half, wish, position[impl.plugin_name], function_name(impl)

        self._impls = {
            name: tuple(sorted(getattr(manager.hook, name).get_hookimpls(), key=order))
            for name in self._specs
        }

    def of(self, hook: str) -> tuple[HookImpl, ...]:
        """A hook's implementations in calling order."""
        return self._impls[hook]

    def hooks_of(self, plugin_name: str) -> tuple[str, ...]:
        """Names of the hooks that a plugin implements, sorted."""
        return tuple(
            hook
            for hook, impls in self._impls.items()
            if any(impl.plugin_name == plugin_name for impl in impls)
        )

    def answers(
        self, hook: str, subject: str, **values: object
    ) -> Iterator[tuple[HookImpl, object]]:
        """Answers other than None with who gave them, made one by one as they are asked for."""
        for impl in self._impls[hook]:
            answer = self.call(impl, hook, subject, **values)
            if answer is not None:
                yield impl, answer

    def call(self, impl: HookImpl, hook: str, subject: str, **values: object) -> object:
        """Call one implementation; whatever `Exception` it raises becomes a `PluginError`."""
        args = [values[name] for name in impl.argnames]
        kwargs = {name: values[name] for name in impl.kwargnames if name in values}

        def invoke() -> object:
            try:
                return impl.function(*args, **kwargs)
            except Exception as error:
                problem = f"raised {type(error).__name__}: {error}"
                raise self.error(impl, hook, subject, problem) from error

        if self._candidates[impl.plugin_name].builtin:
            return invoke()
        if not self._block.active:
            return self.bounded(lambda: self.call(impl, hook, subject, **values))
        calls = self._block.calls
        with calls.timed(impl, hook, subject):
            answer = invoke()
        if calls.spent_s[impl.plugin_name] > self._limit_s:
            raise self._too_slow(impl, hook, subject)
        return answer

    def bounded(self, function: Callable[[], T]) -> T:
        """Run code that calls many hooks, so that no plugin can hold it up for ever.

        Raises:
            PluginError: from the code, or since a plugin took too long.
        """
        calls = _Calls(self._clock)

        def run() -> T:
            self._block.calls = calls
            self._block.active = True
            return function()

        try:
            return run_bounded(run, lambda: calls.current_s() > self._limit_s)
        except StillRunningError:
            current = calls.current
            if current is None:  # it has returned just now; the next call would have failed
                raise PluginError(
                    f"a plugin took more than {self._limit_s:g} s (plugin_timeout_s)"
                ) from None
            raise self._too_slow(*current[:3], returned=False) from None

    def _too_slow(
        self, impl: HookImpl, hook: str, subject: str, *, returned: bool = True
    ) -> PluginError:
        took = "took more than" if returned else "has not returned for"
        problem = f"{took} {self._limit_s:g} s (plugin_timeout_s in OverlapConfig)"
        return self.error(impl, hook, subject, problem)

    def wrong_type(
        self, impl: HookImpl, hook: str, subject: str, got: object, wanted: str
    ) -> PluginError:
        """The error for an answer that is not what the hook's specification says."""
        shown = repr(got)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        problem = f"returned {shown} of type {type(got).__name__}: expected {wanted}"
        return self.error(impl, hook, subject, problem)

    def error(self, impl: HookImpl, hook: str, subject: str, problem: str) -> PluginError:
        """An error that names plugin, hook and subject, and says what to do."""
        plugin = self._candidates[impl.plugin_name]
        where = f" on {subject}" if subject else ""
        advice = "report this bug" if plugin.essential else f"fix it, or {remedy(plugin.name)}"
        name = f"{plugin.name!r} {plugin.version}".rstrip()
        return PluginError(f"plugin {name}, hook {hook}{where}: {problem}. To go on, {advice}")

    def _register(self, manager: pluggy.PluginManager, candidate: Candidate) -> None:
        plugin, who = candidate.plugin, f"plugin {candidate.name!r}"
        if candidate.distribution:
            who += f" of {candidate.distribution} {candidate.version}".rstrip()
        try:
            manager.register(plugin, name=candidate.name)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(
                f"{who} can't be registered: {' '.join(str(error).split())}. The hooks, with their "
                f"arguments, are those of overlap_core.hookspecs ({', '.join(self._specs)}); fix "
                f"the plugin, or {remedy(candidate.name)}"
            ) from error
        impls = [
            impl
            for caller in manager.get_hookcallers(plugin) or ()
            for impl in caller.get_hookimpls()
            if impl.plugin is plugin
        ]
        for impl in impls:
            if impl.wrapper or impl.hookwrapper:
                raise PluginError(
                    f"{who} has {function_name(impl)} as a hook wrapper: wrappers are refused, "
                    "since they hide which plugin gave an answer; use a plain implementation"
                )
        marked = {function_name(impl) for impl in impls}
        for name in self._specs:
            if name not in marked and callable(getattr(plugin, name, None)):
                raise PluginError(
                    f"{who} has a function {name} that is not marked: put @overlap_core.hookimpl "
                    "on it, or give it another name"
                )
        if not impls:
            raise PluginError(
                f"{who} implements no hook: mark its functions with @overlap_core.hookimpl, or "
                f"{remedy(candidate.name)}"
            )


def function_name(impl: HookImpl) -> str:
    """The name of the function that implements a hook, which `specname` may make another one."""
    return str(getattr(impl.function, "__name__", ""))


class _Calls:
    """How long each plugin took in one block, and which call is going on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.spent_s: dict[str, float] = {}
        self.current: tuple[HookImpl, str, str, float] | None = None

    @contextmanager
    def timed(self, impl: HookImpl, hook: str, subject: str) -> Iterator[None]:
        start = self._clock.now()
        self.current = (impl, hook, subject, start)
        try:
            yield
        finally:
            spent = self.spent_s.get(impl.plugin_name, 0.0)
            self.spent_s[impl.plugin_name] = spent + self._clock.now() - start
            self.current = None

    def current_s(self) -> float:
        current = self.current
        return 0.0 if current is None else self._clock.now() - current[3]


class _Block(threading.local):
    """Whether this thread is inside of a bounded block."""

    active = False
    calls: _Calls
