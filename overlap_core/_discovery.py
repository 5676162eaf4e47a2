"""Finding plugins: built-ins, entry points and given objects, checked before they are loaded.

The order is decided by names alone, never by the order of installation or of arguments: ranks
whose plugins were installed differently must still call them alike.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache, lru_cache
from importlib import metadata
from typing import TYPE_CHECKING

from attrs import frozen
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .config import plugins_disabled_by_environment
from .errors import ConfigError, PluginError
from .hookspecs import PROJECT_NAME

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from .config import OverlapConfig

__all__ = ["DISABLE_VARIABLE", "Candidate", "core_version", "find_plugins", "remedy"]

DISABLE_VARIABLE = "OVERLAP_CORE_DISABLE_PLUGINS"
_DISTRIBUTION = "overlap-core"
_NAME = re.compile(r"[A-Za-z_][\w.-]*")

_BUILTINS = {
    "analytical_costs": "overlap_core.builtin.costs",
    "default_ladder": "overlap_core.builtin.ladder",
    "functional_collectives": "overlap_core.builtin.collectives",
    "replay": "overlap_core.builtin.replay",
}
_ESSENTIAL = ("analytical_costs", "default_ladder", "functional_collectives")


@frozen(kw_only=True)
class Candidate:
    """A plugin that was found, loaded, and not left out."""

    name: str
    plugin: object
    version: str
    distribution: str
    """Empty for a plugin that was given as an object."""
    builtin: bool = False
    essential: bool = False


@cache
def core_version() -> str:
    """Version of the installed `overlap-core`."""
    return metadata.version(_DISTRIBUTION)


def remedy(name: str) -> str:
    """How to do without a plugin."""
    return f"leave it out with {DISABLE_VARIABLE}={name} or OverlapConfig(disable_plugins=...)"


def find_plugins(
    config: OverlapConfig,
    given: Iterable[object],
    environ: Mapping[str, str],
    installed: Collection[str] | None = None,
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """All plugins in calling order (third-party by name, then built-ins by name), and notes.

    `installed` names the installed plugins to look at; None: all of them.

    Raises:
        ConfigError: a plugin to leave out is unknown, or essential.
        PluginError: two plugins share a name, or one can't be loaded or needs another version, or
            none of a name in `installed` is there.
    """
    entry_points = sorted(metadata.entry_points(group=PROJECT_NAME), key=_entry_point_key)
    if installed is not None:
        entry_points = _only(entry_points, installed)
    objects = _name_given(given)
    known = {*_BUILTINS, *(point.name for point in entry_points), *objects}
    disabled = _disabled(config, environ, known)
    entry_points = [point for point in entry_points if point.name not in disabled]
    _refuse_duplicates(entry_points)
    notes = [note for point in entry_points if (note := _check_requirement(point))]

    found = {point.name: _load(point) for point in entry_points}
    loaded = [candidate.plugin for candidate in found.values()]
    for name, plugin in objects.items():
        if name in disabled or any(plugin is other for other in loaded):
            continue
        _refuse_clash(name, plugin, found)
        found[name] = _from_object(name, plugin)
    builtins = [_builtin(name) for name in sorted(_BUILTINS) if name not in disabled]
    return (*(found[name] for name in sorted(found)), *builtins), tuple(notes)


def _only(
    entry_points: list[metadata.EntryPoint], names: Collection[str]
) -> list[metadata.EntryPoint]:
    known = sorted({point.name for point in entry_points})
    for name in names:
        if name not in known:
            raise PluginError(
                f"no plugin named {name!r} is installed; installed are: "
                f"{', '.join(known) or 'none'}"
            )
    return [point for point in entry_points if point.name in names]


def _entry_point_key(point: metadata.EntryPoint) -> tuple[str, str, str]:
    return point.name, _distribution_name(point), point.value


@lru_cache(maxsize=64)
def _read(distribution: metadata.Distribution | None) -> Mapping[str, list[str]]:
    """All headers of a distribution, which Python would parse again for each single one."""
    if distribution is None:
        return {}
    headers = distribution.metadata
    return {key.lower(): headers.get_all(key) or [] for key in headers}


def _header(point: metadata.EntryPoint, key: str) -> str:
    return next(iter(_read(point.dist).get(key, ())), "")


def _distribution_name(point: metadata.EntryPoint) -> str:
    return _header(point, "name") or "unknown distribution"


def _disabled(config: OverlapConfig, environ: Mapping[str, str], known: set[str]) -> set[str]:
    by_source = {
        "OverlapConfig(disable_plugins=...)": config.disable_plugins,
        f"{DISABLE_VARIABLE} in the environment": plugins_disabled_by_environment(environ),
    }
    for source, names in by_source.items():
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{source} names {name!r}, which is no plugin here; known plugins: "
                    f"{', '.join(sorted(known))}"
                )
            if name in _ESSENTIAL:
                raise ConfigError(
                    f"{source} names {name!r}, which is essential and can't be left out; a plugin "
                    "that implements the same hooks is asked before it"
                )
    return {name for names in by_source.values() for name in names}


def _refuse_duplicates(entry_points: list[metadata.EntryPoint]) -> None:
    owners: dict[str, str] = {}
    for point in entry_points:
        owner = f"{_distribution_name(point)} ({point.value})"
        if point.name in _BUILTINS:
            raise PluginError(
                f"plugin {point.name!r} of {owner} has the name of a built-in plugin: uninstall "
                f"{_distribution_name(point)}, or ask its author for another entry-point name"
            )
        if point.name in owners:
            raise PluginError(
                f"two plugins are named {point.name!r}: one of {owners[point.name]}, one of "
                f"{owner}. Uninstall one of the two distributions, or leave both out with "
                f"{DISABLE_VARIABLE}={point.name}"
            )
        _check_name(point.name, f"entry point of {owner}")
        owners[point.name] = owner


def _check_name(name: object, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(
            f"{where}: {name!r} is no name for a plugin; use letters, digits, '_', '-' and '.'"
        )
    return name


def _check_requirement(point: metadata.EntryPoint) -> str | None:
    """Refuse a distribution made for another version of ours; note one that doesn't say."""
    distribution, version = _distribution_name(point), core_version()
    declared = False
    for text in point.dist.requires or () if point.dist else ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # not ours to judge, unless it is about us: then the note below says so
        if canonicalize_name(requirement.name) != _DISTRIBUTION:
            continue
        # A library that works without us asks for us behind an extra.
        extras = ["", *_read(point.dist).get("provides-extra", ())]
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        declared = True
        if not requirement.specifier.contains(version, prereleases=True):
            raise PluginError(
                f"plugin {point.name!r} of {distribution} needs {requirement}, and this is "
                f"{_DISTRIBUTION} {version}: install a matching pair, or {remedy(point.name)}"
            )
    if declared:
        return None
    return (
        f"plugin {point.name!r}: {distribution} does not declare which {_DISTRIBUTION} it needs, "
        "so whether it fits is unknown"
    )


