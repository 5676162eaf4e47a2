"""What real scheduler nodes look like as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._inductor import ir

import overlap_core as oc
from overlap_core import NodeKind, fingerprint
from overlap_core.config import OverlapConfig
from overlap_core.graph import first_violation
from overlap_core.host import PluginHost
from overlap_core.placement import build_frame, rebuild_order
from overlap_core.skeleton import Skeleton, build_skeleton

if TYPE_CHECKING:
    from overlap_core import OverlapGraph


def skeleton_of(graph: OverlapGraph) -> Skeleton:
    return build_skeleton(graph, PluginHost.discover(OverlapConfig()).classify)


def shards(count: int) -> list[torch.Tensor]:
    return [torch.randn(8, 32) for _ in range(count)]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(16, 32)


def test_a_gather_its_wait_and_a_matmul(capture: Any, gather: Any, x: torch.Tensor) -> None:
    [found] = capture(lambda x, w: x @ gather(w), x, *shards(1))
    launch = found.node("all_gather_into_tensor")
    assert launch.kind is NodeKind.COLLECTIVE
    assert launch.sizes == ((32, 32),)
    assert launch.dtypes == ("float32",)
    assert launch.group_ranks == (0, 1, 2, 3)
    assert launch.nbytes == 32 * 32 * 4
    assert found.node("wait_tensor").kind is NodeKind.WAIT
    assert found.node("mm").kind is NodeKind.COMPUTE
    assert (found.graph.rank, found.graph.world_size) == (1, 4)
    assert found.graph.input_bytes == (16 * 32 + 8 * 32) * 4
    [group] = skeleton_of(found.graph).gathers
    assert [found.graph.nodes[p].name for p in group.members] == [launch.name]


@pytest.mark.slow
def test_a_placeholder_that_is_no_tensor_is_no_input(gather: Any, x: torch.Tensor) -> None:
    """A hook on a tensor under compiled autograd hands its state over among the inputs."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x.register_hook(lambda gradient: gradient * 2)
        return torch.sin(x @ gather(w))

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(fn, fullgraph=True, options=oc.inductor_options())
        compiled(x.requires_grad_(), *shards(1))
    report = oc.reports()[0]
    assert report.committed, report.why
    assert report.graph is not None
    assert len(report.graph.inputs) == 3
    assert report.graph.input_bytes == (16 * 32 + 8 * 32) * 4


