"""Ranks that compare what they find, over real stores: in threads, and as processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from overlap_core._clock import REAL_CLOCK
from overlap_core.cli import main
from overlap_core.doctor.facts import facts_to_text
from overlap_core.doctor.findings import Finding, problems
from overlap_core.doctor.job import Table, check_job, end_job, follow_job
from overlap_core.doctor.place import JobPlace, connect

from ..virtual_clock import VirtualClock
from .samples import kinds, rank

if TYPE_CHECKING:
    from overlap_core._clock import Clock
    from overlap_core.doctor.facts import RankFacts

NO_GLOO = {"backends": ("nccl",)}
"""Ranks that are threads share one process, in which no gloo group of several can be formed."""
TIMEOUT_S = 60.0


def table(
    store: Any,
    number: int,
    world_size: int = 2,
    *,
    clock: Clock | None = None,
    attempt: str = "0",
) -> Table:
    return Table(
        store=store,
        rank=number,
        world_size=world_size,
        attempt=attempt,
        timeout_s=TIMEOUT_S,
        clock=clock or VirtualClock(),
    )


def meet(*facts: RankFacts, status: int = 0) -> tuple[tuple[Finding, ...], list[int | Finding]]:
    """What rank 0 finds, and how the others end."""
    store, clock = dist.HashStore(), VirtualClock()
    found: list[Finding] = []

    def lead() -> int:
        first = table(store, 0, len(facts), clock=clock)
        found.extend(check_job(first, facts[0]))
        end_job(first, status)
        return status

    def follow(one: RankFacts) -> int | Finding:
        return follow_job(table(store, one.rank, len(facts), clock=clock), one)

    _, *answers = clock.run([lead, *(partial(follow, one) for one in facts[1:])])
    assert clock.now() < 1
    return tuple(found), answers  # type: ignore[return-value]


def test_ranks_that_agree() -> None:
    found, statuses = meet(*(rank(number, **NO_GLOO) for number in range(4)))
    assert not problems(found)
    assert "ranks-agree" in kinds(found)
    assert statuses == [0, 0, 0]


def test_a_job_of_one_rank() -> None:
    found, _ = meet(rank(0))
    assert "one-rank" in kinds(found)
    assert not {"ranks-agree", "gloo-group", "gloo-missing"} & {*kinds(found)}


def test_all_ranks_end_with_the_status_of_rank_0() -> None:
    _, statuses = meet(rank(0, **NO_GLOO), rank(1, **NO_GLOO), status=2)
    assert statuses == [2]


def test_a_rank_that_differs_is_named() -> None:
    found, _ = meet(rank(0, **NO_GLOO), rank(1, config="0ther", **NO_GLOO))
    assert problems(found) == ("config-differs",)


def test_a_torch_without_gloo_is_told() -> None:
    found, _ = meet(rank(0, **NO_GLOO), rank(1, **NO_GLOO))
    [finding] = [finding for finding in found if finding.kind == "gloo-missing"]
    assert finding.what == "this torch is built without gloo (ranks 0-1), so no group was tried"


def test_ranks_of_another_version_are_not_compared_further() -> None:
    facts = [rank(0), rank(1, overlap_core="0.2.0", plugins=()), rank(2)]
    found, statuses = meet(*facts)
    assert problems(found) == ("overlap-core-differs",)
    assert not {"gloo-group", "gloo-missing"} & {*kinds(found)}
    assert statuses == [0, 0]


def test_facts_of_another_version_need_not_be_understood() -> None:
    store = dist.HashStore()
    first, second = table(store, 0), table(store, 1)
    second.say("facts", json.dumps({"overlap_core": "9.9", "facts": {"new": 1}}))
    assert problems(check_job(first, rank(0))) == ("overlap-core-differs",)


def test_ranks_that_never_come_are_named_within_the_time_out() -> None:
    store = dist.HashStore()
    first = table(store, 0, world_size=5)
    store.set("overlap_core/doctor/0/facts/3", facts_to_text(rank(3)))
    found = check_job(first, rank(0))
    [finding] = [finding for finding in found if finding.kind == "ranks-missing"]
    assert finding.what == "ranks 1-2, 4 of 5 did not answer within 60 s"
    assert "gloo-group" not in kinds(found)
    assert problems(found) == ("ranks-missing",)


def test_a_rank_without_rank_0_does_not_wait_for_ever() -> None:
    answer = follow_job(table(dist.HashStore(), 1), rank(1))
    assert isinstance(answer, Finding)
    assert answer.what == "rank 0 of 2 did not answer within 60 s"


@pytest.mark.parametrize("said", [["facts"], ["facts", "group"]])
def test_a_rank_0_that_dies_on_the_way_is_missed(said: list[str]) -> None:
    store = dist.HashStore()
    for step in said:
        table(store, 0).say(step, "leave out")
    answer = follow_job(table(store, 1), rank(1))
    assert isinstance(answer, Finding)
    assert answer.kind == "ranks-missing"


def test_a_rank_that_forms_no_group_in_time_is_missed() -> None:
    store = dist.HashStore()
    store.set("overlap_core/doctor/0/facts/1", facts_to_text(rank(1, **NO_GLOO)))
    assert problems(check_job(table(store, 0), rank(0, **NO_GLOO))) == ("ranks-missing",)


def test_starts_of_one_job_do_not_see_each_other() -> None:
    store = dist.HashStore()
    table(store, 1).say("facts", facts_to_text(rank(1)))
    assert problems(check_job(table(store, 0, attempt="1"), rank(0))) == ("ranks-missing",)


def tcp_store(port: int = 0) -> Any:
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=not port,
        wait_for_workers=False,
        timeout=timedelta(seconds=120),
    )


def test_a_store_that_is_lost_is_told() -> None:
    host = tcp_store()
    second, first = (table(tcp_store(host.port), number, clock=REAL_CLOCK) for number in (1, 0))
    answers: list[int | Finding] = []
    waiting = threading.Thread(target=lambda: answers.append(follow_job(second, rank(1))))
    waiting.start()
    assert not first.wait("facts", [1], until=first.deadline)
    del host
    gc.collect()
    waiting.join(TIMEOUT_S)
    [answer] = answers
    assert isinstance(answer, Finding)
    assert answer.what.startswith("rank 1 lost the job's store: ")
    assert problems(check_job(first, rank(0))) == ("store-unreachable",)
    end_job(first, 1)


def place(number: int, port: int, *, agent_store: bool = False) -> JobPlace:
    return JobPlace(
        rank=number,
        world_size=2,
        address="127.0.0.1",
        port=port,
        agent_store=agent_store,
        attempt="0",
    )


def test_a_port_that_is_taken_is_told() -> None:
    host = tcp_store()
    answer = connect(place(0, host.port), timeout_s=TIMEOUT_S)
    assert isinstance(answer, Finding)
    assert answer.what.startswith(f"rank 0 cannot host the job's store at 127.0.0.1:{host.port}: ")
    shared = connect(place(0, host.port, agent_store=True), timeout_s=TIMEOUT_S)
    assert not isinstance(shared, Finding)
    shared.set("key", "value")
    assert host.get("key") == b"value"


def test_a_store_that_is_not_there_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    answer = connect(place(1, 1), timeout_s=1)  # nobody ever listens there
    assert isinstance(answer, Finding)
    assert answer.what.startswith("rank 1 cannot reach the job's store at 127.0.0.1:1: ")
    assert "\n" not in answer.what


DOCTOR = [sys.executable, "-c", "from overlap_core.cli import main; main()", "doctor"]


def environment(number: int, port: int) -> dict[str, str]:
    """Of a rank of two, in a job whose store this process hosts, as torchrun would."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "80",
    }


