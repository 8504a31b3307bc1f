"""The best plans of a job: layouts, mesh, pipeline, micro-batches, ZeRO and recomputation.

Estimates order the plans (`search.plan_estimates`); the first of them are compiled and forecast.
What is said to fit is what fits by its forecast, to the byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plancompiler.costs import machine_of_job
from plancompiler.errors import PlanCompilerError, UsageError
from plancompiler.forecasting.job_forecast import Forecast, forecast
from plancompiler.ir import Job, NdSbp
from plancompiler.lower.collector import collector_paused
from plancompiler.passes import config_of, run_passes
from plancompiler.search.layout_file import layout_text, placed_layouts
from plancompiler.search.layout_search import LayoutSearch, keep_layouts
from plancompiler.search.mesh_search import search_meshes
from plancompiler.search.mesh_shapes import is_open, meshes_of, with_mesh
from plancompiler.search.plan_estimates import PlanEstimate, plan_estimates

MOST_DEVICES = 64
"""Up to which layouts are searched on all meshes of two axes, without a pipeline."""
MOST_WORK = 2_600_000
"""Ops times micro-batches of the plans that are forecast, once one fits and nobody says how long to
look."""
COMPILING = 100
"""Micro-batches whose simulation takes as long as all else of a forecast."""
TIGHTENED = 3
"""Times that layouts are searched for, each with less memory, until the forecast fits."""
MOST_TRIED = 3
"""Times the plans that are asked for: so many forecasts are made at most where few fit."""
ROUGH = 1.6
"""How many times a plan's memory its estimate may be, for all that is known of small models."""


@dataclass(frozen=True)
class Plan:
    """A plan and its forecast."""

    forecast: Forecast
    search: LayoutSearch
    """Its layouts; with an `estimate` those of the axis that they were searched for."""
    fits: bool
    estimate: PlanEstimate | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the compiler, that belong to the plan."""

    @property
    def stages(self) -> int:
        """Of its pipeline."""
        return len(meshes_of(self.forecast.job))

    @property
    def mesh(self) -> tuple[int, ...]:
        """The shape of a stage's mesh."""
        return meshes_of(self.forecast.job)[0].hierarchy

    def file_text(self) -> str:
        """Its layout file."""
        if self.estimate is None:
            job = self.search.job
            placed = placed_layouts(job, self.search.layouts())
            return layout_text(job, placed, config=self.settings)
        layouts: dict[str, NdSbp] = self.estimate.layouts
        return layout_text(self.forecast.job, layouts, self.estimate.chunks, self.settings)


@collector_paused()
def search_plans(
    job: Job,
    memory_bytes: float | None,
    top: int,
    say: Callable[[str], None] | None = None,
    seconds: float | None = None,
) -> list[Plan]:
    """The best plans of a job on its devices, those that fit with the shortest step first. What the
    job places, and settings that it changes, stay. `say` hears what is forecast next, and how many
    plans were estimated that were not. No forecast begins later than `seconds` from now, once one
    fits; by default what is forecast depends on the job alone, and not on the machine's speed.

    UsageError where none fits that is tried: with the one that needs least, and the tensor that is
    in its way.
    """
    end = None if seconds is None else time.monotonic() + seconds
    limit = machine_of_job(job).device.memory_bytes if memory_bytes is None else memory_bytes
    plans: list[Plan] = []
    error: PlanCompilerError | None = None
    free = is_open(job) and len(meshes_of(job)) == 1
    if not free or meshes_of(job)[0].size <= MOST_DEVICES:
        try:
            plans += _searched(job, memory_bytes, limit, top, say or (lambda text: None), end)
        except PlanCompilerError as raised:
            if not free:
                raise
            error = raised
    if free and meshes_of(job)[0].size > 1:
        plans += _estimated(job, limit, top, plans, say or (lambda text: None), end)
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        if not plans and error is not None:
            raise error
        raise _nothing_fits(plans, limit)
    # Of equals the simpler one: it comes first, and sorting is stable.
    return sorted(fitting, key=lambda plan: float(f"{plan.forecast.step_seconds:.9g}"))[:top]


def _searched(
    job: Job,
    memory_bytes: float | None,
    limit: float,
    top: int,
    say: Callable[[str], None],
    end: float | None,
) -> Iterator[Plan]:
    """One step of the whole batch, on every mesh.

    The search counts variables and what backward reads. Where the forecast of none is within the
    limit, it searches again for as much less as they were beyond it.
    """
    aim = memory_bytes
    for attempt in range(TIGHTENED):
        config = config_of(job)
        settings: dict[str, Any] = {}
        if attempt and aim is not None:
            settings = {"memory_bytes": int(aim)}
            job = replace(job, config=replace(config, **settings))
        plans: list[Plan] = []
        try:
            results = search_meshes(run_passes(job)[0], aim)[:top]
        except PlanCompilerError:
            if not attempt:
                raise
            return
        for number, each in enumerate(results):
            if end is not None and time.monotonic() > end and any(plan.fits for plan in plans):
                say(f"not forecast: {len(results) - number} other meshes")
                break
            keep_layouts(each, config_of(job).memory_bytes or None)
            shaped = job
            if len(meshes_of(job)) == 1:
                shaped = with_mesh(job, meshes_of(each.job)[0].hierarchy)
            known = forecast(shaped)
            plans.append(Plan(known, each, known.worst.memory.total <= limit, None, settings))
        yield from plans
        if aim is None or any(plan.fits for plan in plans):
            return
        aim *= 0.98 * limit / min(plan.forecast.worst.memory.total for plan in plans)


