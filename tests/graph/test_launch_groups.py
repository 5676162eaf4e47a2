"""What moves with a launch, and what does not."""

from __future__ import annotations

from attrs import evolve

from overlap_core import Node, NodeKind
from overlap_core.graph import find_waits

from ..small_graphs import cast, gather, graph_of, mm, skeleton_of, wait

UNPACK = {"kind": NodeKind.COMPUTE, "op": "multi_output"}


def groups(*nodes: Node, **more: object) -> dict[str, list[str]]:
    """Members of each launch group, by launch."""
    graph = graph_of(*nodes, **more)
    return {
        nodes[group.launch].name: [nodes[m].name for m in group.members]
        for group in skeleton_of(graph).gathers
    }


def test_a_gather_of_a_shard_moves_alone() -> None:
    assert groups(mm("a"), gather("g"), wait("g"), mm("b", "a", "w.g")) == {"g": ["g"]}


def test_cast_and_pad_move_with_their_launch() -> None:
    pad = evolve(cast("pad", "cast"), op="aten.constant_pad_nd")
    found = groups(
        cast("cast", "shard"), pad, mm("a"), gather("g", "pad"), wait("g"), mm("b", "w.g")
    )
    assert found == {"g": ["cast", "pad", "g"]}


def test_a_shared_producer_stays() -> None:
    found = groups(
        cast("cast", "shard"),
        gather("g", "cast"),
        gather("h", "cast"),
        wait("g"),
        wait("h"),
        mm("b", "w.g", "w.h"),
    )
    assert found == {"g": ["g"], "h": ["h"]}


def test_a_producer_that_changes_an_input_or_is_an_output_stays() -> None:
    update = Node(name="update", kind=NodeKind.COMPUTE, op="aten.mul_", mutates=("shard_g",))
    assert groups(update, gather("g"), wait("g"), mm("b", "w.g")) == {"g": ["g"]}
    nodes = (cast("cast", "shard"), gather("g", "cast"), wait("g"), mm("b", "w.g"))
    assert groups(*nodes, outputs=("b", "cast")) == {"g": ["g"]}


def test_what_merely_has_to_come_before_is_no_producer() -> None:
    found = groups(cast("other", "y"), gather("g", after=("other",)), wait("g"), mm("b", "w.g"))
    assert found == {"g": ["g"]}


def test_a_bucket_moves_with_its_copy_in_chain() -> None:
    def copy_in(name: str, source: str) -> Node:
        values = {"reads": (source,), "mutates": ("bucket",)}
        return Node(name=name, kind=NodeKind.COMPUTE, op="aten.copy_", **values)

    empty = Node(name="bucket", kind=NodeKind.COMPUTE, op="aten.empty", writes=("bucket",))
    launch = evolve(
        gather("g", "bucket", mutates=("bucket",)),
        op="_c10d_functional.all_gather_into_tensor_out.default",
    )
    nodes = (
        empty,
        cast("cast1", "shard1"),
        copy_in("copy1", "cast1"),
        cast("cast2", "shard2"),
        copy_in("copy2", "cast2"),
        launch,
        evolve(wait("g"), reads=("bucket",), mutates=("bucket",)),
        mm("b", "bucket"),
    )
    assert groups(*nodes) == {"g": ["bucket", "cast1", "copy1", "cast2", "copy2", "g"]}


def test_multi_output_members_move_with_their_launch_up_to_the_next_communication() -> None:
    coalesced = "_c10d_functional.all_gather_into_tensor_coalesced.default"
    waits = (evolve(wait("m1"), name="w1"), evolve(wait("m2"), name="w2"))
    first = Node(name="m1", reads=("g",), writes=("m1",), **UNPACK)
    second = Node(name="m2", reads=("g",), writes=("m2",), **UNPACK)
    use = (mm("b", "w.m1", "w.m2"),)
    launch = evolve(gather("g"), op=coalesced)
    assert groups(launch, first, second, *waits, *use) == {"g": ["g", "m1", "m2"]}
    between = (gather("h"), second, wait("h"), *waits, mm("b", "w.m1", "w.m2", "w.h"))
    assert groups(launch, first, *between) == {"g": ["g", "m1"], "h": ["h"]}


def test_the_members_do_not_depend_on_costs() -> None:
    """Ranks with one fingerprint must find one group, whatever each of them measured."""
    for ns in (None, 0, 700):
        member = Node(name="m", reads=("g",), writes=("m",), cost_ns=ns, **UNPACK)
        found = groups(gather("g"), member, wait("m"), mm("b", "w.m"))
        assert found == {"g": ["g", "m"]}


def test_what_follows_a_wait_is_no_member() -> None:
    after_wait = Node(name="late", reads=("g",), writes=("late",), after=("w.g",), **UNPACK)
    graph = graph_of(gather("g"), wait("g"), after_wait, mm("b", "w.g", "late"))
    assert find_waits(graph, 0, {0}) == ((), (1,))


def test_gathers_that_are_not_of_weights_have_no_group() -> None:
    assert groups(gather("g", "constant0"), wait("g"), mm("b", "w.g")) == {}
    assert groups(mm("a"), gather("g", "a"), wait("g"), mm("b", "w.g")) == {}
    other = (gather("h"), wait("h"), cast("act", "w.h"), gather("g", "act"), wait("g"))
    assert groups(*other, mm("b", "w.g")) == {"h": ["h"]}
    unused = (gather("g"), wait("g"), mm("b", "x"))
    assert groups(*unused) == {}
    assert groups(gather("g"), mm("b", "x")) == {}
    # To come after a wait is not to read it.
    assert groups(gather("g"), wait("g"), mm("b", "x", after=("w.g",))) == {}


def test_a_fused_kernel_with_a_matmul_inside_makes_an_activation() -> None:
    fused = evolve(cast("f", "x"), op="fused", origins=("aten.addmm.default", "aten.relu.default"))
    assert groups(fused, gather("g", "f"), wait("g"), mm("b", "w.g")) == {}
