"""How ranks find out together whether they may go on with what an earlier start agreed on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from torch.distributed import HashStore

from overlap_core.ranks import Agreement, GraphKey, Mode
from overlap_core.ranks.plan_file import (
    VERSION,
    PlanFile,
    agree_on_start,
    load_plan_file,
    save_plan_file,
    with_agreement,
)

from ..virtual_clock import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

HEADER = {"torch": "2", "world_size": "3"}
PATIENCE_S = 60.0


def key(name: str = "f", groups: str = "g") -> GraphKey:
    return GraphKey(code=name, structure="s", groups=groups)


def agreed(*scope: int, sequence: tuple[int, ...] = (1, 0)) -> Agreement:
    return Agreement(mode=Mode.SLOT, why="skeletons match", scope=scope, sequence=sequence)


def file_of(*agreements: tuple[GraphKey, Agreement], name: str = "first") -> PlanFile:
    file = PlanFile(name=name, header=HEADER)
    for pair in agreements:
        file = with_agreement(file, *pair)
    return file


def start(*files: PlanFile | None) -> list[tuple[str, bool]]:
    """Name and warmth on each rank."""
    store, clock = HashStore(), VirtualClock()

    def one(file: PlanFile | None) -> tuple[PlanFile | None, bool]:
        return agree_on_start(store, "start", len(files), file, HEADER, PATIENCE_S, clock)

    results = clock.run([lambda file=file: one(file) for file in files])
    return [(result[0].name if result[0] else "", result[1]) for result in results]


def test_all_ranks_with_one_file_start_warm() -> None:
    file = file_of((key(), agreed(0, 1, 2)))
    assert start(file, file, file) == [("first", True)] * 3


def test_groups_are_each_ranks_own() -> None:
    files = [file_of((key(groups=str(rank)), agreed(0, 1, 2))) for rank in range(3)]
    assert start(*files) == [("first", True)] * 3


def test_scopes_agree_for_themselves() -> None:
    first, second = (key(), agreed(0, 1)), (key("g"), agreed(2))
    assert start(file_of(first), file_of(first), file_of(second)) == [("first", True)] * 3


@pytest.mark.parametrize(
    "other",
    [
        None,
        file_of(),
        file_of((key(), agreed(0, 1, 2, sequence=(0, 1)))),
        file_of((key("h"), agreed(0, 1, 2))),
        file_of((key(), agreed(0, 1, 2)), name="second"),
    ],
)
def test_one_rank_with_another_file_makes_all_start_cold(other: PlanFile | None) -> None:
    file = file_of((key(), agreed(0, 1, 2)))
    found = start(file, other, file)
    assert len(set(found)) == 1
    assert not found[0][1]
    assert found[0][0] not in ("", "first", "second")


def test_a_rank_without_a_file_waits_for_nobody() -> None:
    clock = VirtualClock()
    file, warm = agree_on_start(HashStore(), "start", 3, None, HEADER, PATIENCE_S, clock)
    assert clock.now() == 0
    assert file is not None
    assert not warm
    assert not file.agreements


def test_a_rank_that_does_not_come_makes_all_start_cold() -> None:
    store, file, clock = HashStore(), file_of((key(), agreed(0, 1))), VirtualClock()
    early, late = (
        agree_on_start(store, "start", 2, file, HEADER, PATIENCE_S, clock) for _ in range(2)
    )
    assert clock.now() > PATIENCE_S
    assert early == late
    assert not early[1]


def test_a_file_is_what_was_saved(tmp_path: Path) -> None:
    path, file = tmp_path / "new" / "rank0.json", file_of((key(), agreed(0, 1)))
    save_plan_file(path, file)
    assert load_plan_file(path, HEADER) == file


def test_a_file_of_another_header_or_version_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    assert load_plan_file(path, HEADER) is None
    save_plan_file(path, file_of())
    assert load_plan_file(path, {**HEADER, "torch": "3"}) is None
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "version": VERSION + 1}))
    assert load_plan_file(path, HEADER) is None


@pytest.mark.parametrize("text", ["", "{", "[]", f'{{"version": {VERSION}}}', "\ufeff\x00"])
def test_a_broken_file_is_said_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(text)
    assert load_plan_file(path, HEADER) is None
    assert f"plan file {path} is not used" in caplog.text


def test_an_agreement_replaces_the_one_of_its_key() -> None:
    file = with_agreement(file_of((key(), agreed(0, 1))), key(), agreed(0, 1, sequence=(0, 1)))
    assert [one.sequence for _, one in file.agreements] == [(0, 1)]
    assert evolve(file, agreements=()) == file_of()


def test_a_rank_that_is_known_not_to_come_is_not_waited_for() -> None:
    clock = VirtualClock()
    file, warm = agree_on_start(
        *(HashStore(), "start", 2, file_of((key(), agreed(0, 1))), HEADER, PATIENCE_S, clock),
        in_vain=lambda: clock.now() > 10,
    )
    assert 10 < clock.now() < 12
    assert file is not None
    assert not warm


def test_a_rank_that_asks_under_another_configuration_is_not_waited_for() -> None:
    store, clock, file = HashStore(), VirtualClock(), file_of((key(), agreed(0, 1)))

    def one(prefix: str, mine: PlanFile | None) -> tuple[PlanFile | None, bool]:
        return agree_on_start(
            *(store, prefix, 2, mine, HEADER, PATIENCE_S, clock), asked="start/asked"
        )

    results = clock.run([lambda: one("start/a", file), lambda: one("start/b", None)])
    assert [result[1] for result in results] == [False, False]
    assert clock.now() < 2


def test_a_slow_rank_of_the_same_configuration_is_waited_for() -> None:
    store, clock, file = HashStore(), VirtualClock(), file_of((key(), agreed(0, 1)))

    def one(pause_s: float) -> tuple[PlanFile | None, bool]:
        clock.sleep(pause_s)
        return agree_on_start(
            *(store, "start", 2, file, HEADER, PATIENCE_S, clock), asked="start/asked"
        )

    assert clock.run([lambda: one(0), lambda: one(20)]) == [(file, True)] * 2
