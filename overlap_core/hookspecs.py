"""Every hook that a plugin may implement.

Six parts in each docstring: when the hook is called, its arguments, what it returns and what
None means, in which order implementations run, what an implementation must not do, and the
version that added the hook.

Two rules hold for all of them. Order: plugins by name, then the built-ins by name, whatever was
installed or given first; `tryfirst` and `trylast` move an implementation inside its half, so the
built-ins come last and any plugin can answer before them. Errors: an exception, or a value of
another type than the one named here, is reported with plugin, hook and node and becomes this
rank's "cannot"; it never becomes an early return. Hook wrappers (`wrapper=True`) are refused,
since with them nobody could tell which plugin gave an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .costs.types import Cost, CostRequest
    from .graph import Node, OverlapGraph
    from .placement.plan import Plan
    from .ranks.votes import ModeDecision, Vote
    from .registry import OpRegistry
    from .replay.types import TensorSpec
    from .report import Report
    from .skeleton.entries import Communication

__all__ = [
    "PROJECT_NAME",
    "hookimpl",
    "hookspec",
    "overlap_adjust_plan",
    "overlap_choose_mode",
    "overlap_classify_node",
    "overlap_materialize_inputs",
    "overlap_measure_cost",
    "overlap_realize_tensor",
    "overlap_register_ops",
    "overlap_report_section",
]

PROJECT_NAME = "overlap_core"
"""pluggy's project name, which is the entry-point group as well."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
"""Marks a hook's specification. Only this module needs it."""

hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Marks a plugin's implementation of a hook."""


@hookspec
def overlap_register_ops(registry: OpRegistry) -> None:
    """Register the custom ops of a model library.

    When:
        Once for each `PluginHost.discover`, before any graph is looked at. The registry is
        process-wide, so the same registrations may arrive several times.

    Arguments:
        registry: takes `registry.register(op_name, materialize_inputs=None,
            has_internal_collective=False)`; it belongs to this plugin and this call.

    Return, and what None means:
        None; anything else is an error.

    Order:
        Every implementation, by plugin name.

    Must not:
        Depend on the rank, initialize a process group or a device, or keep the registry.

    Added in: 0.1
    """


@hookspec(firstresult=True)
def overlap_classify_node(node: Node) -> Communication | None:
    """Say whether a node issues communication, on which groups, and how it compares over ranks.

    When:
        For every node of every graph but waits, when its skeleton is taken.

    Arguments:
        node: the node, frozen.

    Return, and what None means:
        A `Communication`; one with `issues=False` says "I know this op, it stays silent".
        None: no opinion, the next implementation is asked; if nobody has one, the node is taken
        to issue nothing.

    Order:
        Stops at the first answer other than None. The built-in `functional_collectives` comes
        last.

    Must not:
        Depend on the rank, on buffer or node names, or on the ranks in a group: `comparable`
        words must come out equal on every rank for the same logical operation.

    Added in: 0.1
    """


