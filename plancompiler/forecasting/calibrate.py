"""Calibration: a machine file of what this host does, measured by recorded runs of small jobs.

The jobs have the ops of perceptrons and transformers in many sizes. They run on one rank, on two as
threads and on two as processes, and the mean time of each task becomes a point by its kind, its
sizes and where it ran. So kernels are measured as steps run them: with their neighbours, in the
caches that those leave, and beside the other rank. Collectives count from when their last member
has come. Only the steps of the quickest windows of a run count, and of each job's runs the
quickest: what else the machine does only adds to them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import numpy as np

from plancompiler.blas.threads import one_blas_thread
from plancompiler.costs import Machine, generic_machine
from plancompiler.costs.machine import Host
from plancompiler.costs.machine_file import read_machine
from plancompiler.costs.measured_tasks import ALONE, PROCESSES, THREADS, Sizes, Vector
from plancompiler.errors import UsageError
from plancompiler.executor.timeline import Timeline
from plancompiler.forecasting.calibration_jobs import calibration_jobs, write_data
from plancompiler.forecasting.measured_run import WARM_STEPS, Open, run_steps
from plancompiler.forecasting.recorded_trace import read_trace
from plancompiler.forecasting.sharing import host_of, moves
from plancompiler.forecasting.task_time import STEP, TURN, WAKE, Place, TaskTimes
from plancompiler.ir import Job
from plancompiler.ir.task import TaskKind, family_of
from plancompiler.plan.plan import CollectiveSpec, Plan, Stream, Task

MOST_LOAD = 0.3
"""Of each core: the load by others beyond which what is measured here says little."""
WINDOW_SECONDS = 0.1
"""Of a row of steps that count together, as those do that a session runs ahead."""
QUICKEST = 0.25
"""The share of windows that count."""
COUNTS = {ALONE: 12, THREADS: 12, PROCESSES: 12}
"""How many perceptrons are recorded, and how many transformers; half as many with other ops."""
ROUNDS = 2
"""How often each job runs."""
LARGE_PRODUCT, LARGE_TRAFFIC = 1e7, 1e6
"""Operations, and bytes, from which on kernels say what rates they reach."""
PRODUCT = 6.0
"""Operations per byte above which a kernel is a product."""
_PROCESSOR_TIMES = Path("/proc/stat")
_SHARING_ROUNDS = 4
"""In which it is found how much tasks took of shared cores: what a collective takes of one depends
on how long it would have lasted alone."""
_MEASURED = 'source = "calibrated", measured = true'
_SYSTEM = 'source = "the operating system: cores, and memory for each"'
_SOURCES = {
    "devices": _SYSTEM,
    "cores": _SYSTEM,
    "memory_bytes": _SYSTEM,
}


@dataclass
class Samples:
    """What recorded runs show: seconds by place and world, each the mean of one run."""

    tasks: dict[tuple[Place, str], list[float]] = field(default_factory=dict)

    def add(self, place: Place, world: str, seconds: float) -> None:
        """Add one mean."""
        if seconds > 0:
            self.tasks.setdefault((place, world), []).append(seconds)


def check_idle(load: float, cores: int, forced: bool) -> None:
    """A UsageError where others keep the host busy, unless that is forced."""
    if load > MOST_LOAD * cores and not forced:
        raise UsageError(
            "this machine is busy, so that what is measured says little about it",
            got=f"a load of {load:.1f} on {cores} cores",
            expected=f"at most {MOST_LOAD * cores:.1f}",
            hint="wait until it is idle, or use --force",
        )


class OthersLoad:
    """How many cores other programs keep busy, on average since this was made; 0.0 where the
    operating system does not tell.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    def _now(self) -> tuple[float, float]:
        """Seconds of all cores that were busy with what is not ours, and of the clock."""
        try:
            words = _PROCESSOR_TIMES.read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return 0.0, time.monotonic()
        user, nice, system, _, _, *interrupts = map(int, words[:7])
        busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4]), time.monotonic()

    def cores(self) -> float:
        """On average so far, of processes of ours only those that have ended and this one."""
        busy, now = (one - other for one, other in zip(self._now(), self._begin, strict=True))
        return max(0.0, busy / max(now, 1e-9))


@dataclass(frozen=True)
class Recording:
    """A recorded run of a job."""

    seconds: float
    """Of its step."""
    plans: Mapping[int, Plan]
    timelines: Sequence[Timeline]
    world: str


