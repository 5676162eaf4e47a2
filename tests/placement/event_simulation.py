"""A plain simulation of host, compute stream and shared network, that the model is held against.

It knows nothing of the model: everything in progress has work left and a rate, the earliest end is
the next event, and all numbers are fractions. What can happen without time passing happens first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from overlap_core.graph import NodeKind

from ..oracles import issues_communication

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlap_core.costs import Cost, Machine
    from overlap_core.graph import OverlapGraph
    from overlap_core.placement import Coalesced

__all__ = ["Simulation"]

ZERO = Fraction(0)


@dataclass
class Task:
    """One node, as the stream meets it."""

    name: str
    kind: str
    host: Fraction
    compute: Fraction = ZERO
    network: Fraction = ZERO
    queue: str = ""
    job: str = ""
    """Of a launch: the launch that issues its call."""
    waits_for: tuple[str, ...] = ()


@dataclass
class Job:
    """A collective, or the place of an opaque op in its queue."""

    name: str
    left: Fraction
    queue: str
    ready: bool = False
    running: bool = False
    done: bool = False


@dataclass
class Simulation:
    """One order from beginning to end; the fields without an argument are the results."""

    tasks: list[Task]
    machine: Machine
    jobs: dict[str, Job]
    now: Fraction = ZERO
    host_ns: Fraction = ZERO
    exposed: dict[str, Fraction] = field(default_factory=dict)
    waited_for_host: Fraction = ZERO
    issued: int = 0
    """How many tasks the host has issued."""
    at: int = 0
    """The task that the stream is at."""

    @classmethod
    def of(
        cls,
        graph: OverlapGraph,
        costs: Sequence[Cost],
        order: Sequence[str],
        machine: Machine,
        launches_of: Mapping[str, frozenset[str]],
        coalesced: Sequence[Coalesced] = (),
    ) -> Simulation:
        """Of the nodes named in `order`; `launches_of` says which launches a wait is for."""
        place = {node.name: position for position, node in enumerate(graph.nodes)}
        call_of = {launch: call for call in coalesced for launch in call.launches}
        tasks: list[Task] = []
        jobs: dict[str, Job] = {}
        issuer: dict[int, str] = {}
        for name in order:
            position = place[name]
            node, cost = graph.nodes[position], costs[position]
            ns = Fraction(cost.ns or 0)
            task = Task(name=name, kind=str(node.kind), host=ZERO, queue=node.group or "?")
            tasks.append(task)
            if node.kind is NodeKind.WAIT:
                task.host = Fraction(machine.wait_host_ns)
                task.waits_for = tuple(sorted(launches_of[name], key=place.__getitem__))
            elif node.kind is NodeKind.COLLECTIVE:
                call = call_of.get(position)
                task.job = name if call is None else issuer.setdefault(call.launches[0], name)
                if task.job == name:
                    tensors = 1 if call is None else len(call.launches)
                    task.host = Fraction(
                        machine.collective_host_ns + (tensors - 1) * machine.member_host_ns
                    )
                    jobs[name] = Job(name, ns if call is None else Fraction(call.ns), task.queue)
            elif node.kind is NodeKind.OPAQUE:
                task.host = Fraction(machine.opaque_host_ns)
                if issues_communication(node):
                    known = cost.network_ns
                    task.network = Fraction(ns // 2 if known is None else min(known, ns))
                    jobs[name] = Job(name, task.network, task.queue)
                task.compute = ns - task.network
            elif ns:
                task.host = Fraction(machine.kernel_host_ns)
                task.compute = ns
            else:
                task.kind = "free"
        return cls(tasks, machine, jobs)

    def run(self) -> Simulation:
        """To the end of everything."""
        self.host_left = self.tasks[0].host if self.tasks else ZERO
        while True:
            while self._step_without_time():
                pass
            if self.at == len(self.tasks) and all(job.done for job in self.jobs.values()):
                return self
            self._pass_time()

    def _ahead(self, job: Job) -> list[Job]:
        """Unfinished jobs that come first in its queue."""
        queue = [one for one in self.jobs.values() if one.queue == job.queue]
        return [one for one in queue[: queue.index(job)] if not one.done]

    def _job_of(self, launch: str) -> Job | None:
        """What carries out a launch that the stream has met."""
        for task in self.tasks[: self.at]:
            if task.name == launch or (task.job and self._shares_call(task.job, launch)):
                return self.jobs[task.job]
        return None

    def _shares_call(self, job: str, launch: str) -> bool:
        return any(task.name == launch and task.job == job for task in self.tasks)

    def _step_without_time(self) -> bool:
        """One change that needs no time; False if there is none."""
        if self.issued < len(self.tasks) and not self.host_left:
            self.issued += 1
            self.host_ns = self.now
            self.host_left = self.tasks[self.issued].host if self.issued < len(self.tasks) else ZERO
            return True
        for job in self.jobs.values():
            if job.running and not job.left:
                job.running, job.done = False, True
                return True
            if job.ready and not job.running and not job.done and not self._ahead(job):
                job.running = True
                return True
        return self._advance_stream()

    def _advance_stream(self) -> bool:
        if not self._is_at_issued_task():
            return False
        task = self.tasks[self.at]
        if task.kind == "collective":
            self.jobs[task.job].ready = True
        elif task.kind == "wait":
            if self._blamed():
                return False
        elif task.kind == "opaque" and task.name in self.jobs and not self.jobs[task.name].done:
            job = self.jobs[task.name]
            changed = not job.ready
            job.ready = True
            return changed
        elif task.compute:
            return False
        self.at += 1
        return True

    def _is_at_issued_task(self) -> bool:
        return self.at < min(self.issued, len(self.tasks))

    def _blamed(self) -> str:
        """The launch for which the stream is blocked; empty if it isn't."""
        if not self._is_at_issued_task():
            return ""
        task = self.tasks[self.at]
        for launch in task.waits_for:
            job = self._job_of(launch)
            if job is not None and not job.done:
                return launch
        if task.kind == "opaque" and task.name in self.jobs:
            ahead = self._ahead(self.jobs[task.name])
            return ahead[-1].name if ahead else ""
        return ""

    def _waits_for_host(self) -> bool:
        """Whether the next work of the stream, if there is any more, is not issued yet."""
        for index in range(self.at, len(self.tasks)):
            if self.tasks[index].kind not in ("free", "collective"):
                return index >= self.issued
        return False

    def _pass_time(self) -> None:
        task = self.tasks[self.at] if self._is_at_issued_task() else None
        running = [job for job in self.jobs.values() if job.running]
        collectives = [job for job in running if not self._is_opaque(job)]
        blamed = self._blamed()
        computes = task is not None and not blamed and not self._communicates(task)
        share = Fraction(1, max(1, len(running)))
        slower = Fraction(self.machine.gather_slowdown) if computes else 1
        rates = {j.name: share if self._is_opaque(j) else share / slower for j in running}
        compute_rate = 1 / Fraction(self.machine.compute_slowdown) if collectives else Fraction(1)
        ends = [job.left / rates[job.name] for job in running]
        if computes:
            assert task is not None
            ends.append(task.compute / compute_rate)
        if self.issued < len(self.tasks):
            ends.append(self.host_left)
        step = min(ends)
        assert step > 0
        if blamed:
            self.exposed[blamed] = self.exposed.get(blamed, ZERO) + step
        elif self._waits_for_host():
            self.waited_for_host += step
        for job in running:
            job.left -= step * rates[job.name]
        if computes:
            assert task is not None
            task.compute -= step * compute_rate
        if self.issued < len(self.tasks):
            self.host_left -= step
        self.now += step

    def _is_opaque(self, job: Job) -> bool:
        return any(task.name == job.name and task.kind == "opaque" for task in self.tasks)

    def _communicates(self, task: Task) -> bool:
        """Whether an opaque op at the head of the stream is still in its network part."""
        return task.name in self.jobs and not self.jobs[task.name].done
