"""What is compared: one model, compiled in different ways."""

from __future__ import annotations

import ast
import gc
import types
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch._inductor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from video_transformer import detach_shards, resident_bytes

import overlap_core
from overlap_core.testing import shard_module

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from .workloads import Workload

    Step = Callable[..., tuple[torch.Tensor, ...]]

__all__ = [
    "CONTENDERS",
    "Contender",
    "Models",
    "SkippedError",
    "configure_torch",
    "parse_contenders",
]

_PASSES = "reorder_for_compute_comm_overlap_passes"
_GATE = "reorder_for_compute_comm_overlap"
_SCHEDULER = "aten_distributed_optimizations"
_REORDER = "reorder_communication_preserving_peak_memory"

# Options that keep other ways of overlapping out, where this torch has them.
_COMMON: dict[str, Any] = {
    "fx_graph_cache": False,
    f"{_SCHEDULER}.enable_simple_overlap": False,
}

# Inductor's own ways. Keys after "?" are set only where this torch has them.
_INDUCTOR: dict[str, dict[str, Any]] = {
    "program": {},
    "raise_sink": {_GATE: True, _PASSES: ["raise_comms", "sink_waits"]},
    "iterative": {_GATE: True, _PASSES: [_REORDER, "sink_waits_iterative", _REORDER]},
    "scheduler": {
        f"{_SCHEDULER}.enable_overlap_scheduling": True,
        f"{_SCHEDULER}.collective_bucketing": False,
        f"?{_SCHEDULER}.insert_overlap_deps": True,
        f"?{_SCHEDULER}.pre_bucketing_fsdp_collectives": False,
    },
    "scheduler_bucketed": {
        f"{_SCHEDULER}.enable_overlap_scheduling": True,
        f"{_SCHEDULER}.collective_bucketing": True,
        f"?{_SCHEDULER}.insert_overlap_deps": True,
    },
    "program_bucketed": {"bucket_all_gathers_fx": "all"},
    "simple_overlap": {f"{_SCHEDULER}.enable_simple_overlap": True},
}

CONTENDERS = {
    "unsharded": "full weights on every rank: the baseline",
    "program": "sharded, program order",
    "program_bucketed": "sharded, program order, Inductor's bucket_all_gathers_fx='all'",
    "raise_sink": "Inductor's passes raise_comms, sink_waits",
    "iterative": f"Inductor's passes {_REORDER}, sink_waits_iterative, and the first again",
    "scheduler": "Inductor's overlap scheduling without bucketing",
    "scheduler_bucketed": "Inductor's overlap scheduling with bucketing",
    "simple_overlap": "Inductor's simple_overlap (torch 2.14)",
    "fsdp2": "fully_shard on each compiled block, then on the model; hooks run eagerly",
    "ours": "overlap_core; `ours:KEY=VALUE+KEY=VALUE` sets fields of OverlapConfig",
}
# First what a run must not lose if a later one ends it: slow ones and other orders come last.
_ALL = (
    *("unsharded", "program", "fsdp2", "ours", "ours:coalesce=off"),
    *("program_bucketed", "raise_sink", "scheduler", "scheduler_bucketed"),
    *("simple_overlap", "iterative"),
)


class SkippedError(Exception):
    """This torch or this device cannot run the contender."""


@attrs.frozen
class Contender:
    """One entry of the list, such as `program` or `ours:slack_ns=0+contention=1.3`."""

    label: str
    kind: str
    settings: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Built:
    """A contender ready to be called, not yet compiled."""

    step: Step
    """Returns tensors of this rank to compare between contenders; the first is the output, or the
    loss, which all have. The second, if there is one, is the shard of one weight's gradient."""
    own_bytes: int
    """Parameters that stay on this rank."""


