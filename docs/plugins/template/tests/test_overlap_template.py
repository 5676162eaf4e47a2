"""The plugin is installed, keeps the rules for plugins, and does what it is for."""

from __future__ import annotations

from importlib import metadata

import overlap_template
import torch

from overlap_core import OverlapGraph, op_has_internal_collective
from overlap_core.testing import (
    FakeRanks,
    GraphBuilder,
    OpCall,
    PluginConformance,
    assert_same_collective_sequence,
    host_with,
    tensor_spec,
)

NAME = "template"


def graph() -> OverlapGraph:
    """The op between two gathered weights."""
    g = GraphBuilder()
    y = g.opaque("mylib.attn_cp.default", g.mm("x", g.gather("w0")), group="cp")
    g.mm(y, g.gather("w1"))
    return g.build()


class TestConformance(PluginConformance):
    plugin = overlap_template
    graphs = (graph(),)
    ops = {  # noqa: RUF012
        overlap_template.OP: OpCall((tensor_spec(6, 4), tensor_spec(2, dtype="int64"), "group"))
    }


def test_it_is_installed() -> None:
    (point,) = metadata.entry_points(group="overlap_core", name=NAME)
    assert point.load() is overlap_template


def test_the_op_communicates() -> None:
    host_with(NAME)
    assert op_has_internal_collective(overlap_template.OP)


def test_lengths_fit_the_rows() -> None:
    generic = torch.randn(6, 4), torch.zeros(2, dtype=torch.int64), "group"
    args, kwargs = host_with(NAME).materialize(overlap_template.OP, generic, {})
    assert args[1].tolist() == [6, 6]
    assert kwargs == {}


def test_ranks_agree_on_the_op() -> None:
    outcomes = FakeRanks.of(graph(), 2).with_plugins(NAME).run()
    for outcome in outcomes:
        assert [entry.comparable for entry in outcome.skeleton] == [(), ("ring",), ()]
    assert_same_collective_sequence(outcomes)
