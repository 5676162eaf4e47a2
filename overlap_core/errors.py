"""Every error that overlap_core raises on purpose.

Messages say what is wrong, where (plugin, hook, node, rank, file) and what to do.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CostTableError",
    "DeadlineError",
    "DivergenceError",
    "GraphFileError",
    "GraphFormatError",
    "IllegalOrderError",
    "OverlapError",
    "PluginError",
    "RegistrationError",
    "ReplayError",
    "ReportFileError",
    "TraceFileError",
    "UnsupportedTorchError",
]


class OverlapError(Exception):
    """Base class of all errors raised by overlap_core."""


class ConfigError(OverlapError, ValueError):
    """A configuration value is unknown, has the wrong type or is out of range."""


class GraphFormatError(OverlapError, ValueError):
    """A graph breaks a rule of the graph format, such as reading a buffer nothing writes."""


class GraphFileError(GraphFormatError):
    """A graph file cannot be read: not JSON, another version, or a graph that breaks the format."""


class IllegalOrderError(OverlapError):
    """An order of nodes is not a legal topological order of its graph."""


class PluginError(OverlapError):
    """A plugin cannot be loaded, clashes with another one, or one of its hooks failed."""


class RegistrationError(OverlapError, ValueError):
    """A custom op is registered under a bad name, twice, or with an unusable hook."""


class ReplayError(OverlapError):
    """An op cannot be replayed: its arguments cannot be made, or the replay failed."""


class ReportFileError(OverlapError, ValueError):
    """A report file cannot be read: not a report, broken, or of a newer version."""


class TraceFileError(OverlapError, ValueError):
    """A trace cannot be read, or holds nothing that a report could be compared with."""


class UnsupportedTorchError(OverlapError):
    """The installed torch is outside the supported range, or lacks a name that we rest on."""


class CostTableError(OverlapError, ValueError):
    """A saved cost table cannot be used: broken, or made on other hardware or another torch."""


class DivergenceError(OverlapError):
    """Going on would make ranks issue collectives in different orders, so that they hang.

    The one error that reaches the user's compile: program order would not be safe either.
    """


class DeadlineError(OverlapError, TimeoutError):
    """A peer rank did not answer within the deadline of a negotiation."""
