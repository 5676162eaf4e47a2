"""Plugin `mode_ladders`: the ladders `strict`, `conservative` and `majority`, and `compose`.

Each is a pure function of the votes and never freer than the core's own ladder `default`.
"""

from __future__ import annotations

from ._compose import Predicate, Rule, compose
from ._ladders import conservative, majority, strict

__all__ = ["Predicate", "Rule", "compose", "conservative", "majority", "strict"]
