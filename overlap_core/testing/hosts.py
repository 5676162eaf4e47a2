"""Hosts of chosen plugins, whatever is installed, and a plugin that records how it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from overlap_core.config import OverlapConfig
from overlap_core.hookspecs import hookimpl
from overlap_core.host import PluginHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlap_core.costs.types import CostRequest
    from overlap_core.graph import Node, OverlapGraph
    from overlap_core.placement.plan import Plan
    from overlap_core.ranks.votes import Vote
    from overlap_core.registry import OpRegistry
    from overlap_core.replay.types import TensorSpec

__all__ = ["HookCall", "HookRecorder", "host_with"]


def host_with(*plugins: object, config: OverlapConfig | None = None) -> PluginHost:
    """A host of the built-ins and just these plugins; the environment is ignored.

    Args:
        plugins: modules, instances, or names of installed plugins.
        config: None: the defaults.

    Raises:
        PluginError, ConfigError: as `PluginHost.discover`; also if no plugin of a name is
            installed.
    """
    return PluginHost.discover(
        OverlapConfig() if config is None else config,
        plugins=[plugin for plugin in plugins if not isinstance(plugin, str)],
        environ={},
        installed=[plugin for plugin in plugins if isinstance(plugin, str)],
    )


@frozen
class HookCall:
    """One call of one hook."""

    hook: str
    arguments: Mapping[str, Any]


class HookRecorder:
    """A plugin that implements every hook, has no opinion, and writes down each call in order.

        recorder = HookRecorder()
        host_with(my_plugin, recorder).classify(node)
        assert recorder.hooks == ["overlap_register_ops", "overlap_classify_node"]

    A hook that stops at the first answer reaches the recorder only if no plugin with a name
    before its own has one. It offers the mode ladder of its own name as well.
    """

    def __init__(self, name: str = "hook_recorder") -> None:
        self.overlap_plugin_name = name
        self.calls: list[HookCall] = []

    @property
    def hooks(self) -> list[str]:
        """The hooks' names, one for each call."""
        return [call.hook for call in self.calls]

    def of(self, hook: str) -> list[HookCall]:
        """The calls of one hook."""
        return [call for call in self.calls if call.hook == hook]

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()

    def _record(self, hook: str, **arguments: Any) -> None:
        self.calls.append(HookCall(hook, arguments))

    @hookimpl
    def overlap_register_ops(self, registry: OpRegistry) -> None:
        """Register nothing."""
        self._record("overlap_register_ops", registry=registry)

    @hookimpl
    def overlap_classify_node(self, node: Node) -> None:
        """No opinion."""
        self._record("overlap_classify_node", node=node)

    @hookimpl
    def overlap_materialize_inputs(
        self, op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """No opinion."""
        self._record("overlap_materialize_inputs", op_name=op_name, args=args, kwargs=kwargs)

    @hookimpl
    def overlap_realize_tensor(self, spec: TensorSpec) -> None:
        """No opinion."""
        self._record("overlap_realize_tensor", spec=spec)

    @hookimpl
    def overlap_measure_cost(self, request: CostRequest) -> None:
        """No opinion."""
        self._record("overlap_measure_cost", request=request)

    @hookimpl
    def overlap_choose_mode(self, votes: tuple[Vote, ...]) -> None:
        """No opinion: the ladder `default` decides."""
        self._record("overlap_choose_mode", votes=votes)

    @hookimpl
    def overlap_adjust_plan(self, plan: Plan, graph: OverlapGraph) -> None:
        """No change."""
        self._record("overlap_adjust_plan", plan=plan, graph=graph)

    @hookimpl
    def overlap_report_section(self, report: Any) -> None:
        """No section."""
        self._record("overlap_report_section", report=report)