def parse_contenders(text: str) -> list[Contender]:
    """Read a comma-separated list; `all` stands for every contender, in a good order.

    Raises:
        ValueError: an unknown or repeated contender, or settings that aren't `KEY=VALUE`.
    """
    found: dict[str, Contender] = {}
    parts = [part.strip() for part in text.split(",")]
    labels = [label for part in parts for label in (_ALL if part == "all" else (part,))]
    for label in filter(None, labels):
        kind, _, rest = label.partition(":")
        if kind not in CONTENDERS:
            raise ValueError(f"unknown contender {kind!r}; there are: all, {', '.join(CONTENDERS)}")
        if label in found:
            raise ValueError(f"contender {label!r} is named twice")
        if rest and kind != "ours":
            raise ValueError(f"{label!r}: only `ours` has settings")
        settings = {}
        for setting in filter(None, rest.split("+")):
            key, separator, value = setting.partition("=")
            if not separator:
                raise ValueError(f"{label!r}: expected KEY=VALUE, not {setting!r}")
            settings[key] = _value(value)
        found[label] = Contender(label, kind, settings)
    return list(found.values())


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def configure_torch() -> None:
    """What holds for all contenders: nothing from caches of earlier runs, static shapes."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    functorch_config.enable_autograd_cache = False
    dynamo_config.automatic_dynamic_local_pgo = False
    dynamo_config.recompile_limit = 64  # FSDP2's blocks share one code object


@attrs.define(kw_only=True)
class Models:
    """Makes contenders of one size; those that shard alike share one set of shards."""

    workload: Workload
    device: torch.device
    mesh: DeviceMesh
    group: dist.ProcessGroup
    """For the communication inside custom ops."""
    _made: dict[str, nn.Module] = attrs.field(factory=dict)

    def build(self, contender: Contender) -> Built:
        """Prepare a contender; it compiles at its first call.

        Raises:
            SkippedError: this torch lacks what it needs.
        """
        options = self._options(contender)
        finish = self.workload.finish
        compute: Callable[..., torch.Tensor]
        if contender.kind == "fsdp2":
            model = self._model("fsdp2", self._fsdp2)
            # Its blocks are compiled one by one, the loss as well.
            if self.workload.trains:
                finish = torch.compile(finish, dynamic=False, options=_common())
            compute = _then(model, finish)
        else:
            if contender.kind == "unsharded":
                model = self._model("unsharded", self._full)
            else:
                model = self._model("sharded", self._sharded)
            own = _own_code(_then(model, finish), contender.label)
            compute = torch.compile(own, fullgraph=True, dynamic=False, options=options)
        step = _train_step(model, compute) if self.workload.trains else _forward_step(compute)
        return Built(step=step, own_bytes=resident_bytes(model))

    def _options(self, contender: Contender) -> dict[str, Any]:
        if contender.kind == "ours":
            # Well under the limit of a phase: a rank that never negotiates must not end the run.
            config = overlap_core.OverlapConfig(**{"deadline_s": 90.0, **contender.settings})
            return {**_common(), **overlap_core.inductor_options(config)}
        return {**_common(), **_known(_INDUCTOR.get(contender.kind, {}))}

    def _model(self, key: str, make: Callable[[], nn.Module]) -> nn.Module:
        if key not in self._made:
            self._made[key] = make()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return self._made[key]

    def _full(self) -> Any:
        return self.workload.make(self.device, self.group)

    def _sharded(self) -> nn.Module:
        model: nn.Module = self._full()
        for part in self.workload.sharded_parts(model):
            shard_module(part, self.mesh, reshard_after_forward=self.workload.trains)
        detach_shards(model)
        return model

    def _fsdp2(self) -> nn.Module:
        # As torchtitan does: compiled blocks, with FSDP's hooks around them.
        model = self._full()
        parts = self.workload.sharded_parts(model)
        sharded = {id(parameter) for part in parts for parameter in part.parameters()}
        whole = {parameter for parameter in model.parameters() if id(parameter) not in sharded}
        for index, block in enumerate(model.blocks):
            compiled: Any = torch.compile(block, dynamic=False, options=_common())
            fully_shard(compiled, mesh=self.mesh, ignored_params=whole)
            model.blocks[index] = compiled
        fully_shard(model, mesh=self.mesh, ignored_params=whole)
        result: nn.Module = model
        return result


def _then(
    model: nn.Module, finish: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def compute(*inputs: torch.Tensor) -> torch.Tensor:
        return finish(model(*inputs))

    return compute


def _own_code(compute: Callable[..., torch.Tensor], label: str) -> Callable[..., torch.Tensor]:
    """A function with a code object of its own.

    Dynamo keeps what it compiled by code object and looks through it at each call; so contenders
    that share one would slow each other's host down, and run into the recompile limit.
    """
    assert isinstance(compute, types.FunctionType)
    name = "step_" + "".join(letter if letter.isalnum() else "_" for letter in label)
    code = compute.__code__.replace(co_name=name)
    return types.FunctionType(code, compute.__globals__, name, None, compute.__closure__)


def _forward_step(compute: Callable[..., torch.Tensor]) -> Step:
    def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (compute(*inputs),)

    return step


def _train_step(model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> Step:
    """Forward, backward, and no gradients left behind: contenders share parameters."""
    parameters = list(model.parameters())
    matrix = next(parameter for parameter in parameters if parameter.ndim == 2)

    def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = loss_of(*inputs)
        loss.backward()
        gradient = matrix.grad
        for parameter in parameters:
            parameter.grad = None
        # Whole weights have this rank's own gradients, which nobody averages.
        own = (gradient.to_local(),) if isinstance(gradient, DTensor) else ()
        return (loss.detach(), *own)

    return step


def _common() -> dict[str, Any]:
    known = torch._inductor.list_options()
    return {key: value for key, value in _COMMON.items() if key in known}


def _known(wanted: dict[str, Any]) -> dict[str, Any]:
    known = torch._inductor.list_options()
    options = {}
    for key, value in wanted.items():
        name = key.removeprefix("?")
        if name in known:
            options[name] = value
        elif name == key:
            raise SkippedError(f"torch {torch.__version__} has no Inductor option {name}")
    return options
