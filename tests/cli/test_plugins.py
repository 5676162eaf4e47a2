"""`overlap-core plugins`, and what the command group itself does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from overlap_core.cli import main
from overlap_core.config import OverlapConfig
from overlap_core.host import PluginHost


def run(*args: str, **env: str) -> Result:
    return CliRunner().invoke(main, args, env=env, catch_exceptions=False)


def plugins_json(**env: str) -> list[dict[str, Any]]:
    result = run("plugins", "--json", **env)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_json_lists_every_plugin_in_calling_order() -> None:
    expected = PluginHost.discover(OverlapConfig()).plugins()
    found = plugins_json()
    assert [plugin["name"] for plugin in found] == [plugin.name for plugin in expected]
    assert found
    for row, plugin in zip(found, expected, strict=True):
        assert row == {
            "name": plugin.name,
            "version": plugin.version,
            "distribution": plugin.distribution,
            "builtin": plugin.builtin,
            "essential": plugin.essential,
            "hooks": list(plugin.hooks),
        }


def test_built_in_behaviour_is_listed_as_plugins() -> None:
    hooks = {hook for plugin in plugins_json() if plugin["builtin"] for hook in plugin["hooks"]}
    assert {"overlap_classify_node", "overlap_choose_mode", "overlap_measure_cost"} <= hooks


def test_table_names_every_plugin_and_hook() -> None:
    result = run("plugins", COLUMNS="80")
    assert result.exit_code == 0
    for plugin in plugins_json():
        assert plugin["name"] in result.stdout
        assert all(hook in result.stdout for hook in plugin["hooks"])
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout


def test_plugins_switched_off_by_name_are_left_out() -> None:
    optional = [plugin["name"] for plugin in plugins_json() if not plugin["essential"]]
    if not optional:
        pytest.skip("every plugin that is installed is essential")
    left = plugins_json(OVERLAP_CORE_DISABLE_PLUGINS=optional[0])
    assert optional[0] not in [plugin["name"] for plugin in left]


def test_an_unknown_name_to_switch_off_is_one_line_and_status_2() -> None:
    result = run("plugins", OVERLAP_CORE_DISABLE_PLUGINS="no-such-plugin")
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "no-such-plugin" in line


def test_an_unknown_command_is_bad_usage() -> None:
    assert run("no-such-command").exit_code == 2


def test_version_names_what_a_bug_report_needs() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("overlap-core ")
    assert "torch" in result.stdout
    assert "Python" in result.stdout


def test_help_lists_the_commands_without_torch() -> None:
    program = (
        "import sys\n"
        "from overlap_core.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *text, has_torch = result.stdout.splitlines()
    for command in ("demo", "plugins", "simulate"):
        assert any(line.split()[:1] == [command] for line in text)
    assert has_torch == "False"
