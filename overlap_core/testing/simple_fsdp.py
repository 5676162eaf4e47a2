"""A small SimpleFSDP-style wrapper, for demos and tests.

Every parameter becomes a ``Shard(0)`` DTensor and is redistributed to ``Replicate`` by a property
when it is read. Under ``torch.compile(fullgraph=True)`` each read is then one
``_c10d_functional.all_gather_into_tensor`` in the graph, and its backward one
``reduce_scatter_tensor``.

Source: the idea is SimpleFSDP's (Zhang et al., "SimpleFSDP: Simpler Fully Sharded Data Parallel
with torch.compile", 2024) and torchtitan's ``experiments/simple_fsdp``; the code is our own and
uses public interfaces of torch only.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from overlap_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh

ReduceOp = Literal["avg", "sum"]


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = False,
    reduce_op: ReduceOp = "avg",
) -> nn.Module:
    """Shard every parameter of ``module`` over ``mesh``, in place, and return ``module``.

    No communication happens: each rank keeps its own slice of the full parameters it holds, so all
    ranks must start from the same full state (the same seed, or a loaded checkpoint);
    ``check_same_state`` checks it. Buffers stay as they are.

    Args:
        module: parameters of any shape ``(d0, ...)``. ``d0`` need not divide by the mesh size;
            ranks beyond the end hold an empty shard. Parameters without dimensions are replicated.
            A parameter shared by several modules stays one parameter.
        mesh: one-dimensional.
        param_dtype: floating-point parameters are cast to it before they are gathered; gradients
            are reduced in it.
        reshard_after_forward: under ``torch.compile``, free the gathered parameter after use and
            gather it again in backward. Eager code computes the same, but keeps what it gathered,
            as the layers themselves save it for backward.
        reduce_op: ``"avg"`` averages gradients over ranks, ``"sum"`` adds them up.

    Raises:
        ConfigError: ``mesh`` has more than one dimension, or ``module`` is sharded already.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"shard_module needs a mesh of one dimension, not of {mesh.ndim}")
    gather = _Gather(
        dtype=param_dtype,
        grad_placements=(Partial(reduce_op),),
        regather_in_backward=reshard_after_forward,
    )
    sharded: dict[int, nn.Parameter] = {}  # by id of the full parameter: keeps ties
    originals: list[nn.Parameter] = []  # keeps the ids above from being reused
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
    for path, child in module.named_modules():
        names = tuple(name for name, param in child._parameters.items() if param is not None)
        if not names:
            continue
        for name in names:
            full = child._parameters[name]
            assert full is not None
            if isinstance(full, DTensor):
                raise ConfigError(f"parameter {name!r} of module {path!r} is already a DTensor")
            if id(full) not in sharded:
                originals.append(full)
                sharded[id(full)] = _shard(full, mesh)
            child._parameters[name] = sharded[id(full)]
        key = (type(child), names)
        if key not in classes:
            classes[key] = _class_with_gathers(type(child), names, gather)
        child.__class__ = classes[key]
    return module


def _shard(full: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    placement: Placement = Shard(0) if full.ndim else Replicate()
    # src_data_rank=None: each rank slices what it holds, nothing is sent.
    local = distribute_tensor(full.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(local, requires_grad=full.requires_grad)


def _class_with_gathers(
    base: type[nn.Module], names: Iterable[str], gather: Callable[[DTensor], torch.Tensor]
) -> type[nn.Module]:
    """A subclass of ``base`` whose parameters are gathered when they are read.

    The class attribute wins over ``nn.Module.__getattr__``, while ``_parameters`` (and so
    ``parameters()``, ``state_dict()`` and optimizers) keeps the shards.
    """

    def reader(name: str) -> property:
        def read(self: Any) -> torch.Tensor:
            return gather(self._parameters[name])

        return property(read)

    body = {name: reader(name) for name in names}
    return type(f"Sharded{base.__name__}", (base,), {"__module__": __name__, **body})


@attrs.frozen(kw_only=True)
class _Gather:
    """Turns a sharded parameter into the full plain tensor, differentiably."""

    dtype: torch.dtype | None
    grad_placements: tuple[Placement, ...]
    regather_in_backward: bool

    def __call__(self, param: DTensor) -> torch.Tensor:
        if self.regather_in_backward and torch.is_grad_enabled():
            result = checkpoint(
                self._replicate, param, use_reentrant=False, context_fn=_recompute_gathers
            )
            assert isinstance(result, torch.Tensor)
            return result
        return self._replicate(param)

    def _replicate(self, param: DTensor) -> torch.Tensor:
        value: DTensor = param
        if self.dtype is not None and param.is_floating_point():
            value = param.to(self.dtype)  # type: ignore[assignment]  # Tensor.to keeps DTensor
        value = value.redistribute(placements=[Replicate()])
        return value.to_local(grad_placements=self.grad_placements)


def _recompute_policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    recomputed = (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.aten._to_copy.default,
    )
    return CheckpointPolicy.MUST_RECOMPUTE if op in recomputed else CheckpointPolicy.PREFER_SAVE


def _recompute_gathers() -> Any:
    return create_selective_checkpoint_contexts(_recompute_policy)


def state_digest(module: nn.Module) -> str:
    """Hex SHA-256 of the full parameters: their names, shapes, dtypes and bytes.

    On a sharded module every rank must call it, as the shards are gathered.
    """
    digest = hashlib.sha256()
    for name, param in module.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        full = full.detach().cpu().contiguous()
        digest.update(f"{name}:{tuple(full.shape)}:{full.dtype};".encode())
        digest.update(full.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_same_state(module: nn.Module, group: dist.ProcessGroup | None = None) -> str:
    """Raise unless all ranks of ``group`` hold the same full parameters; return their digest.

    Call it before ``shard_module``, on every rank. Buffers are each rank's own and not compared.

    Raises:
        RuntimeError: the digests differ, on every rank alike; the message lists the ranks that
            differ from the first.
    """
    own = state_digest(module)
    first = next(module.parameters(), torch.empty(0))
    mine = torch.tensor(list(bytes.fromhex(own)), dtype=torch.uint8, device=first.device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    digests = [bytes(row.tolist()).hex() for row in gathered]
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise RuntimeError(
            f"the full parameters on ranks {different} differ from those on rank 0: seed every "
            "rank alike, or load the same checkpoint, before sharding"
        )
    return own
