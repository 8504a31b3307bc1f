"""`forecast`: what a job takes on a machine, known before it runs.

The job is compiled for its ranks; of each class of ranks one plan is made. Memory and traffic are
read off the plans. Time is that of the executor's actors under a virtual clock, with the costs of
the machine. No kernel of the job runs.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.costs import Machine, chosen_machine, machine_names, machine_of
from plancompiler.costs.machine import Source
from plancompiler.costs.measured_tasks import ALONE, PROCESSES, THREADS
from plancompiler.errors import UsageError
from plancompiler.forecasting.memory import RankMemory, WorkBuffers, rank_memory, work_buffers
from plancompiler.forecasting.rank_classes import RankClass, RankClasses, rank_classes
from plancompiler.forecasting.sharing import uses_of
from plancompiler.forecasting.task_time import TaskTimes
from plancompiler.forecasting.traffic import (
    ClassLinks,
    Received,
    depends_on_data,
    received_in_step,
)
from plancompiler.forecasting.user_lines import LineFigures, figures_by_line
from plancompiler.ir import DType, Job
from plancompiler.ir.task import TaskKind, pack_register_id, unpack_id
from plancompiler.lower.collector import collector_paused
from plancompiler.lower.compile import build_graph
from plancompiler.ops.registry import flops_of
from plancompiler.passes import config_of
from plancompiler.plan.memory_report import LiveRegister, memory_report
from plancompiler.plan.plan import Plan
from plancompiler.simulate import Simulation, simulate

STEPS = 3
"""Steps that are simulated where that is cheap: the first has no step before it to overlap with."""
MANY_RUNS = 50_000
"""Where a step has more runs of tasks than this, it is simulated alone."""
COMMUNICATION = frozenset(
    {TaskKind.COLLECTIVE_BOXING, TaskKind.COPY_COMM_NET, TaskKind.SEND_RECV, TaskKind.COPY_HD}
)


@dataclass(frozen=True, slots=True)
class ClassForecast:
    """What each rank of a class takes in a step."""

    rank: int
    """The first of them."""
    count: int
    """How many they are."""
    memory: RankMemory
    work: WorkBuffers | None
    """What kernels make beside that; None on devices other than CPUs."""
    received_bytes: float
    """Payload that comes from other ranks."""
    compute_seconds: float
    communication_seconds: float
    """Of collectives and copies between ranks, whether computation hides them or not."""
    exposed_communication_seconds: float
    """While nothing computes."""
    idle_seconds: float
    """While nothing runs at all: the rank waits for others."""


@dataclass(frozen=True)
class Forecast:
    """What a job takes on a machine."""

    job: Job
    machine: Machine
    ranks: int
    backend: str
    """`threads` or `processes`."""
    classes: tuple[ClassForecast, ...]
    step_seconds: float
    bubble_fraction: float | None
    """The share of a step in which a rank does nothing, as it waits for others, on average over all
    ranks; None for a step without micro-batches."""
    mfu: float
    """Operations that the traced job has in a step, over what all devices could do meanwhile at the
    peak of the dtype that most of them are in."""
    traffic_by_link: dict[str, float]
    """Payload bytes of all ranks in a step."""
    seconds_taken: float
    graph: BoxingTaskGraph
    rank_classes: RankClasses
    simulation: Simulation

    @property
    def worst(self) -> ClassForecast:
        """The class whose ranks hold most."""
        return max(self.classes, key=lambda each: each.memory.total)

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is at most its device's."""
        return self.worst.memory.total <= self.machine.device.memory_bytes

    @property
    def traffic_bytes(self) -> float:
        """Payload bytes of all ranks in a step."""
        return sum(self.traffic_by_link.values())

    @property
    def busiest(self) -> ClassForecast:
        """The class whose ranks compute longest."""
        return max(self.classes, key=lambda each: each.compute_seconds)

    @property
    def measured(self) -> tuple[Source, ...]:
        """The machine's figures that were measured; all others are of data sheets."""
        return tuple(each for each in self.machine.sources if each.measured)

    @cached_property
    def at_peak(self) -> tuple[LiveRegister, ...]:
        """What is alive when the fullest rank holds most, largest first, with the user's lines."""
        number = self.classes.index(self.worst)
        return memory_report(self.rank_classes.classes[number].plan).at_peak

    @property
    def data_dependent(self) -> tuple[str, ...]:
        """Ops that exchange rows in numbers that only the data of a step tell: they are not in
        `traffic_by_link`.
        """
        tasks = (task for each in self.rank_classes.classes for task in each.plan.tasks)
        return tuple(dict.fromkeys(task.name for task in tasks if depends_on_data(task)))

    def received(self) -> Iterator[tuple[RankClass, Received]]:
        """What a rank of each class receives in a step, by task and peer."""
        for each in self.rank_classes.classes:
            for one in received_in_step(each.plan, self.machine):
                yield each, one

    @cached_property
    def lines(self) -> tuple[LineFigures, ...]:
        """What each of the user's lines takes, over all ranks."""
        return figures_by_line(
            ((each.plan, len(each.ranks)) for each in self.rank_classes.classes),
            self.machine,
            times_on(self.machine, self.ranks, self.backend),
        )

    def json(self) -> dict[str, Any]:
        """As plain data, with the fields that `plancompiler forecast --json` prints."""
        worst, busiest = self.worst, self.busiest
        return {
            "job": self.job.name,
            "machine": self.machine.name,
            "measured_figures": [each.field for each in self.measured],
            "ranks": self.ranks,
            "classes": [
                {
                    "rank": each.rank,
                    "count": each.count,
                    "memory_bytes": each.memory.by_kind() | {"total": each.memory.total},
                    "work_bytes": None if each.work is None else each.work.json(),
                    "received_bytes": each.received_bytes,
                    "compute_seconds": each.compute_seconds,
                    "communication_seconds": each.communication_seconds,
                    "exposed_communication_seconds": each.exposed_communication_seconds,
                    "idle_seconds": each.idle_seconds,
                }
                for each in self.classes
            ],
            "memory_bytes": {"max": worst.memory.total, "by_kind": worst.memory.by_kind()},
            "fits": self.fits,
            "traffic_bytes": {"total": self.traffic_bytes, "by_link": self.traffic_by_link},
            "data_dependent": list(self.data_dependent),
            "step_seconds": self.step_seconds,
            "compute_seconds": busiest.compute_seconds,
            "exposed_communication_seconds": busiest.exposed_communication_seconds,
            "bubble_fraction": self.bubble_fraction,
            "mfu": self.mfu,
            "lines": [each.json() for each in self.lines],
            "seconds_taken": self.seconds_taken,
        }


