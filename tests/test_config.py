"""Configuration: bad values are refused by name, equal ones have equal digests."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_core import OverlapConfig
from overlap_core.config import disabled_by_environment, plugins_disabled_by_environment
from overlap_core.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"contention": 0.5}, r"contention=0\.5\): expected a number of at least 1"),
        ({"contention": float("nan")}, r"contention=nan\): expected a number"),
        ({"slack_ns": -1}, r"slack_ns=-1\): expected a number of at least 0"),
        ({"slack_ns": True}, r"slack_ns=True\): expected a number"),
        ({"max_peak_growth": -0.1}, r"max_peak_growth=-0.1\): expected a number of at least 0"),
        ({"max_in_flight_bytes": 0}, r"max_in_flight_bytes=0\): expected a number of at least 1"),
        ({"deadline_s": "5"}, r"deadline_s='5'\): expected a number"),
        ({"enabled": 1}, r"enabled=1\): expected True or False"),
        ({"mode_ladder": ""}, r"mode_ladder=''\): expected a non-empty name"),
        ({"costs": "guessed"}, r"costs='guessed'\): expected one of measured, analytical"),
        ({"cost_table_path": 3}, r"cost_table_path=3\): expected a path as text"),
        ({"plan_dir": "a\0b"}, r"plan_dir='a\\x00b'\): expected a path as text"),
        ({"disable_plugins": "one"}, r"disable_plugins='one'\): expected a list of names"),
        ({"disable_plugins": 7}, r"disable_plugins=7\): expected a list of names"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OverlapConfig(**values)


def test_digests_tell_what_ranks_must_share() -> None:
    assert OverlapConfig().digest() == OverlapConfig().digest()
    assert OverlapConfig(slack_ns=1).digest() != OverlapConfig().digest()
    assert OverlapConfig(cost_table_path="here").digest() == OverlapConfig().digest()
    first = OverlapConfig(disable_plugins=["b", "a", "b"])
    assert first.digest() == OverlapConfig(disable_plugins=("a", "b")).digest()


@pytest.mark.parametrize(("value", "off"), [("", False), ("1", False), ("0", True), (" 0 ", True)])
def test_the_environment_switches_off(value: str, off: bool) -> None:
    assert disabled_by_environment({"OVERLAP_CORE": value}) is off


def test_names_in_the_environment_are_split() -> None:
    environ = {"OVERLAP_CORE_DISABLE_PLUGINS": " b,a,, b"}
    assert plugins_disabled_by_environment(environ) == ("a", "b")
    assert plugins_disabled_by_environment({}) == ()
