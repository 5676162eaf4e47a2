"""The plugin keeps to the rules for plugins."""

from __future__ import annotations

import overlap_float8_replay

from overlap_core.testing import OpCall, PluginConformance, tensor_spec

FLOAT8 = "float8_e4m3fn"


class TestConformance(PluginConformance):
    plugin = overlap_float8_replay
    ops = {  # noqa: RUF012
        "aten::_scaled_mm": OpCall(
            (
                tensor_spec(32, 64, dtype=FLOAT8),
                tensor_spec(64, 16, dtype=FLOAT8, stride=(1, 64)),
                tensor_spec(32, 1),
                tensor_spec(1, 16),
            ),
            {"scale_result": tensor_spec(1)},
        ),
        "mylib::float8_linear": OpCall((tensor_spec(8, 8, dtype="float8_e5m2"), tensor_spec(1))),
    }