def test_the_order_of_communication_is_not_kept_but_all_else_is(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x @ gather(w)
        w.mul_(2)  # the shard may change only after its gather has read it
        return torch.relu(y) @ gather(v)

    [found] = capture(fn, x, *shards(2))
    second = found.node("all_gather_into_tensor", 1)
    assert second.after == ()
    mutation = next(node for node in found.graph.nodes if "aten.copy_.default" in node.origins)
    assert "wait_tensor" in found.graph.nodes[found.graph.index[mutation.after[0]]].op
    frame = build_frame(found.graph, skeleton_of(found.graph))
    assert frame.floors == (0, 0)
    order = rebuild_order(frame, (0, 0))
    assert first_violation(found.graph.predecessors, order) is None


def test_a_gather_of_a_shard_that_was_changed_stays_behind_the_change(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ gather(w)
        w.mul_(2)
        return torch.relu(y) @ gather(w)

    [found] = capture(fn, x, *shards(1))
    second = found.graph.index[found.node("all_gather_into_tensor", 1).name]
    first_wait = found.graph.index[found.node("wait_tensor").name]
    reached, stack = set(), [second]
    while stack:
        for before in found.graph.predecessors[stack.pop()]:
            if before not in reached:
                reached.add(before)
                stack.append(before)
    assert first_wait in reached, "write after read across the gather in flight is lost"


def test_control_dependencies_stay(capture: Any, gather: Any, x: torch.Tensor) -> None:
    """Effects are ordered by dependencies that look fake; only communication order is dropped."""

    def add_control(snodes: list[Any]) -> Any:
        from torch._inductor.dependencies import WeakDep

        from overlap_core.inductor.dependencies import comm_buffer_names, comm_order_deps

        launches = [s for s in snodes if "all_gather" in str(getattr(s.node, "op_overload", ""))]
        control = WeakDep(next(iter(snodes[0].get_buffer_names())), launches[1].get_name(), True)
        launches[1].add_fake_dep(control)
        return control, comm_order_deps(launches[1], comm_buffer_names(snodes))

    [found] = capture(lambda x, w, v: x @ gather(w) @ gather(v), x, *shards(2), look=add_control)
    control, dropped = found.seen
    assert control not in dropped
    assert len(dropped) == 1


def test_coalesced_gathers_move_with_their_members(capture: Any, x: torch.Tensor) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x @ x.T @ x)
        a, b = functional.all_gather_into_tensor_coalesced([w, v], dist.group.WORLD)
        return x @ a @ b

    [found] = capture(fn, x, *shards(2))
    launch = found.node("coalesced")
    assert launch.nbytes == 2 * 32 * 32 * 4
    assert launch.sizes == ((32, 32), (32, 32))
    [group] = skeleton_of(found.graph).gathers
    ops = [found.graph.nodes[p].op for p in group.members]
    assert ops == [launch.op, "multi_output", "multi_output"]
    assert len(group.waits) == 2


def test_buckets_move_with_their_copy_in_chain(capture: Any, gather: Any, x: torch.Tensor) -> None:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.relu(x @ gather(weight.bfloat16()).float())
        return x

    [found] = capture(fn, x, *shards(3), patches={"bucket_all_gathers_fx": "all"})
    launch = found.node("all_gather_into_tensor_out")
    [group] = skeleton_of(found.graph).gathers
    members = [found.graph.nodes[p] for p in group.members]
    assert members[-1] is launch
    inputs = set(found.graph.inputs)
    assert {name for node in members[:-1] for name in node.reads} & inputs
    assert build_frame(found.graph, skeleton_of(found.graph)).floors == (0,)


def test_casts_and_pads_belong_to_their_launch(capture: Any, gather: Any, x: torch.Tensor) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ gather(w.bfloat16()).float())
        return y @ gather(torch.nn.functional.pad(v, (0, 0, 0, 1)))[:32]

    [found] = capture(fn, x, *shards(2))
    groups = skeleton_of(found.graph).gathers
    assert [len(group.members) for group in groups] == [2, 2]


def test_an_in_place_collective_has_sizes_and_waits(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x @ gather(w), "sum", dist.group.WORLD) + 1

    [found] = capture(fn, x, *shards(1))
    reduce = found.node("all_reduce_")
    assert reduce.kind is NodeKind.COLLECTIVE
    assert reduce.sizes == ((16, 32),)
    skeleton = skeleton_of(found.graph)
    assert [entry.weight_gather for entry in skeleton.entries] == [True, False]


