"""`PluginHost`: the plugins of one compile, in an order that names decide, and typed calls.

Hooks propose and the core decides: each call hands out frozen values, checks what comes back,
and turns whatever goes wrong into a `PluginError` that names plugin, hook and subject.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from attrs import evolve, frozen

from ._clock import REAL_CLOCK, Clock
from ._discovery import find_plugins, remedy
from ._hook_calls import HookCalls, function_name
from .config import check_config
from .errors import ConfigError, PluginError
from .registry import OpRegistry, op_was_seen_communicating

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch
    from pluggy import HookImpl

    from ._discovery import Candidate
    from .config import OverlapConfig
    from .costs.types import Cost, CostRequest
    from .graph import Node, OverlapGraph
    from .placement.plan import Plan
    from .ranks.votes import ModeDecision, Vote
    from .replay.types import TensorSpec
    from .skeleton.entries import Communication

__all__ = ["PluginHost", "PluginInfo"]

T = TypeVar("T")

_DEFAULT_LADDER = "default"
_FREEST_FIRST = ("identical", "slot", "pinned", "abort")


@frozen(kw_only=True)
class PluginInfo:
    """One plugin as `overlap-core plugins` lists it."""

    name: str
    version: str
    """Empty for a plugin given as an object that states none."""
    distribution: str
    """Empty for a plugin given as an object."""
    builtin: bool
    essential: bool
    """Can't be left out."""
    hooks: tuple[str, ...]
    """Names of the hooks that it implements, sorted."""