def record_job(job: Job, world: str, opened: Open) -> Recording:
    """Run a job and record it."""
    ranks = 1 if world == ALONE else job.world_size
    backend = THREADS if world == ALONE else world
    with opened(job, ranks, backend, record=True, cache=False) as running:
        seconds = run_steps(running)
        return Recording(seconds, running.plans, running.timelines(), world)


class _RankTimes:
    """Of one rank: seconds by task and micro-batch in typical steps."""

    def __init__(self, plan: Plan, timeline: Timeline, steps: Sequence[int]) -> None:
        if [each.id for each in timeline.tasks] != [task.id for task in plan.tasks]:
            raise UsageError(
                "a timeline is of another job",
                got=f"{timeline.job}, rank {timeline.rank}",
                expected=f"{plan.job}, rank {plan.rank}, compiled as it was",
            )
        self.plan = plan
        self.columns = {
            (plan.tasks[position].id, run): column
            for column, (position, run) in enumerate(timeline.columns)
        }
        self.families = {
            (family_of(task), run): column
            for (task, run), column in self.columns.items()
            if isinstance(plan.task_by_id[task].spec, CollectiveSpec)
        }
        """Collectives, by what all members call them."""
        self.tasks = [plan.tasks[position] for position, _ in timeline.columns]
        self.runs = [run for _, run in timeline.columns]
        self.begins = timeline.begins[steps] * 1e-9
        self.ends = timeline.ends[steps] * 1e-9
        self.ended_before = timeline.ends[[step - 1 for step in steps]] * 1e-9
        """When the tasks of the step before each ended."""

    def in_order(self) -> Iterator[list[int]]:
        """The columns of each stream in the order in which they ran."""
        by_stream: dict[object, list[int]] = {}
        for column in np.argsort(self.begins.mean(axis=0), kind="stable"):
            by_stream.setdefault(self.tasks[column].stream, []).append(int(column))
        yield from by_stream.values()


def add_timelines(
    samples: Samples,
    plans: Mapping[int, Plan],
    timelines: Sequence[Timeline],
    world: str,
    machine: Machine | None = None,
) -> None:
    """Add what the timelines of all ranks of a run show. A UsageError for those of another job.

    Where a machine says how many cores its hosts have, tasks count for what they would have taken
    with a core for each: a forecast lets them share the cores again.
    """
    steps = typical_steps(timelines)
    ranks = {
        each.rank: _RankTimes(plans[each.rank], each, steps) for each in timelines if each.columns
    }
    times = TaskTimes(machine or generic_machine())
    alone = _parts_alone(ranks, times)
    inside, between = _recorders_part(times, ranks.values())
    means: dict[Place, list[float]] = {}
    wakes: dict[Place, list[float]] = {}
    for rank in ranks.values():
        for column, task in enumerate(rank.tasks):
            place = times.place(rank.plan, task)
            if place is None:
                continue
            begin = rank.begins[:, column].mean()
            if isinstance(task.spec, CollectiveSpec):
                # Of means: so what members wait for whoever happens to be late is the collective's.
                begin = max(
                    each.begins[:, there].mean()
                    for each, there in _members(rank, column, task.spec, ranks)
                )
            lasted = float(rank.ends[:, column].mean() - begin) * alone[rank.plan.rank][column]
            means.setdefault(place, []).append(lasted - inside)
        _add_turns(samples, rank, ranks, times, world, between)
        for stream, seconds in _wakes(rank, ranks):
            wakes.setdefault(times.beside(WAKE, rank.plan, stream), []).append(seconds)
    for place, each in (*means.items(), *wakes.items()):
        samples.add(place, world, max(statistics.fmean(each), 1e-8))


def typical_steps(timelines: Sequence[Timeline]) -> list[int]:
    """The steps of the quickest quarter of all windows of about WINDOW_SECONDS, without the first
    steps. What else the machine does only adds to a window; but that one rank is late now and then
    is part of what steps take, and steps that are quick by themselves would not show it.
    """
    # Data may have been read for one more step.
    count = min(len(each.ends) for each in timelines) - 1
    ends = np.max([each.ends[:count].max(axis=1) for each in timelines if each.columns], axis=0)
    took = np.diff(ends)[WARM_STEPS - 1 :] * 1e-9
    length = max(1, min(len(took), int(WINDOW_SECONDS / float(np.median(took)))))
    until = np.concatenate([[0.0], np.cumsum(took)])
    order = np.argsort(until[length:] - until[:-length], kind="stable")
    quickest = order[: max(1, int(QUICKEST * len(order)))]
    rows = np.unique(quickest[:, None] + np.arange(length)) + WARM_STEPS
    return [int(row) for row in rows]


