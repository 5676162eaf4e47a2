"""How Hypothesis searches in all tests of this repository, those of the plugins among them.

`same`, which every run has unless it asks for another one, gives the same answer each time, on
every machine: what a test tries follows from its own source. `fuzz` tries what a seed says, for
`tests/fuzz.py`; nothing is kept from run to run, so that the seed alone decides.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# No deadlines: tests share their cores with compilers and with each other.
settings.register_profile(
    "same",
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fuzz", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")

# Hypothesis mixes in the literals of all modules that are loaded, so a test would try other things
# alone than among others. Versions that don't, or no longer do it here, need nothing.
if hasattr(providers, "_get_local_constants"):
    _nothing: Any = type(providers._local_constants)()
    providers._get_local_constants = lambda: _nothing
