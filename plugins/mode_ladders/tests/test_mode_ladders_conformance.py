"""The plugin keeps to the rules for plugins."""

from __future__ import annotations

import overlap_mode_ladders

from overlap_core.testing import PluginConformance


class TestConformance(PluginConformance):
    plugin = overlap_mode_ladders
