"""Compile a job for all its ranks, in one of the four modes.

All modes give the same plan for every rank; they differ in who compiles what:

    naive              the master expands all ranks in one graph and cuts it: the reference
    rank_per_iter      the boxing graph once, then one rank after another in a loop
    rank_per_thread    the same, ranks spread over a thread pool
    rank_per_process   the boxing graph here, each rank from its slice's bytes in another process
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from plancompiler.boxing.bucket_report import bucket_reports
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.fuse import FusedReductions, fuse_reductions
from plancompiler.boxing.graph import BoxingTaskGraph, OpGraph, RankSlice
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.boxing.serde import graph_to_bytes, slices_by_rank
from plancompiler.boxing.slices import Slicer
from plancompiler.boxing.streams import choose_streams
from plancompiler.boxing.text import format_boxing_graph, format_op_graph, format_slice
from plancompiler.costs import machine_of_job
from plancompiler.errors import RankError, UnknownModeError
from plancompiler.ir import Job
from plancompiler.ir.task import require_rank_fits
from plancompiler.ir.whole_file import naming_output, write_whole
from plancompiler.lower.collector import collector_paused
from plancompiler.lower.control import control_tasks
from plancompiler.lower.emit import place_tasks
from plancompiler.lower.naive import WholeGraph
from plancompiler.lower.naive_plan import plan_of_part
from plancompiler.lower.profile import timed
from plancompiler.lower.rank import compile_rank
from plancompiler.lower.rank_process import compile_in_processes
from plancompiler.lower.rebuild import rebuild_rank_task_graph
from plancompiler.lower.recompute import RankMemory, choose_regions, memory_of
from plancompiler.lower.step_check import check_step
from plancompiler.lower.text import format_control, format_offsets, format_order, format_storage
from plancompiler.passes import PassRecord, config_of, run_passes
from plancompiler.plan.digest import digest_of_plans
from plancompiler.plan.plan import Plan
from plancompiler.plan.text import format_plan
from plancompiler.plan.verify import verify_plan, verify_plans

_log = logging.getLogger(__name__)

MODES = ("naive", "rank_per_thread", "rank_per_iter", "rank_per_process")
MODE_VARIABLE = "PLANCOMPILER_COMPILE_MODE"
DUMP_VARIABLE = "PLANCOMPILER_DUMP"


def resolve_mode(mode: str | None = None, default: str = "rank_per_iter") -> str:
    """The mode asked for, else the one in the environment, else the default."""
    chosen = mode or os.environ.get(MODE_VARIABLE) or default
    if chosen not in MODES:
        raise UnknownModeError(
            "unknown compile mode", got=repr(chosen), expected=f"one of {', '.join(MODES)}"
        )
    return chosen


def is_mode_chosen(mode: str | None = None) -> bool:
    """Whether a mode is asked for, by the caller or in the environment. Then plans are made in it,
    whatever the plan cache holds: who names a mode wants to see what it makes."""
    return bool(mode or os.environ.get(MODE_VARIABLE))


@dataclass
class Compilation:
    """Plans of all compiled ranks, and what making them took."""

    job: Job
    mode: str
    world_size: int
    graph: BoxingTaskGraph
    plans: dict[int, Plan]
    master_seconds: dict[str, float]
    """`passes`, `sbp`, `boxing`, `serialize` (slices and their bytes): wall time per stage on the
    master."""
    rank_seconds: dict[int, float]
    """Wall time per rank, from slice to verified plan."""
    slices: dict[int, bytes] = field(default_factory=dict)
    """Wire form of each compiled rank's slice; ranks with equal slices share one bytes object."""
    graph_bytes: int = 0
    """Size of the boxing task graph's wire form."""
    passes: tuple[PassRecord, ...] = ()
    """What each pass did, in order."""
    rank_stages: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of `rank_seconds`, what each stage took (`lower.profile.RANK_STAGES`)."""
    together_seconds: float = 0.0
    """Wall time of verifying the plans of all ranks against each other."""

    @cached_property
    def texts(self) -> dict[int, str]:
        """Text form of every plan."""
        return {rank: format_plan(plan) for rank, plan in self.plans.items()}

    @cached_property
    def digest(self) -> str:
        """One hash over the text form of all plans."""
        return digest_of_plans(self.plans)

    @property
    def distinct_slices(self) -> int:
        return len({id(data) for data in self.slices.values()})


@collector_paused()
def build_graph(
    job: Job,
    world_size: int,
    seconds: dict[str, float] | None = None,
    dump: Path | None = None,
    records: list[PassRecord] | None = None,
) -> BoxingTaskGraph:
    """The master's part: passes, SBP inference, boxing. `seconds` receives the time per stage,
    `records` what each pass did. A UsageError for more ranks than the job's machine has devices.
    """
    require_rank_fits(world_size - 1)
    machine_of_job(job).check_devices(world_size)
    seconds = {} if seconds is None else seconds
    with timed(seconds, "passes"):
        job, done = run_passes(with_chosen_regions(job, world_size))
    if records is not None:
        records.extend(done)
    _dump(dump, "job.txt", lambda: str(job))
    with timed(seconds, "sbp"):
        op_graph = _chosen_layouts(job)
    _dump(dump, "op_graph.txt", lambda: format_op_graph(op_graph))
    with timed(seconds, "boxing"):
        graph = build_boxing_task_graph(op_graph, world_size)
        graph = choose_streams(graph, config_of(job).streams)
        unfused = graph
        graph, fused = fuse_reductions(unfused, config_of(job).fuse_bytes, machine_of_job(job))
        check_step(graph)
    _dump(dump, "boxing_task_graph.txt", lambda: format_boxing_graph(graph))
    if _log.isEnabledFor(logging.INFO):
        _log_work(done, unfused, fused)
    return graph


def _chosen_layouts(job: Job) -> OpGraph:
    """The job with a signature per op."""
    config = config_of(job)
    if config.layout != "auto":
        return infer_sbp(job)
    # It brings a solver, which others do without.
    from plancompiler.search.layout_search import known_layouts  # noqa: PLC0415

    return OpGraph(job, known_layouts(job, config.memory_bytes or None))


def _log_work(
    passes: Sequence[PassRecord], unfused: BoxingTaskGraph, fused: FusedReductions
) -> None:
    """What passes and boxing did to a job, and what they left alone."""
    for record in passes:
        _log.info("%s: %s", record.name, record.summary)
        for line in (*record.changes, *record.notes):
            _log.info("%s: %s", record.name, line)
    _log.info("fuse_reductions: %d reductions became %d", fused.before, fused.after)
    for report in bucket_reports(unfused, fused):
        _log.info("fuse_reductions: %s", report)


def with_chosen_regions(job: Job, world_size: int) -> Job:
    """The job with the regions checkpointed that `recompute=auto` chooses."""
    if config_of(job).recompute != "auto":
        return job
    return choose_regions(job, partial(_memory_of, world_size))


def _memory_of(world_size: int, job: Job) -> dict[int, RankMemory]:
    """What each rank of the job takes; ranks of one slice are taken for equal."""
    config = replace(config_of(job), recompute="none", memory_bytes=0)
    slicer = Slicer(build_graph(replace(job, config=config), world_size))
    known: dict[int, RankMemory] = {}
    memory = {}
    for rank in range(world_size):
        rank_slice = slicer.for_rank(rank)
        if id(rank_slice) not in known:
            placed = place_tasks(rebuild_rank_task_graph(rank_slice, rank))
            known[id(rank_slice)] = memory_of(placed)
        memory[rank] = known[id(rank_slice)]
    return memory


@collector_paused()
def compile_plans(
    job: Job,
    world_size: int,
    mode: str | None = None,
    only_ranks: Iterable[int] | None = None,
    dump: Path | None = None,
) -> Compilation:
    """Verified plans of all ranks, or of `only_ranks` (then others are not built).

    `dump` (or PLANCOMPILER_DUMP) names a folder that receives the IR after every stage as text.
    """
    mode = resolve_mode(mode)
    if dump is None and os.environ.get(DUMP_VARIABLE):
        dump = Path(os.environ[DUMP_VARIABLE])
    require_rank_fits(world_size - 1)
    ranks = _checked_ranks(world_size, only_ranks)
    master_seconds: dict[str, float] = {}
    records: list[PassRecord] = []
    graph = build_graph(job, world_size, master_seconds, dump, records)
    with timed(master_seconds, "serialize"):
        slices, wire = slices_by_rank(graph, ranks)
        graph_bytes = len(graph_to_bytes(graph))
    plans, rank_seconds, rank_stages = _compile_ranks(mode, graph, slices, wire)
    begin = time.perf_counter()
    if only_ranks is None:
        verify_plans(plans)
    together_seconds = time.perf_counter() - begin
    result = Compilation(
        job=job,
        mode=mode,
        world_size=world_size,
        graph=graph,
        plans=plans,
        master_seconds=master_seconds,
        rank_seconds=rank_seconds,
        slices=wire,
        graph_bytes=graph_bytes,
        passes=tuple(records),
        rank_stages=rank_stages,
        together_seconds=together_seconds,
    )
    if dump is not None:
        for rank, rank_slice in slices.items():
            _dump(dump, f"slice_{rank}.txt", partial(format_slice, rank_slice))
            _dump_lowering(dump, rank_slice, rank)
            _dump(dump, f"plan_{rank}.txt", partial(result.texts.__getitem__, rank))
    return result


def _dump_lowering(dump: Path, rank_slice: RankSlice, rank: int) -> None:
    """What each step of lowering makes, whatever mode made the plans."""
    placed = place_tasks(rebuild_rank_task_graph(rank_slice, rank))
    stored = placed.stored
    controlled = control_tasks(stored.ordered)
    _dump(dump, f"order_{rank}.txt", partial(format_order, stored.ordered))
    _dump(dump, f"control_{rank}.txt", partial(format_control, controlled))
    _dump(dump, f"storage_{rank}.txt", partial(format_storage, stored))
    _dump(dump, f"offsets_{rank}.txt", partial(format_offsets, placed))


def _checked_ranks(world_size: int, only_ranks: Iterable[int] | None) -> list[int]:
    if only_ranks is None:
        return list(range(world_size))
    ranks = sorted(set(only_ranks))
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise RankError(
                "a rank to compile is outside the world",
                got=rank,
                expected=f"0 to {world_size - 1}",
            )
    return ranks


def _compile_ranks(
    mode: str,
    graph: BoxingTaskGraph,
    slices: dict[int, RankSlice],
    wire: dict[int, bytes],
) -> tuple[dict[int, Plan], dict[int, float], dict[int, dict[str, float]]]:
    if mode == "rank_per_process":
        return compile_in_processes(wire)
    seconds: dict[int, float] = {}
    stages: dict[int, dict[str, float]] = {rank: {} for rank in slices}

    def compiled(rank: int) -> Plan:
        begin = time.perf_counter()
        plan = compile_rank(slices[rank], rank, stages[rank])
        seconds[rank] = time.perf_counter() - begin
        return plan

    if mode == "naive":
        begin = time.perf_counter()
        whole = WholeGraph(graph)
        shared = (time.perf_counter() - begin) / graph.world_size
        plans = {}
        for rank in slices:
            stages[rank]["expand"] = shared
            begin = time.perf_counter()
            with timed(stages[rank], "emit"):
                plans[rank] = plan_of_part(whole.part(rank))
            with timed(stages[rank], "verify"):
                verify_plan(plans[rank])
            seconds[rank] = time.perf_counter() - begin + shared
        return plans, seconds, stages
    if mode == "rank_per_thread":
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            plans = dict(zip(slices, pool.map(compiled, slices), strict=True))
        return plans, seconds, stages
    return {rank: compiled(rank) for rank in slices}, seconds, stages


def _dump(folder: Path | None, name: str, text: Callable[[], str]) -> None:
    if folder is not None:
        path = folder / name
        with naming_output(f"a dump ({DUMP_VARIABLE})", path):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, (text().encode(),))