def _does_nothing(task: Task) -> bool:
    return task.kind is TaskKind.VARIABLE


def _recorders_part(times: TaskTimes, ranks: Iterable[_RankTimes]) -> tuple[float, float]:
    """What recording adds to a task, and between two: both as tasks show that do nothing."""
    inside, between = [], []
    for rank in ranks:
        for columns in rank.in_order():
            for before, after in pairwise(columns):
                if _does_nothing(rank.tasks[before]) and _does_nothing(rank.tasks[after]):
                    inside.append(np.median(rank.ends[:, after] - rank.begins[:, after]))
                    between.append(np.median(rank.begins[:, after] - rank.ends[:, before]))
    if not inside:
        return 0.0, 0.0
    return float(np.median(inside)), float(np.median(between))


def _parts_alone(ranks: Mapping[int, _RankTimes], times: TaskTimes) -> dict[int, Vector]:
    """Rank → of each column the part of its time that it would have taken with a core to itself.

    While more is at work on a host than it has cores, all goes on as many times slower, as in a
    forecast (`sharing`).
    """
    parts = {number: np.ones(len(rank.tasks)) for number, rank in ranks.items()}
    cores = times.machine.host.cores
    if cores is None:
        return parts
    hosts: dict[int, list[int]] = {}
    for number in ranks:
        hosts.setdefault(host_of(times.machine, number), []).append(number)
    for there in hosts.values():
        begins = [_working_from(ranks[number], ranks) for number in there]
        begin = np.concatenate(begins, axis=1)
        end = np.concatenate([ranks[number].ends for number in there], axis=1)
        begin = np.minimum(begin, end)
        lasted = (end - begin).sum(axis=0)
        moving = np.concatenate([_moving(ranks[number], times) for number in there]) * len(end)
        part = np.ones_like(lasted)
        for _ in range(_SHARING_ROUNDS):
            alone = np.maximum(lasted * part, 1e-12)
            uses = np.where(np.isnan(moving), 1.0, np.minimum(1.0, moving / alone))
            worked = sum(_worked(*each, uses, cores) for each in zip(begin, end, strict=True))
            part = np.divide(worked, lasted, out=np.ones_like(lasted), where=lasted > 0)
        stops = np.cumsum([len(ranks[number].tasks) for number in there])
        parts |= zip(there, np.split(part, stops[:-1]), strict=True)
    return parts


def _worked(begin: Vector, end: Vector, uses: Vector, cores: int) -> Vector:
    """How much of its work each of some tasks does from when it begins until it ends, in seconds
    with a core to itself.
    """
    moments = np.concatenate([begin, end])
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    busy = np.cumsum(np.concatenate([uses, -uses])[order])
    speeds = cores / np.maximum(busy[:-1], cores)
    done = np.concatenate([[0.0], np.cumsum(speeds * np.diff(moments))])
    worked: Vector = np.interp(end, moments, done) - np.interp(begin, moments, done)
    return worked


def _working_from(rank: _RankTimes, ranks: Mapping[int, _RankTimes]) -> Vector:
    """When the tasks of each step began to work: collectives when their last member had come."""
    begins: Vector = np.array(rank.begins)
    for column, task in enumerate(rank.tasks):
        if isinstance(task.spec, CollectiveSpec):
            for other, there in _members(rank, column, task.spec, ranks):
                begins[:, column] = np.maximum(begins[:, column], other.begins[:, there])
    return begins


def _moving(rank: _RankTimes, times: TaskTimes) -> Vector:
    """Of each column the seconds in which it moves bytes; nan of what only computes."""
    return np.array(
        [times.moving_seconds(rank.plan, each) if moves(each) else np.nan for each in rank.tasks]
    )


def _members(
    rank: _RankTimes, column: int, spec: CollectiveSpec, ranks: Mapping[int, _RankTimes]
) -> Iterator[tuple[_RankTimes, int]]:
    """The members of a collective, each with its column of the collective."""
    family, run = family_of(rank.tasks[column].id), rank.runs[column]
    for member in rank.plan.communicators[spec.communicator].ranks:
        other = ranks.get(member)
        there = None if other is None else other.families.get((family, run))
        if other is not None and there is not None:
            yield other, there


