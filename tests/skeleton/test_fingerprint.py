"""Equal fingerprints if, and only if, some renaming makes two graphs equal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from overlap_core import Node, OverlapGraph, fingerprint
from overlap_core.testing.strategies import SYMBOLS, graphs

from ..small_graphs import gather, graph_of, mm, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SYMBOL = re.compile(r"\b[su]\d+\b")


def rename_symbols(graph: OverlapGraph, names: Mapping[str, str]) -> OverlapGraph:
    def rename(size: int | str) -> int | str:
        if isinstance(size, int):
            return size
        return SYMBOL.sub(lambda found: names.get(found[0], found[0]), size)

    nodes = tuple(
        evolve(node, sizes=tuple(tuple(map(rename, sizes)) for sizes in node.sizes))
        for node in graph.nodes
    )
    symbols = {names.get(name, name): hint for name, hint in graph.symbols.items()}
    return evolve(graph, nodes=nodes, symbols=symbols)


def rename_all_else(graph: OverlapGraph, rename: Callable[[str], str]) -> OverlapGraph:
    """Nodes, buffers and groups under other names."""

    def names(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(rename, values))

    nodes = tuple(
        evolve(
            node,
            name=rename(node.name),
            after=names(node.after),
            reads=names(node.reads),
            writes=names(node.writes),
            mutates=names(node.mutates),
            group=None if node.group is None else rename(node.group),
        )
        for node in graph.nodes
    )
    return evolve(
        graph,
        nodes=nodes,
        inputs=names(graph.inputs),
        outputs=names(graph.outputs),
        constants=names(graph.constants),
    )


def sized(*sizes: str) -> str:
    """The fingerprint of nodes with the given sizes."""
    nodes = [mm(f"a{i}", sizes=((size, 8),)) for i, size in enumerate(sizes)]
    return fingerprint(graph_of(*nodes))


def used_symbols(graph: OverlapGraph) -> list[str]:
    texts = [str(s) for node in graph.nodes for sizes in node.sizes for s in sizes]
    return sorted({name for text in texts for name in SYMBOL.findall(text)})


@given(graphs(), st.permutations((*SYMBOLS, "s7", "s1000", "u77")))
def test_symbol_names_do_not_count(graph: OverlapGraph, names: list[str]) -> None:
    renamed = rename_symbols(graph, dict(zip(SYMBOLS, names, strict=False)))
    assert fingerprint(renamed) == fingerprint(graph)


@given(graphs())
def test_other_names_hints_costs_and_ranks_do_not_count(graph: OverlapGraph) -> None:
    renamed = rename_all_else(graph, lambda name: f"z{name[::-1]}")
    nodes = tuple(
        evolve(
            node,
            cost_ns=17,
            nbytes=None,
            network_ns=None,
            group_ranks=node.group_ranks and tuple(reversed(node.group_ranks)),
            origins=tuple(reversed(node.origins)),
        )
        for node in renamed.nodes
    )
    other = evolve(renamed, nodes=nodes, symbols=dict.fromkeys(graph.symbols, 12))
    assert fingerprint(other) == fingerprint(graph)


@given(graphs(), st.data())
def test_merging_two_symbols_counts(graph: OverlapGraph, data: st.DataObject) -> None:
    used = used_symbols(graph)
    assume(len(used) > 1)
    kept, lost = data.draw(st.permutations(used).map(lambda names: names[:2]))
    nodes = (*graph.nodes, mm("p", sizes=((kept,),)), mm("q", sizes=((lost,),)))
    split = evolve(graph, nodes=nodes)
    assert fingerprint(rename_symbols(split, {lost: kept})) != fingerprint(split)


def _change(node: Node, what: str, graph: OverlapGraph) -> Node:
    match what:
        case "op":
            return evolve(node, op=node.op + "2")
        case "dtype":
            return evolve(node, dtypes=(*node.dtypes, "int8"))
        case "size":
            return evolve(node, sizes=(*node.sizes, (5,)))
        case "origin":
            return evolve(node, origins=("aten.relu.default",))
        case "flag":
            return evolve(node, issues_collective=not node.issues_collective)
        case _:
            extra = next((i for i in graph.inputs if i not in node.reads), None)
            assume(extra is not None)
            return evolve(node, reads=(*node.reads, str(extra)))


@given(
    graphs(),
    st.sampled_from(("op", "dtype", "size", "origin", "flag", "dependency")),
    st.data(),
)
def test_any_change_of_a_node_counts(graph: OverlapGraph, what: str, data: st.DataObject) -> None:
    assume(graph.nodes)
    place = data.draw(st.integers(0, len(graph.nodes) - 1))
    nodes = list(graph.nodes)
    nodes[place] = _change(nodes[place], what, graph)
    assert fingerprint(evolve(graph, nodes=tuple(nodes))) != fingerprint(graph)


def test_the_design_examples() -> None:
    assert sized("s27 + s82") == sized("s27 + s74")
    assert sized("s0 + s1") != sized("s0 + s0")
    assert sized("s27 + s82") == sized("s82 + s27")


def test_symbols_that_appear_together_are_told_apart_by_their_later_use() -> None:
    assert sized("s0 + s1", "s0") == sized("s0 + s1", "s1")
    assert sized("s0 + s1", "s0", "s0 * 2") != sized("s0 + s1", "s0", "s1 * 2")
    assert sized("s0 + s1", "s0 * 2", "s1 * 3") == sized("s5 + s2", "s5 * 2", "s2 * 3")
    assert sized("s0 + s1", "s0 // 2") != sized("s0 + s1", "s0 // 3")


def test_interchangeable_symbols_may_take_any_turn() -> None:
    assert sized("s0 + s1", "s0 * s1") == sized("s9 + s3", "s3 * s9")
    assert sized("s0 + s1 + s2", "s0 * s1", "s2") == sized("s0 + s1 + s2", "s2 * s1", "s0")


def test_a_symbol_is_not_a_number() -> None:
    assert sized("s0") != sized("64")
    assert sized("s0 - s0 + 64") == sized("64")


def two_reads(first: str, second: str, **more: Any) -> str:
    return fingerprint(graph_of(mm("a"), mm("b"), mm("c", first, second), **more))


def test_which_buffer_a_node_reads_counts() -> None:
    assert two_reads("a", "b") != two_reads("a", "a")
    assert two_reads("a", "b") != two_reads("b", "a")
    assert two_reads("a", "b") != two_reads("a", "b", outputs=("b",))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"group": "0"}, {"group": "1"}),
        ({"group": "0"}, {"group": None}),
        ({"group": "0"}, {"group": "0", "group_ranks": (0,)}),
    ],
)
def test_groups_count_by_first_appearance_and_size(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    def two_gathers(second: dict[str, Any]) -> str:
        launch = evolve(gather("h"), **second)
        nodes = (gather("g"), launch, wait("g"), wait("h"), mm("a", "w.g", "w.h"))
        return fingerprint(graph_of(*nodes))

    assert two_gathers(left) != two_gathers(right)
    assert two_gathers(left) == two_gathers(left)


def test_order_without_data_counts() -> None:
    free = graph_of(mm("a"), mm("b"))
    ordered = graph_of(mm("a"), mm("b", after=("a",)))
    assert fingerprint(free) != fingerprint(ordered)
