"""What a test may leave behind: settings of torch, the environment, ops, the installed pass.

Looks only at what is loaded already: a process that never imported torch stays without it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from overlap_core.registry import registry_digest
from overlap_core.session import session

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["CHECKS", "ProcessState", "find_leaks"]

_CONFIGS = ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config")
_PREFIXES = ("OVERLAP_", "TORCH")
_SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables that torch sets for its own child processes, unless they are set."""
_SHOWN = 200

CHECKS = ("torch config", "environment", "op registry", "installed pass")
"""What is looked at."""


@frozen(kw_only=True)
class ProcessState:
    """A picture of all of it, for `find_leaks`."""

    configs: Mapping[str, Mapping[str, Any]] = field(repr=False)
    environment: Mapping[str, str]
    registry: str
    installed: tuple[object, ...]

    @classmethod
    def now(cls) -> ProcessState:
        """Take the picture; torch's configuration is that of this thread."""
        loaded = {name: sys.modules[name] for name in _CONFIGS if name in sys.modules}
        return cls(
            configs={name: dict(module.get_config_copy()) for name, module in loaded.items()},
            environment={k: v for k, v in os.environ.items() if k.startswith(_PREFIXES)},
            registry=registry_digest(),
            installed=tuple(session.kept.passes),
        )

    def restore(self) -> None:
        """Set torch's configuration and the environment back; what was loaded since stays."""
        for name, values in self.configs.items():
            module: Any = sys.modules[name]
            now = module.get_config_copy()
            for key, value in values.items():
                if key not in now or not _equal(value, now[key]):
                    setattr(module, key, value)
        for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
            if name not in self.environment:
                del os.environ[name]
        os.environ.update(self.environment)


def find_leaks(
    before: ProcessState, after: ProcessState, ignore: Iterable[str] = ()
) -> tuple[str, ...]:
    """One line for each difference; empty if there is none.

    Args:
        before, after: from `ProcessState.now`. Torch's settings are compared where they were
            loaded before.
        ignore: members of `CHECKS` to leave out.
    """
    skipped = set(ignore)
    if unknown := sorted(skipped - set(CHECKS)):
        raise ValueError(f"ignore={unknown}: expected some of {', '.join(CHECKS)}")
    lines: dict[str, list[str]] = {check: [] for check in CHECKS}
    for name, values in before.configs.items():
        lines["torch config"] += _differences(f"{name}.", values, after.configs.get(name, {}))
    environment = dict(after.environment)
    for name in _SET_BY_TORCH:
        if name not in before.environment:
            environment.pop(name, None)
    lines["environment"] += _differences("os.environ ", before.environment, environment)
    if before.registry != after.registry:
        lines["op registry"].append("ops were registered, or registered ones changed")
    if [*map(id, before.installed)] != [*map(id, after.installed)]:
        lines["installed pass"].append(
            f"the pass was installed {len(before.installed)} times and is now "
            f"{len(after.installed)} times: call overlap_core.disable(), or use enabled()"
        )
    return tuple(
        f"{check}: {line}" for check in CHECKS if check not in skipped for line in lines[check]
    )


_ABSENT = object()


def _differences(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in sorted({*old, *new}):
        was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was is not now and not _equal(was, now):
            lines.append(f"{prefix}{key} was {_words(was)} and is now {_words(now)}")
    return lines


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a value that can't be compared to another is not that other
        return False


def _words(value: object) -> str:
    text = "not set" if value is _ABSENT else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