def _load(point: metadata.EntryPoint) -> Candidate:
    distribution = _distribution_name(point)
    try:
        plugin = point.load()
    except Exception as error:
        raise PluginError(
            f"plugin {point.name!r} of {distribution} ({point.value}) can't be imported: "
            f"{type(error).__name__}: {error}. Fix or uninstall {distribution}, or "
            f"{remedy(point.name)}"
        ) from error
    _refuse_class(point.name, plugin)
    version = _header(point, "version")
    return Candidate(name=point.name, plugin=plugin, version=version, distribution=distribution)


def _name_given(given: Iterable[object]) -> dict[str, object]:
    named: dict[str, object] = {}
    for plugin in given:
        own = getattr(plugin, "overlap_plugin_name", None)
        if own is None:
            own = getattr(plugin, "__name__", type(plugin).__name__)
        name = _check_name(own, f"plugin {plugin!r}")
        _refuse_class(name, plugin)
        if named.setdefault(name, plugin) is not plugin:
            raise PluginError(
                f"two given plugins are named {name!r}: {named[name]!r} and {plugin!r}. Set "
                "overlap_plugin_name on one of them"
            )
    return named


def _refuse_class(name: str, plugin: object) -> None:
    if inspect.isclass(plugin):
        raise PluginError(
            f"plugin {name!r} is the class {plugin.__module__}:{plugin.__qualname__}: give an "
            "instance of it, or a module"
        )


def _refuse_clash(name: str, plugin: object, found: Mapping[str, Candidate]) -> None:
    if name in _BUILTINS:
        raise PluginError(
            f"the given plugin {plugin!r} has the name of the built-in plugin {name!r}: set its "
            "overlap_plugin_name to another one"
        )
    if name in found:
        raise PluginError(
            f"the given plugin {plugin!r} and the installed one of {found[name].distribution} are "
            f"both named {name!r}: set overlap_plugin_name on the given one, or {remedy(name)} "
            "(both of them)"
        )


def _from_object(name: str, plugin: object) -> Candidate:
    version = getattr(plugin, "overlap_plugin_version", None) or getattr(plugin, "__version__", "")
    return Candidate(name=name, plugin=plugin, version=str(version), distribution="")


def _builtin(name: str) -> Candidate:
    return Candidate(
        name=name,
        plugin=importlib.import_module(_BUILTINS[name]),
        version=core_version(),
        distribution=_DISTRIBUTION,
        builtin=True,
        essential=name in _ESSENTIAL,
    )