def test_an_exchange_shows_the_rows_of_each_rank(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        return functional.all_to_all_single(x @ gather(w), received, sent, dist.group.WORLD) + 1

    [found] = capture(fn, x, *shards(1), [1, 2, 3, 4], [4, 4, 3, 5])
    exchange = found.node("all_to_all_single")
    assert exchange.sizes == ((10, 32),)
    assert (exchange.received, exchange.sent) == ((1, 2, 3, 4), (4, 4, 3, 5))
    assert found.node("all_gather_into_tensor").sent == ()
    [found] = capture(fn, x, *shards(1), [1, 2, 3, 4], [4, 4, 3, 5], dynamic=True)
    exchange = found.node("all_to_all_single")
    assert [len(exchange.received), len(exchange.sent)] == [4, 4]
    assert any(isinstance(rows, str) for rows in (*exchange.received, *exchange.sent))


def test_gathers_that_are_not_of_weights_never_move(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sizes = gather(torch.full((1,), 7, dtype=torch.int64))
        activations = gather(torch.relu(x))
        gather(w)  # nobody uses it
        return activations * sizes.sum()

    [found] = capture(fn, x, *shards(1))
    skeleton = skeleton_of(found.graph)
    assert skeleton.gathers == () or all(
        found.graph.nodes[group.launch].dtypes == ("float32",) for group in skeleton.gathers
    )
    moving = {found.graph.nodes[group.launch].name for group in skeleton.gathers}
    fixed = [entry for entry in skeleton.entries if entry.node not in moving]
    assert {entry.dtypes for entry in fixed} >= {("int64",)}


def test_multi_output_externs_are_unpacked(capture: Any, gather: Any, x: torch.Tensor) -> None:
    [found] = capture(lambda x, w: torch.sort(x)[0] @ gather(w), x, *shards(1))
    unpack = found.node("multi_output")
    assert unpack.kind is NodeKind.COMPUTE
    assert found.adapted.requests[found.graph.index[unpack.name]] is None


@torch.library.custom_op("overlap_tests::silent", mutates_args=())
def silent(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@silent.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("overlap_tests::talks", mutates_args=())
def talks(x: torch.Tensor, group: str) -> torch.Tensor:
    return x * 2


@talks.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def test_opaque_ops_are_told_by_registration(capture: Any, gather: Any, x: torch.Tensor) -> None:
    import overlap_core as oc

    oc.register_materialize_inputs("overlap_tests::talks", has_internal_collective=True)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return talks(silent(x), "0") @ gather(w)

    [found] = capture(fn, x, *shards(1))
    quiet, loud = found.node("silent"), found.node("talks")
    assert (quiet.kind, quiet.issues_collective) == (NodeKind.OPAQUE, False)
    assert (loud.kind, loud.issues_collective) == (NodeKind.OPAQUE, True)
    assert loud.group_ranks == (0, 1, 2, 3)
    assert loud.op in {entry.op for entry in skeleton_of(found.graph).entries}
    assert quiet.op not in {entry.op for entry in skeleton_of(found.graph).entries}


CONDITIONAL = "Conditional" if hasattr(ir, "Conditional") else "Switch"
"""The node of `torch.cond`; torch 2.14 has renamed it."""


@torch.library.custom_op("overlap_adapter_tests::known", mutates_args=())
def known(x: torch.Tensor) -> torch.Tensor:
    """Somebody says that it does not communicate."""
    return x * 2


@known.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_inside_a_node_is_trusted_if_somebody_knows_it(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    oc.register_materialize_inputs("overlap_adapter_tests::known", has_internal_collective=False)

    def fn(op: Any) -> Any:
        def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = torch.cond(x.sum() > 0, op, lambda x: x + 1, (x,))
            return y @ gather(w)

        return model

    for op, communicates in ((known, False), (silent, True)):
        whole = capture(fn(op), x, *shards(1))[0]
        [node] = [node for node in whole.graph.nodes if node.op == CONDITIONAL]
        assert node.issues_collective == communicates


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(functional.all_reduce(x, "sum", dist.group.WORLD))


@torch.compiler.nested_compile_region
def quiet_region(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


def test_a_node_communicates_if_a_graph_inside_it_does(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = region(x @ x.T)
        y = region(y @ y)  # one that is called once is inlined
        y = quiet_region(quiet_region(y) @ y)
        y = torch.cond(
            y.sum() > 0,
            lambda y: functional.all_reduce(y, "sum", dist.group.WORLD) + 0,
            lambda y: y * 2,
            (y,),
        )
        return y[:, :16] @ gather(w)[:16]

    whole = capture(fn, x, *shards(1))[0]
    inside = [node for node in whole.graph.nodes if node.op in ("InvokeSubgraph", CONDITIONAL)]
    assert [(node.op, node.kind, node.issues_collective) for node in inside] == [
        *[("InvokeSubgraph", NodeKind.OPAQUE, True)] * 2,
        *[("InvokeSubgraph", NodeKind.COMPUTE, False)] * 2,
        (CONDITIONAL, NodeKind.OPAQUE, True),
    ]
    assert [entry.op for entry in skeleton_of(whole.graph).entries][:3] == [
        "InvokeSubgraph",
        "InvokeSubgraph",
        CONDITIONAL,
    ]
    assert {node.group for node in inside if node.issues_collective} == {"0"}


def test_sizes_keep_their_symbols_and_add_no_guard(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def guards(snodes: list[Any]) -> Any:
        from torch._inductor.virtualized import V

        from overlap_core.inductor.adapter import adapt

        environment = V.graph.sizevars.shape_env
        before = [str(guard.expr) for guard in environment.guards]
        replacements = dict(environment.replacements)
        adapt(snodes, V.graph, 1, 4)
        after = [str(guard.expr) for guard in environment.guards]
        return before == after, replacements == dict(environment.replacements)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[1:]]) @ gather(w)

    torch._dynamo.mark_dynamic(x, 0)
    [found] = capture(fn, x, *shards(1), look=guards)
    assert found.seen == (True, True)
    product = found.node("mm")
    [symbol] = found.graph.symbols
    assert product.sizes == ((f"2*{symbol} - 1", 32),)
    assert found.graph.symbols == {symbol: 16}
    request = found.adapted.requests[found.graph.index[product.name]]
    assert request is not None
    assert request.outputs == ((("~", 31), 32),)


def test_unbacked_symbols_are_read_by_hint(capture: Any, gather: Any, x: torch.Tensor) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x[torch.nonzero(x[:, 0] > 0)[:, 0]] @ gather(w)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        [found] = capture(fn, x, *shards(1))
    assert any(name.startswith("u") for name in found.graph.symbols)
    product = found.node("mm")
    assert isinstance(product.sizes[0][0], str)


def test_renamed_symbols_give_equal_fingerprints(
    capture: Any, gather: Any, x: torch.Tensor
) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y]) @ gather(w)

    a, b = torch.randn(16, 32), torch.randn(24, 32)
    for tensor in (a, b):
        torch._dynamo.mark_dynamic(tensor, 0)
    [first] = capture(fn, a, b, *shards(1))
    torch._dynamo.reset()
    [second] = capture(fn, b, a, *shards(1))
    assert fingerprint(first.graph) == fingerprint(second.graph)


def test_grouped_nodes_are_refused_by_name(capture: Any, gather: Any, x: torch.Tensor) -> None:
    def group(snodes: list[Any]) -> str:
        from torch._inductor.scheduler import GroupedSchedulerNode
        from torch._inductor.virtualized import V

        from overlap_core.errors import GraphFormatError
        from overlap_core.inductor.adapter import adapt

        grouped = GroupedSchedulerNode.create(snodes[:2])
        with pytest.raises(GraphFormatError) as caught:
            adapt([grouped, *snodes[2:]], V.graph, 1, 4)
        return str(caught.value)

    [found] = capture(lambda x, w: x @ gather(w), x, *shards(1), look=group)
    assert "enforce_comm_ordering_for_fsdp" in found.seen


@pytest.mark.parametrize("cast", [False, True])
def test_an_empty_shard_still_counts_as_a_weight(
    capture: Any, gather: Any, x: torch.Tensor, cast: bool
) -> None:
    """Padding an empty shard reads nothing; the gather behind it is of a weight all the same."""

    def fn(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        if cast:
            shard = shard.bfloat16()
        padded = torch.nn.functional.pad(shard, (0, 0, 0, 1 - shard.shape[0]))
        return x * gather(padded)[0].float()

    [empty] = capture(fn, x, torch.empty(0, 32))
    torch._dynamo.reset()
    [full] = capture(fn, x, torch.randn(1, 32))
    for found in (empty, full):
        assert [e.weight_gather for e in skeleton_of(found.graph).entries] == [True]
    assert skeleton_of(empty.graph).entries == skeleton_of(full.graph).entries