@collector_paused()
def forecast(
    job: Job,
    machine: Machine | str | os.PathLike[str] | None = None,
    *,
    ranks: int | None = None,
    backend: str = THREADS,
) -> Forecast:
    """What a job takes on a machine: memory and traffic as they are, time as its figures say.

    `machine` is a name, a file or what was read of one; by default that of the job's config. It is
    also the machine by which the job is compiled. `ranks` are at least those of the job. `backend`
    says how ranks share a host where a machine's file tells them apart: as `threads` or as
    `processes`. Raises UsageError for a machine with fewer devices, and what compiling raises.
    """
    begin = time.perf_counter()
    if backend not in (THREADS, PROCESSES):
        raise UsageError("unknown backend", got=repr(backend), expected=f"{THREADS} or {PROCESSES}")
    config = config_of(job)
    known = chosen_machine(config.machine if machine is None else machine)
    world_size = job.world_size if ranks is None else ranks
    # The setting of a shipped machine is its name, so that the job is the one a user would write.
    setting = known.name if _is_shipped(known) else known.text
    job = replace(job, config=replace(config, machine=setting))
    graph = build_graph(job, world_size)
    classes = rank_classes(graph)
    simulation, step_seconds = simulated_step(
        classes.plans, known, world_size, classes.stands_for, backend
    )
    traffic: dict[str, float] = {}
    by_class = ClassLinks(known, tuple(dict.fromkeys(placed.op.placement for placed in graph.ops)))
    parts = _parts_of_step(simulation, simulation.last_step, step_seconds)
    forecasts = []
    for each in classes.classes:
        received = 0.0
        for one in received_in_step(each.plan, known):
            received += one.nbytes
            for link, ranks in by_class.links(each.plan, one, each.ranks):
                traffic[link] = traffic.get(link, 0.0) + one.nbytes * ranks
        memory = rank_memory(each.plan, known, lambda register: _slots_of(classes, register))
        work = work_buffers(each.plan) if known.device.type == "cpu" else None
        compute, moving, exposed, waiting = parts.get(each.simulated, (0.0, 0.0, 0.0, 0.0))
        forecasts.append(
            ClassForecast(
                each.rank,
                len(each.ranks),
                memory,
                work,
                received,
                compute,
                moving,
                exposed,
                waiting,
            )
        )
    idle = sum(each.count * each.idle_seconds for each in forecasts)
    pipelined = graph.pipeline is not None and graph.pipeline.microbatches > 1
    flops, dtype = _operations(job)
    peak = known.device.peak_flops(dtype) * world_size
    return Forecast(
        job=job,
        machine=known,
        ranks=world_size,
        backend=backend,
        classes=tuple(forecasts),
        step_seconds=step_seconds,
        bubble_fraction=idle / (world_size * step_seconds) if pipelined else None,
        mfu=flops / (peak * step_seconds) if step_seconds else 0.0,
        traffic_by_link=traffic,
        seconds_taken=time.perf_counter() - begin,
        graph=graph,
        rank_classes=classes,
        simulation=simulation,
    )


