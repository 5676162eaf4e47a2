"""Installed plugins don't depend on each other, nor on the order in which they came."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import pytest
from attrs import evolve

from .small_graphs import gather, graph_of, mm, opaque, wait
from .wheels import CORE, PROJECTS, Environment, FreshEnvironment, fresh_environment, wheels

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fresh_environment", "wheels"]  # pytest finds fixtures by name

OTHERS = [name for name in PROJECTS if name != CORE]

OPS = {
    "plain": "aten::mm",
    "unclaimed": "mylib::attn_cp",
    "cp_attention": "overlap_cp::ulysses_attention",
    "cp_attention of torch": "cplib::flex_cp_allgather",
    "ep_moe": "overlap_ep::dispatch",
    "video_blocks": "video_blocks::attn_cp",
}
"""What is saved: name of the graph -> the op in it that may be some plugin's."""

SPEAKS_FOR = {
    "overlap-cp-attention": {"cp_attention", "cp_attention of torch"},
    "overlap-ep-moe": {"ep_moe"},
    "thirdparty-model-lib": {"video_blocks"},
}
"""Distribution -> the graphs with its ops. The others claim no op."""

SIMULATE = """
import json, sys
from pathlib import Path
from attrs import asdict
import overlap_core as oc

results = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    outcomes = oc.simulate([oc.OverlapGraph.load(path) for path in sorted(folder.iterdir())])
    results[folder.name] = [
        [str(o.mode), o.why, o.order, o.collectives, [asdict(g) for g in o.gathers], o.legal]
        for o in outcomes
    ]
print(json.dumps(results))
"""


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of `OPS`, with a graph file for each of two ranks."""
    root = tmp_path_factory.mktemp("corpus")
    for name, op in OPS.items():
        (root / name).mkdir()
        attention = opaque("attention", "z1", group=None, issues_collective=False)
        nodes = (
            mm("m1"),
            gather("g1", ns=50),
            wait("g1"),
            mm("z1", "w.g1", "m1"),
            evolve(attention, op=op),
            gather("g2", ns=50),
            wait("g2"),
            mm("z2", "w.g2", "attention"),
        )
        for rank in range(2):
            extra = (mm("more"),) * rank  # of one rank, so that gathers move in slots
            graph_of(*extra, *nodes, rank=rank).save(root / name / f"rank{rank}.json")
    return root


def listed(environment: Environment) -> list[dict[str, Any]]:
    """The plugins of an environment, in calling order."""
    found: list[dict[str, Any]] = json.loads(
        environment.run(["overlap-core", "plugins", "--json"], timeout=300)
    )
    return found


def simulated(environment: Environment, corpus: Path) -> dict[str, Any]:
    """What comes of each graph of the corpus."""
    found: dict[str, Any] = json.loads(
        environment.run(["python", "-c", SIMULATE, corpus], timeout=300)
    )
    return found


@pytest.mark.parametrize("distribution", PROJECTS)
def test_a_wheel_holds_one_package_and_no_tests(wheels: dict[str, Path], distribution: str) -> None:
    with ZipFile(wheels[distribution]) as wheel:
        names = [PurePosixPath(name) for name in wheel.namelist()]
    (package,) = {name.parts[0] for name in names if ".dist-info" not in name.parts[0]}
    assert (PROJECTS[distribution].folder / package / "__init__.py").exists()
    assert not any("tests" in name.parts for name in names)


def test_order_of_installation_never_matters(fresh_environment: FreshEnvironment) -> None:
    there = fresh_environment(*PROJECTS, one_by_one=True)
    back = fresh_environment(*reversed(PROJECTS), one_by_one=True)
    plugins = listed(there)
    assert plugins == listed(back)
    installed = [plugin["name"] for plugin in plugins if not plugin["builtin"]]
    assert installed == sorted(name for other in OTHERS for name in PROJECTS[other].plugins)


@pytest.mark.parametrize("distribution", OTHERS)
def test_each_works_alone(
    fresh_environment: FreshEnvironment, distribution: str, corpus: Path
) -> None:
    alone = fresh_environment(CORE, distribution)
    plugins = [plugin for plugin in listed(alone) if not plugin["builtin"]]
    assert [plugin["name"] for plugin in plugins] == list(PROJECTS[distribution].plugins)
    assert all(plugin["hooks"] for plugin in plugins)
    changed = differences(simulated(fresh_environment(CORE), corpus), simulated(alone, corpus))
    assert changed == SPEAKS_FOR.get(distribution, set())


@pytest.mark.parametrize("distribution", OTHERS)
def test_removing_one_changes_nothing_but_what_it_did(
    fresh_environment: FreshEnvironment, distribution: str, corpus: Path
) -> None:
    rest = [name for name in PROJECTS if name != distribution]
    with_all = simulated(fresh_environment(*PROJECTS), corpus)
    without = simulated(fresh_environment(*rest), corpus)
    assert differences(with_all, without) == SPEAKS_FOR.get(distribution, set())


def differences(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """Names of graphs whose results differ."""
    assert first.keys() == second.keys() == OPS.keys()
    return {name for name in first if first[name] != second[name]}
