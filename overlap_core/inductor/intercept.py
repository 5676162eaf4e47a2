"""Calling an op without letting it communicate, and noting what it would have issued."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .signatures import describe_call, find_exchange, is_uneven, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Allocations", "SilentCollectives"]

_TRANSPARENT = frozenset({"aten", "prims", "prim"})
_BACKENDS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})


class SilentCollectives(TorchDispatchMode):
    """While active, collectives return at once with made-up results; `issued` lists them.

    Point-to-point and barrier ops count. What a peer would have sent stays as it was allocated,
    so values mean nothing, but shapes, dtypes and the sequence of operations are the real ones.
    """

    def __init__(self, allocated: Allocations | None = None) -> None:
        """Gather nothing but what is issued, or in `allocated` also what ops allocate."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.issued: list[str] = []
        self.calls: list[str] = []
        """The same, with what peers must call alike."""
        self.exchanges: list[list[Any]] = []
        """Of those all-to-alls whose pieces differ in size, see `find_exchange`."""
        self.is_uneven = False
        """Whether nobody can say if the peers' calls fit."""
        self._allocated = allocated

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._allocated is not None:
            self._allocated.keep_apart(_tensors((args, kwargs)))
        if func.namespace in _FUNCTIONAL:
            return self._counted(self._functional(func, args, kwargs))
        if func.namespace == "c10d":
            self._note(func, args, kwargs)
            return _c10d_result(func, args)
        if func.namespace in _TRANSPARENT:
            return self._counted(func(*args, **kwargs))
        # A mode is off inside of itself. Go on below it, so that an op written in Python that
        # communicates through torch.distributed is heard as well.
        device = next((t.device.type for t in _tensors((args, kwargs))), "cpu")
        keys = torch._C.DispatchKeySet(_BACKENDS.get(device, torch._C.DispatchKey.CPU))
        with self:
            return func.redispatch(keys, *args, **kwargs)

    def _counted(self, result: Any) -> Any:
        return result if self._allocated is None else self._allocated.add(result)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.issued.append(str(func))
        self.calls.append(describe_call(func, args, kwargs))
        self.is_uneven |= is_uneven(func, args, kwargs)
        if (exchange := find_exchange(func, args, kwargs)) is not None:
            self.exchanges.append(exchange)

    def _functional(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name == "wait_tensor":
            return args[0]
        self._note(func, args, kwargs)
        if name.endswith("_out"):
            return kwargs["out"]
        if name.endswith("_"):
            return args[0]
        device = _tensors(args)[0].device
        meta = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        shaped = func(*meta[0], **meta[1])
        return tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=device), shaped)


class Allocations:
    """Bytes behind the tensors that ops return, as long as these live."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._live_bytes = 0
        self._users: dict[int, int] = {}
        """Living tensors by the storage that they share."""
        self._foreign: dict[int, set[int]] = {}
        """Living tensors that share a storage from elsewhere; it may be another's address later."""

    def keep_apart(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out storages that come from elsewhere, also where an op returns views of them."""
        for tensor, storage, _ in _storages(tensors):
            if storage in self._users:
                continue
            known = self._foreign.setdefault(storage, set())
            if id(tensor) not in known:
                known.add(id(tensor))
                weakref.finalize(tensor, self._forget, storage, id(tensor))

    def _forget(self, storage: int, tensor: int) -> None:
        self._foreign[storage].discard(tensor)
        if not self._foreign[storage]:
            del self._foreign[storage]

    def add(self, result: Any) -> Any:
        """Count what an op returned, from now until it is gone."""
        for tensor, storage, nbytes in _storages(_tensors(result)):
            if storage in self._foreign:
                continue
            if storage not in self._users:
                self._users[storage] = 0
                self._live_bytes += nbytes
            self._users[storage] += 1
            weakref.finalize(tensor, self._remove, storage, nbytes)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return result

    def _remove(self, storage: int, nbytes: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            del self._users[storage]
            self._live_bytes -= nbytes

    def beside(self, result: Any) -> int:
        """The most bytes at once, without those that a result holds."""
        held = {storage: nbytes for _, storage, nbytes in _storages(_tensors(result))}
        counted = (nbytes for storage, nbytes in held.items() if storage in self._users)
        return max(0, self.peak_bytes - sum(counted))


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Tensors with what names their storage, and its bytes; those that have none are left out."""
    for tensor in tensors:
        with suppress(NotImplementedError, RuntimeError):
            storage = tensor.untyped_storage()
            yield tensor, storage._cdata, storage.nbytes()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _c10d_result(func: Any, args: tuple[Any, ...]) -> Any:
    """What a c10d op returns: its output arguments, and a work that is done."""
    results: list[Any] = []
    tensors = iter(args)
    for value in func._schema.returns:
        if "Work" in str(value.type):
            results.append(FakeWork().boxed())
        else:
            results.append(next(tensors, None))
    return results[0] if len(results) == 1 else tuple(results)