def _is_shipped(machine: Machine) -> bool:
    return machine.name in machine_names() and machine is machine_of(machine.name)


def simulated_step(
    plans: dict[int, Plan],
    machine: Machine,
    world_size: int,
    stands_for: Callable[[int], int] | None = None,
    backend: str = THREADS,
) -> tuple[Simulation, float]:
    """Steps of plans under a virtual clock, and the seconds of one; of all ranks, or of those that
    stand for others (`simulate`).
    """
    times = times_on(machine, world_size, backend)
    runs = sum(
        sum(
            plan.microbatches if plan.segments[task.segment].kind.per_microbatch else 1
            for task in plan.tasks
        )
        for plan in plans.values()
    )
    steps = 1 if runs > MANY_RUNS else STEPS
    simulation = simulate(
        plans,
        lambda rank, task: times.seconds(plans[rank], task),
        steps=steps,
        wake=lambda rank, stream: times.wake(plans[rank], stream),
        uses=uses_of(plans, times, stands_for),
        stands_for=stands_for,
    )
    end = simulation.makespan
    if steps > 1:
        first = max((run.end for run in simulation.runs if run.step == 0), default=0.0)
        end = (end - first) / (steps - 1)
    return simulation, max(times.step(plan) for plan in plans.values()) + end


def times_on(machine: Machine, ranks: int, backend: str = THREADS) -> TaskTimes:
    """What tasks take where so many ranks are at work, as threads or as processes."""
    return TaskTimes(machine, backend if ranks > 1 else ALONE)


def _slots_of(classes: RankClasses, register: int) -> int:
    """How many slots a register of some rank has, by the rank that stands for it."""
    rank, *fields = unpack_id(register)
    representative = classes.classes[classes.of_rank[rank]].plan
    known = representative.register_by_id.get(pack_register_id(representative.rank, *fields))
    return 1 if known is None else known.register_count


def _operations(job: Job) -> tuple[int, DType]:
    """Floating-point operations of the job as it is traced, and the dtype that most of them are in
    when it runs.
    """
    by_dtype: Counter[DType] = Counter()
    for op in job.ops:
        if op.outputs:
            flops = flops_of(op.kind, op.input_types, op.output_types, dict(op.attrs))
            by_dtype[op.outputs[0].dtype] += flops
    precision = DType.parse(str(config_of(job).precision))
    most = max(by_dtype, key=by_dtype.__getitem__, default=DType.FLOAT32)
    return sum(by_dtype.values()), precision if precision.is_half else most


_Intervals = list[list[float]]


def _parts_of_step(
    simulation: Simulation, step: int, seconds: float
) -> dict[int, tuple[float, float, float, float]]:
    """Rank → those seconds of a step in which it computes, communicates, communicates while it does
    not compute, and does nothing.
    """
    computing: dict[int, _Intervals] = {}
    moving: dict[int, _Intervals] = {}
    tasks = (task for plan in simulation.plans.values() for task in plan.tasks)
    communicating = {task.id for task in tasks if task.kind in COMMUNICATION}
    for run in simulation.runs:
        if run.step != step or run.end <= run.begin:
            continue
        kinds = moving if run.task.id in communicating else computing
        intervals = kinds.setdefault(run.rank, [])
        if intervals and intervals[-1][1] == run.begin:
            intervals[-1][1] = run.end
        else:
            intervals.append([run.begin, run.end])
    parts = {}
    for rank in simulation.plans:
        one, other = computing.get(rank, []), moving.get(rank, [])
        alone, together = _covered(one), _covered([*one, *other])
        parts[rank] = (
            alone,
            sum(end - begin for begin, end in other),
            together - alone,
            max(0.0, seconds - together),
        )
    return parts


def _covered(intervals: _Intervals) -> float:
    """Seconds in at least one interval."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
