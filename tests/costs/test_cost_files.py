"""A cost table that lasts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from overlap_core.costs import Cost, CostSource, TableHeader, load_table, save_table
from overlap_core.errors import CostTableError

if TYPE_CHECKING:
    from pathlib import Path

HERE = TableHeader(device="cuda:NVIDIA H200", torch="2.13.0")
TABLE = {"ab": Cost(ns=7, network_ns=3), "cd": Cost(ns=0)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "costs.json"
    save_table(path, HERE, TABLE)
    return path


def test_a_table_is_read_back(path: Path) -> None:
    table = load_table(path, HERE)
    assert {key: (cost.ns, cost.network_ns) for key, cost in table.items()} == {
        "ab": (7, 3),
        "cd": (0, None),
    }
    assert {cost.source for cost in table.values()} == {CostSource.MEASURED}


def test_without_a_file_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert load_table(tmp_path / "none.json", HERE) == {}


@pytest.mark.parametrize(
    "other",
    [
        TableHeader(device="cuda:NVIDIA H100", torch="2.13.0"),
        TableHeader(device="cuda:NVIDIA H200", torch="2.14.1"),
    ],
)
def test_a_table_from_elsewhere_is_refused(path: Path, other: TableHeader) -> None:
    with pytest.raises(CostTableError, match=r"measured on cuda:NVIDIA H200 with torch 2\.13\.0"):
        load_table(path, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a cost table"),
        ("[]", "not a cost table"),
        ('{"version": 1}', "not a cost table"),
        ('{"version": 2, "device": "d", "torch": "t", "entries": {}}', "version is 2"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match=message):
        load_table(path, HERE)


@pytest.mark.parametrize("value", [None, -1, "7", 1.5, True])
def test_a_broken_entry_is_refused(path: Path, value: object) -> None:
    data = json.loads(path.read_text())
    data["entries"]["ab"]["ns"] = value
    path.write_text(json.dumps(data))
    with pytest.raises(CostTableError, match="broken entry"):
        load_table(path, HERE)