@hookspec(firstresult=True)
def overlap_materialize_inputs(
    op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """Make the arguments with which an op can be replayed for a measurement.

    When:
        Before an op is called for a measurement; and before the one trial call, ahead of all
        measurements, that shows whether a custom op communicates that isn't declared to. Every
        argument was made generically by then: right shape, dtype and device, symbolic dimensions
        by their hint.

    Arguments:
        op_name: for instance `mylib::attn_cp`.
        args: the generic positional arguments.
        kwargs: the generic keyword arguments.

    Return, and what None means:
        A pair `(args, kwargs)` that replaces both, with value-dependent metadata (split sizes,
        `cu_seqlens`) consistent with the shapes.
        None: no opinion; if nobody has one, the generic arguments are used.

    Order:
        Stops at the first answer other than None. The built-in `replay`, which applies the
        `materialize_inputs` functions of registered ops, comes last.

    Must not:
        Derive anything from the rank, communicate, or change a generic tensor's shape.

    Added in: 0.1
    """


@hookspec(firstresult=True)
def overlap_realize_tensor(spec: TensorSpec) -> torch.Tensor | None:
    """Make a replay tensor of a dtype that generic noise can't make, such as float8.

    When:
        For each tensor argument of a replay, before the generic way is tried. A replay is a
        measurement; or the one trial call, ahead of all measurements, that shows whether a custom
        op communicates that isn't declared to.

    Arguments:
        spec: shape and stride in elements, dtype and device, frozen.

    Return, and what None means:
        A tensor of just that shape and dtype on that type of device.
        None: no opinion; if nobody has one, the tensor is made generically.

    Order:
        Stops at the first answer other than None.

    Must not:
        Derive anything from the rank, or communicate.

    Added in: 0.1
    """


@hookspec(firstresult=True)
def overlap_measure_cost(request: CostRequest) -> Cost | int | None:
    """Give the time of one node, from a measurement, a table or a formula.

    When:
        Once for each structural key, before anything is measured; a measurement replaces the
        answer. One answer serves all isomorphic nodes.

    Arguments:
        request: the structural key, frozen. A symbolic dimension is `("~", hint)`.

    Return, and what None means:
        Nanoseconds as an int of at least 0. For an op that communicates inside, a
        `Cost(ns=..., network_ns=...)` also says which part of the time is spent on the network.
        None: no opinion; if nobody has one, the cost is unknown.

    Order:
        Stops at the first answer other than None. The built-in `analytical_costs` comes last.

    Must not:
        Communicate (ranks ask for different keys, so a collective here would hang), or add a
        guard on a symbolic size.

    Added in: 0.1
    """


@hookspec(firstresult=True)
def overlap_choose_mode(votes: tuple[Vote, ...]) -> ModeDecision | None:
    """Decide from all ranks' votes how much freedom the ranks of a scope share: a mode ladder.

    When:
        Once for each negotiation, when the votes of all ranks of the scope are in.

    Arguments:
        votes: one vote a rank, sorted by rank; equal on every rank.

    Return, and what None means:
        A `ModeDecision`.
        None: no opinion, the built-in ladder `default` decides.

    Order:
        Only the ladder named by `OverlapConfig.mode_ladder` is asked, and after it `default`.
        A function called `overlap_choose_mode` is the ladder of its plugin's name; a plugin
        offers further ladders as functions marked `@hookimpl(specname="overlap_choose_mode")`,
        each of which is the ladder of its own function's name.

    Must not:
        Use anything but the votes: every rank runs it alone and all must decide alike. It may
        be more careful than `default` (identical, slot, pinned, abort in that order), never
        freer: that is refused.

    Added in: 0.1
    """


@hookspec
def overlap_adjust_plan(plan: Plan, graph: OverlapGraph) -> Plan | None:
    """Hold gathers back, or add a constraint, after they were placed.

    When:
        After placement and before reconciliation; again for each size of call that is tried,
        where ranks try once more pinned, and to predict what the bound on memory costs.

    Arguments:
        plan: the placements so far, frozen; each implementation sees what the one before made.
        graph: this rank's graph.

    Return, and what None means:
        A plan of the same placements, one for each call, none at an earlier boundary than before
        nor past its `original` one; `attrs.evolve` is the way to make it. Slots are derived from
        the boundaries again.
        None: no change.

    Order:
        Every implementation, by plugin name.

    Must not:
        Move a placement earlier, add or drop a gather, or communicate.

    Added in: 0.1
    """


@hookspec
def overlap_report_section(report: Report) -> Mapping[str, Any] | None:
    """Add a section to the report of a graph.

    When:
        Once for each report, when everything else in it is known.

    Arguments:
        report: the report, frozen.

    Return, and what None means:
        The section as plain data that JSON can hold, with text keys; it is filed under the
        plugin's name.
        None: no section.

    Order:
        Every implementation, by plugin name.

    Must not:
        Communicate: it may run on one rank only.

    Added in: 0.1
    """
