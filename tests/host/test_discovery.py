"""Plugins are found through real metadata, checked before they are loaded, and ordered by name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from overlap_core import hookimpl
from overlap_core.config import OverlapConfig
from overlap_core.errors import ConfigError, PluginError
from overlap_core.host import PluginHost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUILTINS = ("analytical_costs", "default_ladder", "functional_collectives", "replay")
HOOK = """
    from overlap_core import hookimpl

    @hookimpl
    def overlap_report_section(report):
        return {"from": __name__}
"""
REPORT = "@hookimpl\ndef overlap_report_section(report): ..."


def write_distribution(
    site: Path,
    name: str,
    entry_points: dict[str, str],
    *,
    source: str = HOOK,
    requires: tuple[str, ...] = ("overlap-core>=0.1,<0.2",),
    version: str = "1.0",
    extras: tuple[str, ...] = (),
) -> None:
    """Put a distribution with metadata, entry points and one module in a folder on the path."""
    module = name.replace("-", "_")
    info = site / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    needs += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    )
    lines = "".join(f"{point} = {target}\n" for point, target in entry_points.items())
    (info / "entry_points.txt").write_text(f"[overlap_core]\n{lines}")
    (site / f"{module}.py").write_text(textwrap.dedent(source))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of installed distributions, in front of the others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("probe_"):
            del sys.modules[name]


def discover(*plugins: object, disable: tuple[str, ...] = (), env: str = "") -> PluginHost:
    environ = {"OVERLAP_CORE_DISABLE_PLUGINS": env}
    return PluginHost.discover(
        OverlapConfig(disable_plugins=disable), plugins=plugins, environ=environ
    )


def names(host: PluginHost) -> list[str]:
    """Names in calling order, of built-ins and of what these tests brought."""
    return [
        plugin.name
        for plugin in host.plugins()
        if plugin.builtin or plugin.name.startswith(("probe", "given"))
    ]


def given(name: str, **attributes: object) -> object:
    """A plugin object with one hook."""

    class Given:
        overlap_plugin_name = name

        @hookimpl
        def overlap_report_section(self, report: object) -> dict[str, str]:
            return {"from": name}

    plugin = Given()
    for key, value in attributes.items():
        setattr(plugin, key, value)
    return plugin


def test_builtins_are_there_and_marked() -> None:
    found = {plugin.name: plugin for plugin in discover().plugins() if plugin.builtin}
    assert tuple(found) == BUILTINS
    assert {name for name, plugin in found.items() if not plugin.essential} == {"replay"}
    assert all(plugin.distribution == "overlap-core" for plugin in found.values())


def test_an_installed_plugin_is_found_with_its_distribution(site: Path) -> None:
    write_distribution(site, "probe-a", {"probe_one": "probe_a"}, version="2.3")
    host = discover()
    (info,) = [plugin for plugin in host.plugins() if plugin.name == "probe_one"]
    assert (info.version, info.distribution, info.builtin) == ("2.3", "probe-a", False)
    assert info.hooks == ("overlap_report_section",)
    assert "probe_one 2.3" in host.plugin_names()
    assert host.notes() == ()


def test_names_decide_the_order_and_builtins_come_last(site: Path) -> None:
    write_distribution(site, "probe-a", {"probe_z": "probe_a"})
    write_distribution(site, "probe-b", {"probe_a": "probe_b"})
    plugins = (given("probe_m"), given("given_x"))
    expected = ["given_x", "probe_a", "probe_m", "probe_z", *BUILTINS]
    assert names(discover(*plugins)) == expected
    assert names(discover(*reversed(plugins))) == expected


def test_order_and_digest_do_not_depend_on_the_path(tmp_path: Path) -> None:
    for folder, name in (("one", "probe-a"), ("two", "probe-b")):
        write_distribution(tmp_path / folder, name, {f"{name}-x": name.replace("-", "_")})
    code = (
        "from overlap_core.host import PluginHost; from overlap_core.config import OverlapConfig\n"
        "host = PluginHost.discover(OverlapConfig()); print(host.plugin_names(), host.digest())"
    )
    answers = set()
    for order in (("one", "two"), ("two", "one")):
        path = os.pathsep.join(str(tmp_path / folder) for folder in order)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "'probe-a-x 1.0'" in done.stdout
        assert "'probe-b-x 1.0'" in done.stdout
        answers.add(done.stdout)
    assert len(answers) == 1


def test_two_entry_points_of_one_name_are_refused_unless_left_out(site: Path) -> None:
    broken = "raise RuntimeError('must not be imported')"
    write_distribution(site, "probe-a", {"probe_same": "probe_a"}, source=broken)
    write_distribution(site, "probe-b", {"probe_same": "probe_b"}, source=broken)
    message = (
        r"two plugins are named 'probe_same': one of probe-a \(probe_a\), one of probe-b "
        r"\(probe_b\)\. Uninstall one .* OVERLAP_CORE_DISABLE_PLUGINS=probe_same"
    )
    with pytest.raises(PluginError, match=message):
        discover()
    assert "probe_same" not in names(discover(env="probe_same"))


def test_an_entry_point_may_not_take_a_builtins_name(site: Path) -> None:
    write_distribution(site, "probe-a", {"replay": "probe_a"})
    with pytest.raises(PluginError, match=r"'replay' of probe-a \(probe_a\).*built-in"):
        discover()


def test_a_distribution_for_another_version_is_refused_before_import(site: Path) -> None:
    write_distribution(
        site,
        "probe-a",
        {"probe_old": "probe_a"},
        source="raise RuntimeError('must not be imported')",
        requires=("torch", "Overlap.Core>=7"),
    )
    with pytest.raises(
        PluginError, match=r"'probe_old' of probe-a needs Overlap.Core>=7, and this"
    ):
        discover()
    assert "probe_old" not in names(discover(disable=("probe_old",)))


def test_a_requirement_of_an_extra_counts_if_the_distribution_has_that_extra(site: Path) -> None:
    requires = ('overlap-core>=7; extra == "future"',)
    write_distribution(site, "probe-a", {"probe_one": "probe_a"}, requires=requires)
    assert any("probe-a does not declare" in note for note in discover().notes())
    write_distribution(
        site, "probe-b", {"probe_two": "probe_b"}, requires=requires, extras=("future",)
    )
    with pytest.raises(PluginError, match=r"'probe_two' of probe-b needs overlap-core>=7"):
        discover()


def test_an_import_failure_names_plugin_distribution_and_reason(site: Path) -> None:
    write_distribution(site, "probe-a", {"probe_bad": "probe_a"}, source="import nothing_like_it")
    message = (
        r"'probe_bad' of probe-a \(probe_a\) can't be imported: ModuleNotFoundError: .*"
        r"uninstall probe-a, or leave it out with OVERLAP_CORE_DISABLE_PLUGINS=probe_bad"
    )
    with pytest.raises(PluginError, match=message) as caught:
        discover()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_disabling_by_configuration_and_by_environment(site: Path) -> None:
    write_distribution(site, "probe-a", {"probe_one": "probe_a"})
    everything = [*names(discover(given("given_x")))]
    assert names(discover(given("given_x"), disable=("probe_one",), env="given_x, replay")) == [
        name for name in everything if name not in ("probe_one", "given_x", "replay")
    ]


@pytest.mark.parametrize(
    ("arguments", "source"),
    [({"disable": ("tpyo",)}, "OverlapConfig"), ({"env": "tpyo"}, "in the environment")],
)
def test_disabling_an_unknown_plugin_lists_the_known_ones(
    arguments: dict[str, Any], source: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{source}.* 'tpyo', .*known plugins: .*replay"):
        discover(**arguments)


@pytest.mark.parametrize("name", BUILTINS[:3])
def test_essential_builtins_stay(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}', which is essential"):
        discover(env=name)


def test_names_and_versions_of_given_plugins() -> None:
    module = ModuleType("given_module")
    module.overlap_report_section = hookimpl(lambda report: None)  # type: ignore[attr-defined]
    module.overlap_report_section.__name__ = "overlap_report_section"
    module.__version__ = "0.7"  # type: ignore[attr-defined]

    class GivenClass:
        overlap_plugin_version = "3"

        @hookimpl
        def overlap_report_section(self, report: object) -> None: ...

    host = discover(module, GivenClass(), given("given_x"))
    words = host.plugin_names()
    assert {"given_module 0.7", "GivenClass 3", "given_x"} <= set(words)


def test_one_object_under_two_names_counts_once(site: Path) -> None:
    write_distribution(site, "probe-a", {"probe_one": "probe_a"})
    discover()
    module = sys.modules["probe_a"]
    assert [name for name in names(discover(module)) if "probe" in name] == ["probe_one"]


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ((given("given_x"), given("given_x")), "two given plugins are named 'given_x'"),
        ((given("probe_one"),), "installed one of probe-a are both named 'probe_one'"),
        ((given("replay"),), "name of the built-in plugin 'replay'"),
        ((given("a, b"),), "'a, b' is no name for a plugin"),
        ((SimpleNamespace(overlap_plugin_name="given_x"),), "'given_x' implements no hook"),
        ((type(given("given_x")),), "is the class .*give an instance"),
    ],
)
def test_given_plugins_that_are_refused(
    site: Path, plugins: tuple[object, ...], message: str
) -> None:
    write_distribution(site, "probe-a", {"probe_one": "probe_a"})
    with pytest.raises(PluginError, match=message):
        discover(*plugins)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "@hookimpl\ndef overlap_clasify_node(node): ...",
            "'probe_bad' of probe-a 1.0 can't be registered: unknown hook 'overlap_clasify_node'",
        ),
        (
            "@hookimpl\ndef overlap_classify_node(node, graph): ...",
            "for hook 'overlap_classify_node' .*{'graph'} are declared in the hookimpl",
        ),
        (
            "@hookimpl(wrapper=True)\ndef overlap_classify_node(node):\n    return (yield)",
            "'probe_bad' of probe-a 1.0 has overlap_classify_node as a hook wrapper",
        ),
        (
            f"{REPORT}\ndef overlap_classify_node(node): ...",
            "has a function overlap_classify_node that is not marked",
        ),
    ],
)
def test_hooks_that_do_not_fit_are_refused(site: Path, source: str, message: str) -> None:
    source = f"from overlap_core import hookimpl\n{source}"
    write_distribution(site, "probe-a", {"probe_bad": "probe_a"}, source=source)
    with pytest.raises(PluginError, match=message):
        discover()


def test_a_hook_of_a_later_version_may_be_optional(site: Path) -> None:
    source = HOOK + "\n    @hookimpl(optionalhook=True)\n    def overlap_of_the_future(x): ...\n"
    write_distribution(site, "probe-a", {"probe_one": "probe_a"}, source=source)
    assert "probe_one" in names(discover())
