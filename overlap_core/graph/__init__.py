"""One rank's graph as plain data: nodes, order, what moves together, and the file format."""

from __future__ import annotations

from .dependencies import first_violation
from .files import graph_from_json, graph_to_json
from .graph import OverlapGraph
from .launch_groups import LaunchGroup, find_input_only, find_launch_group, find_waits
from .nodes import InputKind, Node, NodeKind, Size
from .restore import restore_order

__all__ = [
    "InputKind",
    "LaunchGroup",
    "Node",
    "NodeKind",
    "OverlapGraph",
    "Size",
    "find_input_only",
    "find_launch_group",
    "find_waits",
    "first_violation",
    "graph_from_json",
    "graph_to_json",
    "restore_order",
]