def _estimated(
    job: Job,
    limit: float,
    top: int,
    others: list[Plan],
    say: Callable[[str], None],
    end: float | None,
) -> Iterator[Plan]:
    """Plans in the order of their estimates, one for each mesh and number of stages that fits."""
    fastest = min(
        (plan.forecast.step_seconds for plan in others if plan.fits), default=float("inf")
    )
    work = tried = 0
    done: set[object] = set()
    estimates = [
        each
        for each in plan_estimates(job)
        if not (others and each.stages == 1 and each.settings == _PLAIN)
    ]

    def plan_of(estimate: PlanEstimate) -> Plan | None:
        nonlocal work, tried
        settings = estimate.settings
        tried, work = tried + 1, work + _work(job, estimate)
        say(
            f"plan {tried}: {estimate.stages} stages of {list(estimate.shape)} devices, "
            f"{settings['microbatches']} micro-batches, zero {settings['zero']}; about "
            f"{estimate.seconds:.3g} s by its estimate"
        )
        try:
            known = forecast(estimate.job(job))
        except PlanCompilerError as error:
            # A batch that does not divide so, say, or nothing that zero could split.
            say(f"plan {tried} is left out: {error.report.what}")
            return None
        fits = known.worst.memory.total <= limit
        return Plan(known, estimate.inner, fits, estimate, settings)

    fitting = [each for each in estimates if each.memory_bytes <= limit]
    looked: set[int] = set()
    for number, estimate in enumerate(fitting):
        key = estimate.stages, estimate.shape
        if key in done:
            continue
        if tried >= MOST_TRIED * top or len(done) >= top or estimate.seconds > 2 * fastest:
            break
        late = work + _work(job, estimate) > MOST_WORK if end is None else time.monotonic() > end
        if late and (fastest < float("inf") or work > MOST_WORK):
            others_left = {(each.stages, each.shape) for each in fitting[number:]} - done
            say(
                f"not forecast: {len(fitting) - number} plans, with {len(others_left)} other "
                f"meshes or numbers of stages; about {estimate.seconds:.3g} s and more by their "
                "estimates"
            )
            break
        looked.add(id(estimate))
        plan = plan_of(estimate)
        if plan is not None:
            if plan.fits:
                done.add(key)
                fastest = min(fastest, plan.forecast.step_seconds)
            yield plan
    if fastest < float("inf"):
        return
    # Those that need least, until no other may need less than the best of them.
    least, work = float("inf"), 0
    for estimate in sorted(estimates, key=lambda each: (each.memory_bytes, each.seconds)):
        if estimate.memory_bytes > ROUGH * least or work > MOST_WORK:
            return
        plan = None if id(estimate) in looked else plan_of(estimate)
        if plan is not None:
            least = min(least, plan.forecast.worst.memory.total)
            yield plan
            if plan.fits:
                return


def _work(job: Job, estimate: PlanEstimate) -> int:
    return len(job.ops) * (COMPILING + int(estimate.settings["microbatches"]))


_PLAIN = {"layout": "given", "memory_bytes": 0, "microbatches": 1, "zero": 0, "recompute": "none"}


def _nothing_fits(plans: list[Plan], limit: float) -> UsageError:
    plan = min(plans, key=lambda each: each.forecast.worst.memory.total)
    known = plan.forecast
    most = known.at_peak[0] if known.at_peak else None
    number = known.classes.index(known.worst)
    worst = known.rank_classes.classes[number].plan
    held = [(worst.register_by_id[each.register], each) for each in worst.variables]
    variable = max(held, key=lambda each: each[0].nbytes, default=None)
    where, source, size = "nothing", "", 0
    if most is not None:
        where = most.name if most.name == most.op else f"{most.name} ({most.op})"
        source, size = str(most.source), most.nbytes
    if variable is not None and variable[0].nbytes >= size:
        register, spec = variable
        made = worst.task_by_id[register.producer]
        where, source, size = f"variable {spec.name}", str(made.source), register.nbytes
    taken = known.worst.memory.total
    return UsageError(
        "no plan that was tried fits the memory of a device",
        source=source or None,
        got=f"{limit:.0f} bytes; of {len(plans)} plans that were tried, the one that needs least "
        f"takes {taken}, {taken / limit:.2f} times as much",
        expected=f"{plan.stages} stages of {list(plan.mesh)} devices ({known.job.config}) to fit; "
        f"most of a rank's memory is in the way as {where}, {size} bytes",
        hint="allow more memory or more devices, or make the model or the batch smaller",
    )
