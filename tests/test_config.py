"""Configuration: bad values are refused by name, equal ones have equal digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import overlap_core
from overlap_core import OverlapConfig, OverlapGraph
from overlap_core.config import disabled_by_environment, plugins_disabled_by_environment
from overlap_core.doctor import examine
from overlap_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"contention": 0.5}, r"contention=0\.5\): expected a number of at least 1"),
        ({"contention": float("nan")}, r"contention=nan\): expected a number"),
        ({"contention": 10**400}, r"contention=10+\): expected a number .* and below 2\*\*63"),
        ({"slack_ns": -1}, r"slack_ns=-1\): expected an integer of at least 0$"),
        ({"slack_ns": True}, r"slack_ns=True\): expected an integer"),
        ({"slack_ns": 1.5}, r"slack_ns=1\.5\): expected an integer"),
        ({"slack_ns": 10**400}, r"slack_ns=10{79}\): expected an integer .* and below 2\*\*63"),
        ({"slack_ns": 10**5000}, r"slack_ns=\.\.\.\): expected an integer"),
        ({"slack_ns": 1 << 63}, r"slack_ns=9223372036854775808\): expected an integer"),
        ({"max_replay_bytes": 1.5}, r"max_replay_bytes=1\.5\): expected an integer of at least 0"),
        ({"max_peak_growth": -0.1}, r"max_peak_growth=-0.1\): expected a number of at least 0"),
        ({"max_in_flight_bytes": 0}, r"max_in_flight_bytes=0\): expected an integer of at least 1"),
        ({"max_in_flight_bytes": 1.5}, r"max_in_flight_bytes=1\.5\): expected an integer"),
        ({"coalesce": 1.5}, r"coalesce=1\.5\): expected 'auto', 'off' or a number of bytes$"),
        ({"coalesce": 1 << 63}, r"coalesce=\d+\): expected .* and below 2\*\*63"),
        ({"deadline_s": "5"}, r"deadline_s='5'\): expected a number"),
        ({"enabled": 1}, r"enabled=1\): expected True or False"),
        ({"mode_ladder": ""}, r"mode_ladder=''\): expected a non-empty name"),
        ({"costs": "guessed"}, r"costs='guessed'\): expected one of measured, analytical"),
        ({"cost_table_path": 3}, r"cost_table_path=3\): expected a path as text"),
        ({"plan_dir": "a\0b"}, r"plan_dir='a\\x00b'\): expected a path as text"),
        ({"disable_plugins": "one"}, r"disable_plugins='one'\): expected a list of names"),
        ({"disable_plugins": 7}, r"disable_plugins=7\): expected a list of names"),
        ({"disable_plugins": [1]}, r"disable_plugins=\[1\]\): expected a list of names"),
        ({"disable_plugins": ["a", ["b"]]}, r"disable_plugins=.*: expected a list of names"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OverlapConfig(**values)


def test_the_largest_integers_are_taken() -> None:
    config = OverlapConfig(slack_ns=(1 << 63) - 1, coalesce=(1 << 63) - 1, deadline_s=5)
    assert config.slack_ns == config.coalesce == (1 << 63) - 1
    assert config.deadline_s == 5


GRAPH = OverlapGraph(rank=0, world_size=1, nodes=(), inputs=(), outputs=())
ENTRANCES: dict[str, Callable[[Any], object]] = {
    "inductor_options": overlap_core.inductor_options,
    "enable": overlap_core.enable,
    "enabled": lambda config: overlap_core.enabled(config).__enter__(),
    "simulate": lambda config: overlap_core.simulate([GRAPH], config),
    "examine": examine,
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"coalesce": "off"}, r"got dict \{'coalesce': 'off'\}; write OverlapConfig\(\.\.\.\)"),
        ({}, r"got dict \{\}; write"),
        ("x", r"got str 'x'; write"),
    ],
    ids=repr,
)
def test_what_is_no_configuration_is_refused(entrance: str, config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config: expected an OverlapConfig, {message}"):
        ENTRANCES[entrance](config)


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