class PluginHost:
    """The plugins of one installation of the pass. Make one with `discover`."""

    def __init__(
        self,
        candidates: Iterable[Candidate],
        *,
        ladder: str,
        notes: Iterable[str] = (),
        timeout_s: float = math.inf,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._candidates = tuple(candidates)
        self._notes = tuple(notes)
        self._calls = HookCalls(self._candidates, timeout_s, clock)
        self._ladders = _find_ladders(self._calls)
        if ladder not in self._ladders:
            raise ConfigError(
                f"OverlapConfig(mode_ladder={ladder!r}): no plugin offers a ladder of this name; "
                f"known ladders: {', '.join(self.ladders())}"
            )
        self._ladder = ladder

    @classmethod
    def discover(
        cls,
        config: OverlapConfig,
        *,
        plugins: Iterable[object] = (),
        environ: Mapping[str, str] = os.environ,
        installed: Collection[str] | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> PluginHost:
        """Load the built-ins, the installed plugins and the given ones, and register their ops.

        `installed` names the installed plugins to load; None: all of them.
        `plugins` holds modules or instances; the name of one is its `overlap_plugin_name`, or
        `__name__`, or its class's name, and `overlap_plugin_version` or `__version__` its version.
        `clock` tells how long plugins take.

        Raises:
            ConfigError: `config` is no `OverlapConfig`, a plugin to leave out is unknown or
                essential, or the ladder is unknown.
            PluginError: a plugin can't be loaded, clashes with another, implements a hook that
                doesn't exist or with other arguments, or fails to register its ops.
        """
        # Whoever installs the pass, or simulates it, hands over here what the user gave.
        config = check_config(config)
        candidates, notes = find_plugins(config, plugins, environ, installed)
        host = cls(
            candidates,
            ladder=config.mode_ladder,
            notes=notes,
            timeout_s=config.plugin_timeout_s,
            clock=clock,
        )
        host.register_ops()
        return host

    def plugins(self) -> tuple[PluginInfo, ...]:
        """All plugins, in calling order."""
        return tuple(
            PluginInfo(
                name=candidate.name,
                version=candidate.version,
                distribution=candidate.distribution,
                builtin=candidate.builtin,
                essential=candidate.essential,
                hooks=self._calls.hooks_of(candidate.name),
            )
            for candidate in self._candidates
        )

    def builtins(self) -> PluginHost:
        """A host without the plugins of others, for where one of them fails."""
        return PluginHost(
            [candidate for candidate in self._candidates if candidate.builtin],
            ladder=_DEFAULT_LADDER,
        )

    def notes(self) -> tuple[str, ...]:
        """What was odd about the plugins but no error, for `doctor` and the report."""
        return self._notes

    def plugin_names(self) -> tuple[str, ...]:
        """Words such as "cp_attention 0.1.0", in calling order, for the votes."""
        return tuple(f"{plugin.name} {plugin.version}".rstrip() for plugin in self._candidates)

    def digest(self) -> str:
        """Hex digest of names and versions in calling order, for the votes."""
        rows = [(plugin.name, plugin.version) for plugin in self._candidates]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def source_files(self) -> tuple[str, ...]:
        """Files of the code of all plugins but the built-in ones, as far as they are known."""
        found = set()
        for candidate in self._candidates:
            if not candidate.builtin:
                name = getattr(candidate.plugin, "__name__", type(candidate.plugin).__module__)
                module = sys.modules.get(name)
                file = getattr(module, "__file__", None)
                folders = getattr(module, "__path__", None)
                if file:
                    found.add(str(file))
                for folder in folders or ():
                    found.update(str(path) for path in Path(folder).rglob("*.py"))
        return tuple(sorted(found))

    def ladders(self) -> tuple[str, ...]:
        """Names that `OverlapConfig.mode_ladder` may have, sorted."""
        return tuple(sorted(self._ladders))

    def register_ops(self, registry: OpRegistry | None = None) -> None:
        """Let every plugin register its ops: in `registry`, or in one of the plugin's own.

        `discover` has called it already.
        """
        hook, calls = "overlap_register_ops", self._calls
        for impl in calls.of(hook):
            own = registry or OpRegistry(impl.plugin_name)
            result = calls.call(impl, hook, "", registry=own)
            if result is not None:
                raise calls.wrong_type(impl, hook, "", result, "None")

    def bounded(self, function: Callable[[], T]) -> T:
        """Run code that calls this host many times; a plugin that blocks is given up.

        Raises:
            PluginError: a plugin failed, or took longer than `plugin_timeout_s`.
        """
        return self._calls.bounded(function)

    def classify(self, node: Node) -> Communication | None:
        """What a node communicates, or None if no plugin knows.

        An op that was seen to communicate does so, whatever a plugin says.
        """
        from .skeleton.entries import Communication

        hook, subject = "overlap_classify_node", f"node {node.name!r} ({node.op})"
        for impl, answer in self._calls.answers(hook, subject, node=node):
            if not isinstance(answer, Communication):
                raise self._calls.wrong_type(impl, hook, subject, answer, "Communication or None")
            if not answer.issues and op_was_seen_communicating(node.op):
                return evolve(answer, issues=True, groups=() if node.group is None else node.group)
            return answer
        return None

    def materialize(
        self, op_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replay arguments for an op; the given generic ones if no plugin has others."""
        hook, subject = "overlap_materialize_inputs", f"op {op_name}"
        values = {"args": tuple(args), "kwargs": MappingProxyType(dict(kwargs))}
        for impl, answer in self._calls.answers(hook, subject, op_name=op_name, **values):
            match answer:
                case [tuple() | list() as new_args, Mapping() as new_kwargs]:
                    return tuple(new_args), dict(new_kwargs)
            wanted = "a pair (args, kwargs) or None"
            raise self._calls.wrong_type(impl, hook, subject, answer, wanted)
        return tuple(args), dict(kwargs)

    def realize_tensor(self, spec: TensorSpec) -> torch.Tensor | None:
        """A replay tensor for a dtype that needs one made specially, or None."""
        hook, subject = "overlap_realize_tensor", f"{spec.dtype} tensor of shape {spec.shape}"
        for impl, answer in self._calls.answers(hook, subject, spec=spec):
            if not _is_tensor(answer):
                raise self._calls.wrong_type(impl, hook, subject, answer, "torch.Tensor or None")
            shape, dtype = tuple(answer.shape), str(answer.dtype).removeprefix("torch.")
            if (shape, dtype) != (tuple(spec.shape), spec.dtype):
                problem = f"returned a {dtype} tensor of shape {shape}: expected what spec says"
                raise self._calls.error(impl, hook, subject, problem)
            return answer
        return None

    def measure_cost(self, request: CostRequest) -> Cost | None:
        """The cost of a structural key, or None if no plugin knows."""
        from .costs.types import Cost, CostSource

        hook, subject = "overlap_measure_cost", f"node {request.node!r} ({request.op})"
        for impl, answer in self._calls.answers(hook, subject, request=request):
            cost = answer if isinstance(answer, Cost) else Cost(ns=answer)  # type: ignore[arg-type]
            network_ns = 0 if cost.network_ns is None else cost.network_ns
            if not (_is_time(cost.ns) and _is_time(network_ns) and network_ns <= cost.ns):
                wanted = "nanoseconds (an int of at least 0), a Cost with such times, or None"
                raise self._calls.wrong_type(impl, hook, subject, answer, wanted)
            known = cost.source is not CostSource.UNKNOWN
            return cost if known else evolve(cost, source=CostSource.ANALYTICAL)
        return None

    def choose_mode(self, votes: Iterable[Vote]) -> ModeDecision:
        """The configured ladder's decision, which is never freer than that of `default`."""
        votes = tuple(sorted(votes, key=lambda vote: vote.rank))
        limit = self._ask_ladder(_DEFAULT_LADDER, votes)
        if limit is None:
            raise PluginError("the built-in ladder 'default' gave no decision: report this bug")
        if self._ladder == _DEFAULT_LADDER:
            return limit
        decision = self._ask_ladder(self._ladder, votes) or limit
        if _FREEST_FIRST.index(decision.mode) < _FREEST_FIRST.index(limit.mode):
            raise self._calls.error(
                self._ladders[self._ladder],
                "overlap_choose_mode",
                f"ladder {self._ladder!r}",
                f"chose mode {decision.mode} where the votes allow {limit.mode} at most "
                f"({limit.why}); a ladder may only be more careful",
            )
        return decision

    def adjust_plan(self, plan: Plan, graph: OverlapGraph) -> Plan:
        """The plan after every policy had its say; none may make a placement earlier."""
        from .placement.plan import Plan

        hook, subject = "overlap_adjust_plan", f"the plan of rank {graph.rank}"
        for impl in self._calls.of(hook):
            lent = evolve(graph, symbols=dict(graph.symbols))
            adjusted = self._calls.call(impl, hook, subject, plan=plan, graph=lent)
            if lent != graph:
                raise self._calls.error(impl, hook, subject, "changed the graph that it was given")
            if adjusted is None:
                continue
            if not isinstance(adjusted, Plan):
                raise self._calls.wrong_type(impl, hook, subject, adjusted, "a Plan or None")
            if problem := _what_is_wrong(plan, adjusted):
                raise self._calls.error(impl, hook, subject, problem)
            plan = adjusted
        return plan

    def report_sections(self, report: object) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Pairs of plugin name and section, in calling order."""
        hook, sections = "overlap_report_section", []
        for impl, section in self._calls.answers(hook, "", report=report):
            if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
                wanted = "a mapping with text keys, or None"
                raise self._calls.wrong_type(impl, hook, "", section, wanted)
            try:
                plain = json.loads(json.dumps(dict(section), allow_nan=False))
            except (TypeError, ValueError) as error:
                problem = f"returned a section that JSON can't hold: {error}"
                raise self._calls.error(impl, hook, "", problem) from error
            sections.append((impl.plugin_name, plain))
        return tuple(sections)

    def _ask_ladder(self, name: str, votes: tuple[Vote, ...]) -> ModeDecision | None:
        from .ranks.votes import Mode, ModeDecision

        hook, subject, impl = "overlap_choose_mode", f"ladder {name!r}", self._ladders[name]
        decision = self._calls.call(impl, hook, subject, votes=votes)
        if decision is None:
            return None
        if not isinstance(decision, ModeDecision) or not isinstance(decision.mode, Mode):
            raise self._calls.wrong_type(impl, hook, subject, decision, "a ModeDecision or None")
        return decision


def _is_time(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Without importing torch: whoever made a tensor has done so."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _find_ladders(calls: HookCalls) -> dict[str, HookImpl]:
    """Ladders by name: the plugin's for `overlap_choose_mode` itself, else the function's."""
    hook, ladders = "overlap_choose_mode", dict[str, "HookImpl"]()
    for impl in calls.of(hook):
        name = impl.plugin_name if function_name(impl) == hook else function_name(impl)
        if name in ladders:
            other = ladders[name].plugin_name
            raise PluginError(
                f"plugins {impl.plugin_name!r} and {other!r} both offer a mode ladder named "
                f"{name!r}: rename one, or {remedy(other)}"
            )
        ladders[name] = impl
    return ladders


def _what_is_wrong(plan: Plan, adjusted: Plan) -> str | None:
    """The first rule that an adjusted plan breaks, with the gather."""
    gathers, returned = ([one.gather for one in p.placements] for p in (plan, adjusted))
    if gathers != returned:
        changed = sorted(set(gathers) ^ set(returned)) or "their order"
        return f"returned a plan of other gathers ({changed}): they must stay as they are"
    for old, new in zip(plan.placements, adjusted.placements, strict=True):
        where = f"for gather {old.gather!r} it returned"
        if (old.ordinal, old.floor, old.original) != (new.ordinal, new.floor, new.original):
            return f"{where} another ordinal, floor or original: these must stay"
        if isinstance(new.boundary, bool) or not isinstance(new.boundary, int):
            return f"{where} boundary {new.boundary!r}: expected an int"
        if new.boundary < old.boundary:
            return f"{where} boundary {new.boundary}, earlier than {old.boundary}: later only"
        if new.boundary > old.original:
            return f"{where} boundary {new.boundary}, past its original {old.original}"
    return None
