"""A check at run time that ranks issue their collectives in one order; off unless it is asked for.

While it records, each collective that this process issues is appended to a queue. A thread of the
check's own hashes what is in the queue and compares with other ranks over the job's key-value
store, so it goes on while the main thread is blocked in a collective.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from attrs import frozen
from torch.distributed import distributed_c10d

from overlap_core._clock import REAL_CLOCK, Clock
from overlap_core.errors import ConfigError, OverlapError
from overlap_core.ranks.issue_order import Group
from overlap_core.ranks.issued import add_listener, remove_listener, tensors_in
from overlap_core.ranks.order_check import Divergence, OrderComparison, Stall

from .groups import default_store, is_fake_world, rank_and_world_size

if TYPE_CHECKING:
    from types import TracebackType

    from overlap_core.ranks.store import KeyValueStore

__all__ = ["OrderCheck", "check_collective_order"]

logger = logging.getLogger(__name__)

_LONGEST_PERIOD_S = 1.0
_JOIN_GRACE_S = 5.0
_MOST_SIZES = 6


@frozen(kw_only=True)
class _Comparable:
    """Which arguments of an op must be alike on all ranks of the group."""

    tensors: int | None = 0
    """Of these the data types must be equal."""
    sizes: bool = True
    """Whether the numbers of elements must be equal, too."""
    root: int | None = None


# Arguments as in the ops' schemas. Splits of an all-to-all are each rank's own, and so are the
# lists that only the root of a gather or scatter has. Point-to-point operations are missing: the
# ranks of a group don't issue the same ones, and those of one batch have no order.
_COLLECTIVES = {
    "_allgather_base_": _Comparable(),
    "_reduce_scatter_base_": _Comparable(),
    "allgather_": _Comparable(),
    "allgather_coalesced_": _Comparable(),
    "allgather_into_tensor_coalesced_": _Comparable(),
    "allreduce_": _Comparable(),
    "allreduce_coalesced_": _Comparable(),
    "alltoall_": _Comparable(sizes=False),
    "alltoall_base_": _Comparable(sizes=False),
    "barrier": _Comparable(tensors=None),
    "broadcast_": _Comparable(root=2),
    "gather_": _Comparable(tensors=1, root=3),
    "reduce_": _Comparable(root=3),
    "reduce_scatter_": _Comparable(tensors=1),
    "reduce_scatter_tensor_coalesced_": _Comparable(),
    "scatter_": _Comparable(root=3),
}

_Issued = tuple[str, Group, tuple[int, ...], Any, int | None]
"""Name of the op, group, numbers of elements, data type, root."""


def check_collective_order(
    *, steps: int = 3, every: int = 64, deadline_s: float = 30.0
) -> OrderCheck:
    """Compare the order in which ranks issue collectives, for a few steps.

    All ranks call it at the same point of the program::

        with oc.check_collective_order(steps=3) as check:
            for batch in batches:
                train(batch)
                check.step()
        assert not check.divergences

    or call `start` and `stop` themselves. It costs nothing before `start` and nothing after `steps`
    calls of `step`, or `stop`.

    Args:
        steps: recording ends after so many calls of `step`.
        every: a digest is published at each multiple of this many collectives, besides the newest;
            smaller means that ranks far apart find a count to compare at sooner.
        deadline_s: seconds after which a rank that issues nothing while another is ahead is
            reported, and how long `stop` waits for the other ranks at most. Choose it well below
            the process group's own timeout.

    Raises:
        ConfigError: an argument is out of range.
    """
    _check_is_count("steps", steps)
    _check_is_count("every", every)
    _check_is_seconds("deadline_s", deadline_s)
    return OrderCheck(steps=steps, every=every, deadline_s=deadline_s)


def _check_is_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"check_collective_order({name}={value!r}): expected an integer of at least 1"
        )


def _check_is_seconds(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"check_collective_order({name}={value!r}): expected seconds above 0")


class OrderCheck:
    """One check of one rank; made by `check_collective_order`. Not to be started twice.

    A divergence is logged as an error, a stall as a warning, as soon as it is found; nothing is
    raised. Both are kept in `divergences` and `stalls`.
    """

    _one_at_a_time = threading.Lock()

    def __init__(
        self, *, steps: int, every: int, deadline_s: float, clock: Clock = REAL_CLOCK
    ) -> None:
        self._steps_left = steps
        self._every = every
        self._deadline_s = deadline_s
        self._clock = clock
        self._period_s = min(_LONGEST_PERIOD_S, deadline_s / 10)
        self._groups = _Groups()
        self._issued: deque[_Issued] = deque()
        self._closing = threading.Event()
        self._patience_s = deadline_s
        self._thread: threading.Thread | None = None
        self._recording = False
        self._divergences: list[Divergence] = []
        self._stalls: list[Stall] = []

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """What was found so far, at most one for each other rank; `str` of one is the message."""
        return tuple(self._divergences)

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """Ranks that issued nothing for `deadline_s` while this one was ahead; only hints."""
        return tuple(self._stalls)

    @property
    def recording(self) -> bool:
        """Whether collectives are being recorded."""
        return self._recording

    def start(self) -> None:
        """Record from now on.

        Raises:
            OverlapError: no process group with real peers, another check records in this process,
                this one was started before, or the job's store does not answer.
        """
        world = rank_and_world_size()
        if world is None or is_fake_world():
            raise OverlapError(
                "check_collective_order needs an initialized process group with real peers"
            )
        if self._thread is not None:
            raise OverlapError("this check was started before; make a new one")
        if not self._one_at_a_time.acquire(blocking=False):
            raise OverlapError("another check of the collective order records in this process")
        try:
            serial = _next_serial(world[0])
        except RuntimeError as error:
            self._one_at_a_time.release()
            raise OverlapError(f"the job's store does not answer: {error}") from error
        comparison = OrderComparison(
            _connection(),
            world[0],
            serial=serial,
            every=self._every,
            deadline_s=self._deadline_s,
            clock=self._clock,
        )
        self._thread = threading.Thread(
            target=self._compare, args=(comparison,), name="collective-order", daemon=True
        )
        self._thread.start()
        self._recording = True
        add_listener(self._record)

    def step(self) -> None:
        """Say that a step is over. After the last one recording ends, comparing goes on."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self._stop_recording()

    def stop(self, *, wait: bool = True) -> None:
        """End recording and, if `wait`, compare to the end, for `deadline_s` at most."""
        if not wait:
            self._patience_s = 0.0
        self._stop_recording()
        if self._thread is not None:
            self._thread.join(self._patience_s + _JOIN_GRACE_S)

    def __enter__(self) -> OrderCheck:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # Whoever leaves with an error should not be held up by ranks that may wait for it.
        self.stop(wait=kind is None)

    def _stop_recording(self) -> None:
        if self._recording:
            self._recording = False
            remove_listener(self._record)
            self._one_at_a_time.release()
        self._closing.set()

    def _record(self, name: str, process_group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        try:
            self._note(name, process_group, args)
        except Exception:  # whatever is wrong with a check, the collective must be issued
            logger.exception("the check of the collective order stops at %s", name)
            self._stop_recording()

    def _note(self, name: str, process_group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        comparable = _COLLECTIVES.get(name)
        group = self._groups.find(process_group)
        if comparable is None or group is None:
            return
        tensors = [] if comparable.tensors is None else tensors_in(args[comparable.tensors])
        sizes = tuple([tensor.numel() for tensor in tensors]) if comparable.sizes else ()
        dtype = tensors[0].dtype if tensors else None
        root = None if comparable.root is None else args[comparable.root]
        self._issued.append((name, group, sizes, dtype, root))

    def _compare(self, comparison: OrderComparison) -> None:
        """The thread."""
        try:
            until = math.inf
            while self._clock.now() < until:
                closing = self._closing.is_set()  # before the queue is read: nothing comes after
                while self._issued:
                    entry = self._issued.popleft()
                    comparison.add(entry[1], _text(entry))
                if closing:
                    comparison.close()
                    until = min(until, self._clock.now() + self._patience_s)
                for finding in comparison.poll():
                    self._report(finding)
                if closing and comparison.settled:
                    return
                if closing:
                    self._clock.sleep(self._period_s / 4)
                else:
                    self._closing.wait(self._period_s)
        except (OverlapError, RuntimeError) as error:  # torch's stores raise RuntimeErrors
            logger.warning("the check of the collective order ends early: %s", error)

    def _report(self, finding: Divergence | Stall) -> None:
        if isinstance(finding, Divergence):
            logger.error("%s", finding)
            self._divergences.append(finding)
        else:
            logger.warning("%s", finding)
            self._stalls.append(finding)


class _Groups:
    """Process groups as ranks name them to each other; remembers answers."""

    def __init__(self) -> None:
        self._known: dict[str, Group | None] = {}

    def find(self, process_group: dist.ProcessGroup) -> Group | None:
        """None if the group has no other rank, or torch doesn't know its ranks."""
        name = process_group.group_name
        if name not in self._known:
            self._known[name] = self._look_up(name)
        return self._known[name]

    @staticmethod
    def _look_up(name: str) -> Group | None:
        # In the order of creation, which is the same on all ranks for groups of the same ranks;
        # names are not always.
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for group, numbers in distributed_c10d._world.pg_group_ranks.items():
            if isinstance(group, dist.ProcessGroup):  # a number stands for groups of others
                by_ranks.setdefault(tuple(sorted(numbers)), []).append(group.group_name)
        for ranks, names in by_ranks.items():
            if name in names and len(ranks) > 1:
                return Group(ranks, names.index(name))
        return None


def _next_serial(rank: int) -> int:
    """How many checks this rank began before in the job, whose store counts them."""
    return default_store().add(f"overlap_core/order_checks/{rank}", 1) - 1


def _connection() -> KeyValueStore:
    """A connection to the job's store for one thread alone, if this kind of store has it."""
    store: Any = default_store()
    try:
        clone: KeyValueStore = store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store  # type: ignore[no-any-return]
    return clone


def _text(issued: _Issued) -> str:
    """Such as ``"allreduce_ float32[4096]"``; in brackets the numbers of elements."""
    name, _, sizes, dtype, root = issued
    text = name if dtype is None else f"{name} {str(dtype).removeprefix('torch.')}"
    if sizes:
        shown = ", ".join(map(str, sizes[:_MOST_SIZES]))
        more = f", ... {len(sizes)} with {sum(sizes)} in all" if len(sizes) > _MOST_SIZES else ""
        text += f"[{shown}{more}]"
    return text if root is None else f"{text} root {root}"
