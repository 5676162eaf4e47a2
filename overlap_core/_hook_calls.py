"""Registering plugins with pluggy, and calling their implementations one at a time.

pluggy checks and collects; the calls are ours, because a hook called as a whole doesn't say
which plugin gave the answer or raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from . import hookspecs
from ._discovery import remedy
from .errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pluggy import HookImpl

    from ._discovery import Candidate

__all__ = ["HookCalls"]


class HookCalls:
    """All implementations in calling order: plugins by name, then built-ins by name.

    Raises:
        PluginError: a plugin implements a hook that doesn't exist or with other arguments, as a
            wrapper, without the mark, or implements none.
    """

    def __init__(self, candidates: tuple[Candidate, ...]) -> None:
        self._candidates = {candidate.name: candidate for candidate in candidates}
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
        try:
            return impl.function(*args, **kwargs)
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
            raise self.error(impl, hook, subject, problem) from error

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