def start_rank(number: int, port: int, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DOCTOR, "--timeout", "300", *arguments],
        env={**os.environ, **environment(number, port), **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.ranks
def test_a_group_that_cannot_be_formed_is_a_warning() -> None:
    store = tcp_store()
    first = start_rank(0, store.port, "--json", GLOO_SOCKET_IFNAME="no-such-interface")
    peer = table(store, 1, clock=REAL_CLOCK)
    assert not peer.wait("facts", [0], until=peer.clock.now() + 300)
    peer.say("facts", peer.read("facts", 0).replace('"rank": 0', '"rank": 1'))
    peer.say("formed", "RuntimeError: no route")
    status, output = finish(first)
    findings = {one["kind"]: one for one in json.loads(output)["findings"]}
    words = findings["gloo-group-failed"]["what"]
    assert words.startswith("ranks 0-1 cannot form a gloo group; rank 0: ")
    assert findings["gloo-group-failed"]["severity"] == "warning"
    assert status == 0
    assert peer.read("status", 0) == "0"


@pytest.mark.parametrize(("number", "missing"), [(0, 1), (1, 0)])
def test_a_missing_rank_ends_the_job_with_status_1(
    monkeypatch: pytest.MonkeyPatch, number: int, missing: int
) -> None:
    monkeypatch.setattr("overlap_core.doctor.job.Table", partial(Table, clock=VirtualClock()))
    store = tcp_store()
    result = CliRunner().invoke(main, ["doctor"], env=environment(number, store.port))
    assert result.exit_code == 1
    assert f"problem ranks-missing: rank {missing} of 2 did not answer within 60 s" in result.output
    assert result.output.splitlines()[-1] == "overlap would be off: ranks-missing"


@pytest.mark.ranks
def test_bad_input_on_rank_0_ends_all_ranks_with_status_2() -> None:
    store = tcp_store()
    ranks = [start_rank(number, store.port, "no-such-file.json") for number in range(2)]
    assert [finish(one)[0] for one in ranks] == [2, 2]


@pytest.mark.ranks
def test_rank_0_hosts_the_store_where_nobody_else_does() -> None:
    port = str(tcp_store().port)  # free again: the store is gone
    own = {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": port}
    outcomes = [finish(one) for one in [start_rank(number, 0, **own) for number in range(2)]]
    assert [status for status, _ in outcomes] == [0, 0]
    assert "ok   ranks-agree: 2 ranks answered" in outcomes[0][1]
    assert outcomes[1][1] == ""