def _add_turns(
    samples: Samples,
    rank: _RankTimes,
    ranks: Mapping[int, _RankTimes],
    times: TaskTimes,
    world: str,
    between: float,
) -> None:
    """Add what goes by between the tasks of a stream where the next one has all that it needs, and
    between steps.
    """
    gaps: dict[Place, tuple[float, int]] = {}
    """Of each place seconds, and the tasks after them that take time themselves."""
    for columns in rank.in_order():
        if len(columns) < 8:
            continue
        for before, after in pairwise(columns):
            task = rank.tasks[after]
            ready = _ready(rank, after, ranks)
            ended = rank.ends[:, before].mean()
            if ready is not None and (ready > ended or task.stream is Stream.COMPUTE):
                continue
            gap = max(0.0, float(rank.begins[:, after].mean() - ended) - between)
            place = times.beside(TURN, rank.plan, task.stream)
            seconds, works = gaps.get(place, (0.0, 0))
            gaps[place] = seconds + gap, works + (times.place(rank.plan, task) is not None)
    for place, (seconds, works) in gaps.items():
        if works:
            samples.add(place, world, max(seconds / works, 1e-9))
    columns = max(rank.in_order(), key=len)
    took = rank.begins[:, columns[0]] - rank.ended_before[:, columns[-1]] - between
    samples.add(times.beside(STEP, rank.plan), world, max(float(took.mean()), 1e-9))


def _awaited(plan: Plan, task: Task) -> list[int]:
    """The tasks of other streams and ranks of which a task needs the results."""
    producers = []
    for each in (*task.inputs, *task.controls_in):
        known = plan.register_by_id.get(each)
        if known is not None:
            producer = known.producer
            made = plan.task_by_id.get(producer)
            if made is None or made.stream is task.stream:
                continue
            producers.append(producer)
        else:
            producers.append(plan.remote_register_by_id[each].producer)
    return producers


def _wakes(rank: _RankTimes, ranks: Mapping[int, _RankTimes]) -> Iterator[tuple[Stream, float]]:
    """(stream, seconds from the end of what it waits for to its going on), of means.

    Of a collective those of its last member, as the others wait for it.
    """
    for columns in rank.in_order():
        ended = rank.ended_before[:, columns[-1]].mean()
        for after in columns:
            task = rank.tasks[after]
            ready = _ready(rank, after, ranks)
            before, ended = ended, rank.ends[:, after].mean()
            if ready is None or ready < before:
                continue
            begin = float(rank.begins[:, after].mean())
            if isinstance(task.spec, CollectiveSpec):
                members = list(_members(rank, after, task.spec, ranks))
                begin = max(float(each.begins[:, there].mean()) for each, there in members)
                # A forecast has members with the same work come together, so that what one of them
                # is behind the average is part of the waking.
                ready = statistics.fmean(
                    _ready(each, there, ranks) or ready for each, there in members
                )
            yield task.stream, max(0.0, begin - ready)


def _ready(rank: _RankTimes, column: int, ranks: Mapping[int, _RankTimes]) -> float | None:
    """When all is there that a task has of other streams and ranks, on average; None for a task
    that has nothing of them.
    """
    ends = [
        float(other.ends[:, there].mean())
        for producer in _awaited(rank.plan, rank.tasks[column])
        for other in ranks.values()
        if (there := other.columns.get((producer, rank.runs[column]))) is not None
    ]
    return max(ends, default=None)


