"""Places of captured operations, from before Inductor moves anything to the scheduler's nodes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

import overlap_core as oc
from overlap_core.inductor.numbering import POSITION, CapturedNumbering, with_numbering

JOINT, POST_GRAD = "joint_custom_post_pass", "post_grad_custom_pre_pass"


def numbering(**patches: Any) -> dict[str, Any]:
    return with_numbering(patches, inductor_config)


def launches(graph: oc.OverlapGraph) -> list[oc.Node]:
    return [node for node in graph.nodes if "all_gather" in node.op]


def test_inference_is_numbered_before_inductor_moves_waits(
    model: Any, capture: Any, arguments: Any
) -> None:
    """`reorder_for_locality` has moved the last wait before its first hook for split graphs."""

    def two_at_once(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return model(x, w, v)

    with torch.no_grad():
        [found] = capture(two_at_once, *arguments[:3], patches=numbering())
    places = [node.captured for node in launches(found.graph)]
    assert None not in places
    assert places == sorted(places)  # type: ignore[type-var]
    assert all(node.captured is not None for node in found.graph.nodes)


def test_a_training_graph_is_numbered_where_it_has_been_split(
    model: Any, capture: Any, arguments: Any
) -> None:
    """The joint graph was numbered too, and its nodes were copied with their places."""
    x, *weights = arguments
    for weight in weights:
        weight.requires_grad_()
    sizes: list[int] = []

    def look(graph: torch.fx.Graph) -> None:
        sizes.append(len(graph.nodes))
        assert any(POSITION in node.meta for node in graph.nodes) == (len(sizes) > 1)

    patches = numbering(**{JOINT: look, POST_GRAD: look})
    [forward] = capture(model, x, *weights, patches=patches)
    joint, split = sizes
    places = [node.captured for node in launches(forward.graph)]
    assert len(set(places)) == len(places) == 4
    assert max(places) < split < joint


def test_a_graph_is_numbered_once() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x + 1) * (x - 2)).graph
    CapturedNumbering()(graph)
    nodes = list(graph.nodes)
    nodes[2].append(nodes[1])
    CapturedNumbering()(graph)
    assert [node.meta[POSITION] for node in nodes] == list(range(len(nodes)))
    assert [node.meta[POSITION] for node in graph.nodes] == [0, 2, 1, 3, 4]
    copied = copy.deepcopy(graph)
    CapturedNumbering()(copied)
    assert [node.meta[POSITION] for node in copied.nodes] == [0, 1, 2, 3, 4]


def test_it_has_one_identity_for_caches() -> None:
    first, second = CapturedNumbering(), pickle.loads(pickle.dumps(CapturedNumbering()))
    assert first.uuid() == second.uuid() == copy.deepcopy(first).uuid() != ""


class Theirs(CustomGraphPass):
    """A user's pass, with or without an identity."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        assert all(POSITION not in node.meta for node in graph.nodes), "it runs before ours"
        self.calls += 1

    def uuid(self) -> str | None:
        return self.name


def test_a_configured_pass_stays_and_runs_first(model: Any, capture: Any, arguments: Any) -> None:
    theirs = Theirs("theirs")
    with torch.no_grad():
        [found] = capture(model, *arguments[:3], patches=numbering(**{JOINT: theirs}))
    assert theirs.calls == 1
    assert all(node.captured is not None for node in launches(found.graph))


def test_installing_twice_adds_nothing() -> None:
    once = numbering(**{POST_GRAD: [Theirs("a"), Theirs("b")]})
    twice = numbering(**once)
    assert [type(one) for one in twice[POST_GRAD]] == [Theirs, Theirs, CapturedNumbering]
    assert type(twice[JOINT]) is CapturedNumbering


@pytest.mark.parametrize(
    ("theirs", "cached"), [(Theirs("theirs"), True), (Theirs(None), False), (print, False)]
)
def test_a_torch_that_takes_one_pass_gets_one(
    theirs: Any, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    chained = numbering(**{POST_GRAD: theirs})[POST_GRAD]
    assert isinstance(chained, CustomGraphPass)
    assert bool(chained.uuid()) is cached
    assert numbering(**{POST_GRAD: chained})[POST_GRAD] is chained
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    chained(graph)
    assert all(POSITION in node.meta for node in graph.nodes)


def test_places_go_through_the_graph_file(tmp_path: Any) -> None:
    node = oc.Node(name="op", kind=oc.NodeKind.COMPUTE, op="aten.mm.out", captured=7)
    graph = oc.OverlapGraph(nodes=(node, oc.Node(name="o", kind=oc.NodeKind.COMPUTE, op="aten.mm")))
    graph.save(tmp_path / "graph.json")
    assert oc.OverlapGraph.load(tmp_path / "graph.json") == graph
    assert "captured" not in (tmp_path / "graph.json").read_text().split('"o"')[1]