def link(collectives: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bandwidth of the α–β model, by least squares over what was measured."""
    pairs = [(nbytes, seconds) for nbytes, seconds in collectives if nbytes]
    generic = generic_machine().node
    if len({nbytes for nbytes, _ in pairs}) < 2:
        return generic.latency_seconds, generic.bytes_per_second
    sizes, seconds = (np.array(each) for each in zip(*pairs, strict=True))
    # Relative errors count: small collectives are many.
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (start, per_byte), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    # An all-reduce of two has one round each way and its start: three messages.
    latency = max(float(start), float(seconds.min()) / 2) / 3
    rate = 1.0 / per_byte if per_byte > 0 else float((sizes / seconds).max())
    return latency, float(rate)


def _rate(work: Callable[[], object], amount: float) -> float:
    """Amount per second, of the fastest of some runs."""
    best = np.inf
    for _ in range(5):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return float(amount / best)


class Calibration:
    """What is recorded on the way to a machine file: the jobs can run one by one, between others.

    `opened` starts a job. Raises UsageError where the host is busy, unless forced.
    """

    def __init__(
        self, opened: Open, folder: Path, forced: bool = False, counts: Mapping[str, int] = COUNTS
    ) -> None:
        self._cores = os.cpu_count() or 1
        check_idle(os.getloadavg()[0], self._cores, forced)
        self._forced = forced
        self._others = OthersLoad()
        self._opened = opened
        self._quickest: dict[int, Recording] = {}
        """By job."""
        write_data(folder)
        self._jobs = [
            (job, world)
            for world, count in counts.items()
            for job in calibration_jobs(folder, 1 if world == ALONE else 2, count)
        ]

    def runs(self) -> Iterator[Callable[[], None]]:
        """What there is to record, once."""
        for number in range(len(self._jobs)):
            yield partial(self._run, number)

    def _run(self, number: int) -> None:
        recorded = record_job(*self._jobs[number], self._opened)
        known = self._quickest.get(number, recorded)
        self._quickest[number] = min(known, recorded, key=attrgetter("seconds"))

    def _samples(self, machine: Machine | None = None) -> Samples:
        samples = Samples()
        for each in self._quickest.values():
            add_timelines(samples, each.plans, each.timelines, each.world, machine)
        return samples

    def check(self) -> None:
        """A UsageError where others have kept the host busy meanwhile, unless forced."""
        check_idle(self._others.cores(), self._cores, self._forced)

    def text(self, name: str) -> str:
        """The machine file; it says how busy others kept the host."""
        # How much of a core collectives take depends on how fast their bytes move.
        latency, rate = link(_collectives(self._samples()))
        generic = generic_machine()
        node = replace(generic.node, latency_seconds=latency, bytes_per_second=rate)
        shared = replace(generic, node=node, host=Host(cores=self._cores))
        samples = self._samples(shared)
        size = 1 << 10
        one, other = np.ones((size, size), np.float32), np.ones((size, size), np.float32)
        wide, target = np.ones(1 << 24, np.float32), np.ones(1 << 24, np.float32)
        traffic = _rate(lambda: np.add(wide, target, out=target), 3 * wide.nbytes)
        with one_blas_thread():
            flops = _rate(lambda: one @ other, 2 * size**3)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self._cores
        figures = {
            "device": {
                "memory_bytes": memory,
                "memory_bytes_per_second": traffic,
                "copy_bytes_per_second": _rate(lambda: np.copyto(target, wide), wide.nbytes),
                "matrix_efficiency": products_reach(samples, flops),
                "memory_efficiency": traffic_reaches(samples, traffic),
                "launch_seconds": launch(samples),
            },
            "device.flops_per_second": {"float32": flops},
            "node": {
                "devices": self._cores,
                "latency_seconds": latency,
                "bytes_per_second": rate,
            },
            "host": {
                "cores": self._cores,
                "slowdown": slowdown(samples),
                "task_seconds": _beside(TURN, ALONE, samples),
                "step_seconds": _beside(STEP, ALONE, samples),
                "wake_seconds": _beside(WAKE, THREADS, samples),
            },
        }
        busy = f"{self._others.cores():.2f} of {self._cores} cores"
        said = f"# Measured while other programs kept {busy} busy.\n"
        return said + machine_text(name, figures, samples)


def _beside(kind: str, world: str, samples: Samples) -> float:
    known = [
        statistics.fmean(seconds)
        for (place, where), seconds in samples.tasks.items()
        if place.kind == kind and where == world and place.form in ("", str(Stream.COMPUTE))
    ]
    return statistics.median(known) if known else 0.0


def _collectives(samples: Samples) -> Iterator[tuple[float, float]]:
    for (place, world), seconds in samples.tasks.items():
        if place.kind == "all_reduce" and world == THREADS:
            yield place.sizes.nbytes, statistics.fmean(seconds)


def calibrate(name: str, opened: Open, forced: bool = False) -> str:
    """The text of a machine file of this host. A UsageError where it is busy, unless forced."""
    with tempfile.TemporaryDirectory(prefix="plancompiler-calibration-") as folder:
        calibration = Calibration(opened, Path(folder), forced)
        for _ in range(ROUNDS):
            for run in calibration.runs():
                run()
        calibration.check()
        return calibration.text(name)


def learn(machine_file: Path, trace: Path) -> str:
    """The text of a machine file with what a timeline's file shows beside what it has measured.

    Raises UsageError for a timeline with too few steps, or of another kind of device.
    """
    machine = read_machine(machine_file)
    plans, backend, timelines = read_trace(trace)
    if plans[0].device != machine.device.type:
        raise UsageError(
            "a timeline is of devices of another type than the machine's",
            got=plans[0].device,
            expected=machine.device.type,
        )
    least = min(len(each.begins) for each in timelines)
    if least <= WARM_STEPS + 1:
        raise UsageError(
            "a timeline has too few steps to learn from",
            got=f"{least} steps in {trace}",
            expected=f"more than {WARM_STEPS + 1}, of which the first {WARM_STEPS} do not count",
        )
    samples = Samples()
    for known in machine.tasks:
        for sizes, seconds in known.points:
            place = Place(known.kind, known.dtype, known.form, sizes)
            samples.add(place, known.world, seconds)
    add_timelines(samples, plans, timelines, ALONE if len(plans) == 1 else backend, machine)
    return without_tasks(machine_file.read_text()) + "\n".join(task_tables(samples)) + "\n"


def slowdown(samples: Samples) -> float:
    """How much longer kernels take beside another rank's thread: of those that were seen alone too,
    all together.
    """
    alone = beside = 0.0
    for (place, world), seconds in samples.tasks.items():
        if world == THREADS and place.dtype and (place, ALONE) in samples.tasks:
            beside += statistics.fmean(seconds)
            alone += statistics.fmean(samples.tasks[place, ALONE])
    return max(1.0, beside / alone) if alone else 1.0


def products_reach(samples: Samples, flops: float) -> float:
    """The part of so many operations per second that large products reach: the median."""
    rates = [
        sizes.flops / seconds
        for _, sizes, seconds in _alone(samples)
        if sizes.flops > LARGE_PRODUCT and sizes.flops > PRODUCT * sizes.nbytes
    ]
    return min(1.0, statistics.median(rates) / flops) if rates else 1.0


def traffic_reaches(samples: Samples, traffic: float) -> float:
    """The part of so many bytes per second that other kernels reach which read and write much: the
    median over their kinds.
    """
    rates: dict[str, list[float]] = {}
    for kind, sizes, seconds in _alone(samples):
        if sizes.nbytes > LARGE_TRAFFIC and sizes.flops < PRODUCT * sizes.nbytes:
            rates.setdefault(kind, []).append(sizes.nbytes / seconds)
    medians = [statistics.median(each) for each in rates.values()]
    return min(1.0, statistics.median(medians) / traffic) if medians else 1.0


def _alone(samples: Samples) -> Iterator[tuple[str, Sizes, float]]:
    """Kind, sizes and seconds of kernels on one rank."""
    for (place, world), seconds in samples.tasks.items():
        if world == ALONE and place.dtype:
            yield place.kind, place.sizes, statistics.fmean(seconds)


def launch(samples: Samples) -> float:
    """What a kernel takes at least: the median over kinds of their shortest mean."""
    least: dict[str, float] = {}
    for kind, _, seconds in _alone(samples):
        least[kind] = min(seconds, least.get(kind, seconds))
    return statistics.median(least.values()) if least else 0.0


def machine_text(name: str, figures: dict[str, dict[str, float]], samples: Samples) -> str:
    """A machine file of measured figures and tasks."""
    lines = [f'name = "{name}"']
    for table, values in figures.items():
        lines += ["", f"[{table}]"] + (['type = "cpu"'] if table == "device" else [])
        lines += [
            f"{key} = {{ value = {value!r}, {_SOURCES.get(key, _MEASURED)} }}"
            for key, value in values.items()
        ]
    return "\n".join([*lines, *task_tables(samples)]) + "\n"


def task_tables(samples: Samples) -> Iterator[str]:
    """The lines of a machine file that hold measured tasks."""
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    for (place, world), seconds in sorted(samples.tasks.items()):
        numbers = (*place.sizes, statistics.fmean(seconds))
        point = ", ".join(f"{number:.6g}" for number in numbers)
        kinds.setdefault((*place[:3], world), []).append(f"[{point}]")
    for (kind, dtype, form, world), points in kinds.items():
        yield ""
        yield "[[task]]"
        yield f'kind = "{kind}"'
        yield f'dtype = "{dtype}"'
        yield f'form = "{form}"'
        yield f'world = "{world}"'
        yield f"points = [{', '.join(points)}]"


def without_tasks(text: str) -> str:
    """A machine file but for its measured tasks, each a `[[task]]` up to the next table."""
    kept: list[str] = []
    is_task = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            is_task = line.strip() == "[[task]]"
        if not is_task:
            kept.append(line)
    return "".join(kept).rstrip("\n") + "\n"
