"""Whole plans, estimated: pipeline stages, mesh, micro-batches, schedule, ZeRO and recomputation.

A mesh of a stage has a data-parallel axis and one that layouts are searched for (`tp`). Layouts are
searched once for each size of the second, on the whole model, as repeated layers are decided about
once anyway. What they take then gives the time and the memory of every plan by a few products:

    step = (micro-batches + (stages - 1) / chunks of a stage) * (longest stage of a micro-batch)
           + reductions of gradients + updates

This orders the plans. What is told of a plan is its forecast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np

from plancompiler.boxing.graph import OpGraph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.boxing.planner import boxing_path
from plancompiler.costs import Machine, links_of, machine_of_job
from plancompiler.costs.links import LinkCost
from plancompiler.errors import PlanCompilerError
from plancompiler.ir import Job, NdSbp, Op, Phase, Placement, Split
from plancompiler.ir.shard import element_count, shard_region
from plancompiler.ir.value import Value
from plancompiler.ops.registry import op_def
from plancompiler.passes import config_of, run_passes
from plancompiler.passes.microbatch import batch_axes
from plancompiler.passes.recompute import regions_of
from plancompiler.passes.sequence_parallel import SequenceOptions, split_sequences
from plancompiler.search.candidates import seconds_of
from plancompiler.search.layout_file import name_of, placed_layouts, with_layouts
from plancompiler.search.layout_search import ROUNDS, LayoutSearch, search_layouts
from plancompiler.search.memory_model import values_of_data
from plancompiler.search.mesh_shapes import placement_of
from plancompiler.search.pipeline_cut import CUT_AXES, chunk_of_ops, with_stages
from plancompiler.search.tied_ops import tie_ops

MOST_MICROBATCHES = 512
MOST_STAGES = 64
_PLAIN: Mapping[str, Any] = {
    "microbatches": 1,
    "zero": 0,
    "recompute": "none",
    "memory_bytes": 0,
    "layout": "auto",
}
"""Settings under which layouts are searched for: what the others do is counted apart."""
CHUNKS_PER_STAGE = (1, 2)
"""What is tried: more than one is the interleaved schedule."""
CLOSE = 0.02
"""By how much layouts that split the batch must be better than others to be looked at."""


@dataclass(frozen=True)
class PlanEstimate:
    """A plan and what it may take."""

    stages: int
    chunks: int
    shape: tuple[int, int]
    """Of a stage's mesh: data-parallel, and the axis of searched layouts."""
    settings: Mapping[str, Any]
    """Of the compiler: `microbatches`, `schedule`, `zero`, `recompute`, `sequence_parallel`."""
    seconds: float
    memory_bytes: float
    """Of the fullest device, about."""
    inner: LayoutSearch
    """The layouts, on a smaller mesh."""

    def job(self, job: Job) -> Job:
        """The job with this plan."""
        cut = with_stages(job, self.stages, self.shape, self.chunks)
        pinned = with_layouts(cut, self.layouts)
        return replace(pinned, config=replace(config_of(pinned), **self.settings))

    @property
    def layouts(self) -> dict[str, NdSbp]:
        """Of inputs and parameters, by their names in a layout file."""
        placed = placed_layouts(self.inner.job, self.inner.layouts())
        for op in self.inner.job.ops:
            rows = op.outputs[0].shape[:1] if op.outputs else ()
            name = name_of(op)
            if name in placed and op.kind != "variable" and rows and not rows[0] % self.shape[0]:
                placed[name] = placed[name].replace(0, Split(0))
        return placed


def plan_estimates(job: Job) -> list[PlanEstimate]:
    """The plans of an open job, those with the shortest step first."""
    machine = machine_of_job(job)
    devices = placement_of(job).size
    node = machine.node.devices or devices
    plans: list[PlanEstimate] = []
    widths = [width for width in _divisors(devices) if width <= node]
    passed, _ = run_passes(replace(job, config=replace(config_of(job), **_PLAIN)))
    whole = with_stages(passed, 1, (1, devices))
    cuts = {stages: _cuts(job, stages) for stages in _divisors(devices)}
    batch = _batch_axes(passed)
    for width in widths:
        # All of the batch is on this axis: what is read is split along the data-parallel one, and
        # parameters are not, so that these two can be decided apart.
        axis = _on_devices(whole, width)
        for inner, even in _inner_layouts(axis, batch, width):
            costs = _Costs(job, inner, machine, width, even, bool(batch))
            for stages in _divisors(devices // width):
                plans += costs.plans(stages, devices // width // stages, cuts[stages])
    # Of plans that take the same, the simpler one: it comes first, and sorting is stable.
    return sorted(plans, key=lambda plan: float(f"{plan.seconds:.6g}"))


def _inner_layouts(
    axis: Job, batch: Mapping[str, int], width: int
) -> Iterator[tuple[LayoutSearch, bool]]:
    """The cheapest layouts on so many devices, and whether they split the batch: then micro-batches
    need rows for all devices; and the cheapest ones that do not.
    """
    tied = tie_ops(axis, ROUNDS[0])
    free = search_layouts(axis, certify=False, split_parameters=width > 1, tied=tied)
    layouts = free.layouts()
    if width == 1 or not any(Split(each) in layouts[name].entries for name, each in batch.items()):
        yield free, False
        return
    kept = search_layouts(axis, certify=False, split_parameters=True, whole=batch, tied=tied)
    yield kept, False
    if free.objective_seconds < (1.0 - CLOSE) * kept.objective_seconds:
        yield free, True


def _batch_axes(job: Job) -> dict[str, int]:
    """The axis of each value that micro-batches cut; none where they cannot."""
    for count in (2, 3, 5, 7):
        try:
            return batch_axes(job, replace(config_of(job), microbatches=count))
        except PlanCompilerError:
            continue
    return {}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _cuts(job: Job, stages: int) -> tuple[dict[str, int], ...]:
    """For each number of chunks of a stage that the model has: the chunk of each op."""
    if stages > MOST_STAGES:
        return ()
    ways = []
    for chunks in CHUNKS_PER_STAGE if stages > 1 else (1,):
        try:
            ways.append(chunk_of_ops(job, stages * chunks))
        except PlanCompilerError:
            break
    return tuple(ways)


def _on_devices(job: Job, count: int) -> Job:
    """The job on the first so many of its devices, along the second axis of its mesh."""
    old = placement_of(job)
    mesh = Placement(old.device_type, [list(old.rank_list[:count])], old.axes)
    values = {}
    ops = []
    for op in job.ops:
        outputs = tuple(replace(value, placement=mesh) for value in op.outputs)
        values.update({value.name: value for value in outputs})
        inputs = tuple(values[value.name] for value in op.inputs)
        ops.append(replace(op, inputs=inputs, outputs=outputs, placement=mesh))
    return replace(job, ops=tuple(ops))


@dataclass
class _Parts:
    """Seconds of a step, on the inner mesh."""

    op_seconds: list[float]
    """Of each op, with the boxing of what it makes."""
    computing: dict[Phase, float]
    boxing: dict[Phase, float]
    """By bytes, without gradients that updates read: they are reduced apart."""
    starts: dict[Phase, float]
    """Of these steps, whatever their sizes."""
    ops: dict[Phase, int]
    """Kernels."""


def _compiled(inner: LayoutSearch) -> tuple[OpGraph, bool]:
    """The searched job with the layouts that it is compiled with, as only those of inputs and
    parameters are pinned in a plan; and whether that takes the pass that splits sequences.
    """
    job, layouts = inner.job, inner.layouts()
    if placement_of(job).size == 1:
        return OpGraph(job, inner.signatures), False
    pinned = with_layouts(job, placed_layouts(job, layouts))
    fed = values_of_data(job.ops)
    splits = any(
        layouts[value.name][1] == Split(1)
        for op in job.ops
        if op.origin.phase is Phase.FORWARD and op.inputs
        for value in op.outputs
        if len(value.shape) == 3 and value.name in fed
    )
    if splits:
        try:
            pinned = split_sequences(pinned, SequenceOptions(sequence_parallel=True)).job
        except PlanCompilerError:
            splits = False  # there is nothing that is partial
    return infer_sbp(pinned), splits


def _parts(graph: OpGraph, machine: Machine) -> _Parts:
    job = graph.job
    made = {
        value.name: sbp
        for op, signature in zip(job.ops, graph.signatures, strict=True)
        for value, sbp in zip(op.outputs, signature.outputs, strict=True)
    }
    readers: dict[str, list[tuple[Op, NdSbp]]] = {}
    for op, signature in zip(job.ops, graph.signatures, strict=True):
        for value, sbp in zip(op.inputs, signature.inputs, strict=True):
            readers.setdefault(value.name, []).append((op, sbp))
    computing, moving, starting = (dict.fromkeys(Phase, 0.0) for _ in range(3))
    parts = _Parts([], computing, moving, starting, dict.fromkeys(Phase, 0))
    known: dict[object, float] = {}
    stepped: dict[object, tuple[float, float]] = {}
    task = machine.host.task_seconds
    for op, signature in zip(job.ops, graph.signatures, strict=True):
        phase, links = op.origin.phase, links_of(machine, op.placement)
        key: object = (op.kind, op.attrs, op.input_types, op.output_types, signature)
        if key not in known:
            (known[key],) = seconds_of(op, (signature,), machine)
        seconds = known[key]
        parts.computing[phase] += seconds
        parts.ops[phase] += seconds > 0
        boxing = starts = 0.0
        for value in op.outputs:
            read = readers.get(value.name, ())
            if read and all(each.origin.phase is Phase.UPDATE for each, _ in read):
                continue
            wanted = frozenset(sbp for _, sbp in read if not sbp.has_halo) - {made[value.name]}
            key = value.type, made[value.name], wanted, links
            if key not in stepped:
                steps = {
                    (step.before, step.after): step
                    for sbp in wanted
                    for step in boxing_path(
                        made[value.name], sbp, *value.type, op.placement.hierarchy, links
                    )
                }.values()
                stepped[key] = (
                    sum(step.seconds for step in steps),
                    sum(step.cost.start + task for step in steps),
                )
            boxing += stepped[key][0]
            starts += stepped[key][1]
        parts.boxing[phase] += boxing - starts
        parts.starts[phase] += starts
        parts.op_seconds.append(seconds + boxing)
    return parts


@dataclass(frozen=True)
class _Way:
    """A way to run some layouts."""

    stages: int
    deal: int
    """Chunks of a stage."""
    rows: int
    """Devices of a stage's data-parallel axis."""
    microbatches: int
    zero: int
    recompute: bool
    shares: _ByStage


class _Costs:
    """What layouts take, by what it grows with."""

    def __init__(
        self,
        job: Job,
        inner: LayoutSearch,
        machine: Machine,
        width: int,
        even: bool,
        in_pieces: bool,
    ) -> None:
        self._job, self._inner, self._machine, self._width = job, inner, machine, width
        self._rows = width if even else 1
        """That a micro-batch on a mesh's row has, or a multiple."""
        self._in_pieces = in_pieces
        """Whether the batch can be cut into micro-batches."""
        self._config = config_of(job)
        self._links: dict[int, LinkCost] = {}
        self._graph, self._splits_sequences = _compiled(inner)
        passed = self._graph.job
        self._layouts = {
            value.name: sbp
            for op, signature in zip(passed.ops, self._graph.signatures, strict=True)
            for value, sbp in zip(op.outputs, signature.outputs, strict=True)
        }
        self.parts = _parts(self._graph, machine)
        self._maker = {value.name: op for op in passed.ops for value in op.outputs}
        self._hierarchy = placement_of(passed).hierarchy
        self._known_bytes: dict[object, int] = {}
        self._regions = {
            name: region
            for name, region in regions_of(passed).items()
            if region.effect is None and not region.checkpoint
        }
        self._region_of: dict[str, str] = {}
        """The call that made each value; what passes move belongs to it, too."""
        for op in passed.ops:
            region = op.origin.region
            if op.kind == "redistribute" and not region:
                region = self._region_of.get(op.inputs[0].name, "")
            self._region_of.update((value.name, region) for value in op.outputs)
        self._gradients = {
            value.name
            for op in passed.ops
            if op.origin.phase is Phase.UPDATE
            for value in op.inputs
            if self._maker[value.name].origin.phase is Phase.BACKWARD and value.shape
        }
        self._of_ops, self._call = self._amounts()
        self._batches = [
            op.outputs[0].shape[0]
            for op in passed.ops
            if (op.kind == "input" or op_def(op.kind).source) and op.outputs[0].shape
        ]

    def _held(self, value: Value, sbp: NdSbp | None = None) -> int:
        """Bytes of a value on a device of the inner mesh, in the layout in which it is made or in
        another one.
        """
        key = value.type, sbp or self._layouts[value.name]
        if key not in self._known_bytes:
            region = shard_region(value.shape, self._hierarchy, key[1], (0, 0))
            elements = element_count([stop - start for start, stop in region])
            self._known_bytes[key] = elements * value.dtype.itemsize
        return self._known_bytes[key]

    def _kept(self, fed: Set[str]) -> Iterator[tuple[Op, int, bool]]:
        """What forward leaves for backward: op, bytes on a device, whether they are of data.

        It is left in the layouts in which backward reads it; what is gathered late as it is made.
        """
        seen = set()
        for op, signature in zip(self._graph.job.ops, self._graph.signatures, strict=True):
            if op.origin.phase is Phase.FORWARD:
                continue
            for value, sbp in zip(op.inputs, signature.inputs, strict=True):
                if sbp.has_halo or op.attr("late") is not None:
                    sbp = self._layouts[value.name]
                kept = self._viewed(value) if sbp == self._layouts[value.name] else value
                maker = self._maker[kept.name]
                if kept is not value:
                    sbp = self._layouts[kept.name]
                if (kept.name, sbp) in seen or maker.kind == "variable":
                    continue
                if maker.origin.phase is Phase.FORWARD:
                    seen.add((kept.name, sbp))
                    yield maker, self._held(kept, sbp), kept.name in fed

    def _viewed(self, value: Value) -> Value:
        """The value on whose bytes this one lies."""
        while True:
            maker = self._maker[value.name]
            if not op_def(maker.kind).view or not maker.inputs:
                return value
            (source, *_) = maker.inputs
            moved = maker.kind == "redistribute" and (
                self._layouts[source.name] != self._layouts[value.name]
            )
            if moved or maker.origin.phase is not Phase.FORWARD:
                return value
            value = source

    def _amounts(self) -> tuple[_ByStage, float]:
        """What each op has of the model, and the bytes that the largest call makes which may be
        computed again.
        """
        ops = self._graph.job.ops
        number = {op.name: place for place, op in enumerate(ops)}
        each = _ByStage(*np.zeros((len(fields(_ByStage)), len(ops))))
        layers: dict[str, list[int]] = {}
        updated = {op.inputs[source].name for op in ops for _, source in op_def(op.kind).mutates}
        for place, (op, seconds) in enumerate(zip(ops, self.parts.op_seconds, strict=True)):
            if op.origin.phase is not Phase.UPDATE:
                each.work[place] = seconds
            if op.kind == "variable":
                one = each.parameters if op.attr("trainable") else each.states
                one[place] = self._held(op.outputs[0])
                layers.setdefault(_layer(op), []).append(place)
                splits = op.outputs[0].name in updated and max(op.outputs[0].shape, default=1) > 1
                each.tensors[place] = bool(op.attr("trainable")) and splits
        for places in layers.values():
            each.layer[places] = each.parameters[places].sum()
        by_region: dict[str, float] = {}
        fed = values_of_data(ops)
        for place, (op, signature) in enumerate(zip(ops, self._graph.signatures, strict=True)):
            if op.origin.phase is Phase.BACKWARD:
                for value, sbp in zip(op.inputs, signature.inputs, strict=True):
                    if value.name in fed and not sbp.has_halo:
                        each.largest[place] += self._held(value, sbp)
                for value in op.outputs:
                    if value.name in fed and value.name not in self._gradients:
                        each.largest[place] += self._held(value)
                    elif value.name in self._gradients:
                        each.gradients[place] += self._held(value)
                each.gradient[place] = each.gradients[place]
        for op, nbytes, of_data in self._kept(fed):
            place = number[op.name]
            region = self._region_of.get(op.outputs[0].name, "")
            (each.kept if of_data else each.cast)[place] += nbytes
            if of_data and region in self._regions:
                by_region[region] = by_region.get(region, 0.0) + nbytes
            elif of_data:
                each.again[place] += nbytes
        # With recomputation calls keep what they read, and one of them all that it makes.
        for name, call in self._regions.items():
            entering = {
                value.name: value
                for op in call.ops
                for value in op.inputs
                if self._region_of.get(value.name) != name and value.name in fed
            }
            each.again[number[call.ops[-1].name]] += sum(map(self._held, entering.values()))
        return each, max(by_region.values(), default=0.0)

    def _stages(self, chunk: Mapping[str, int], stages: int) -> np.ndarray:
        """The stage of each op."""
        of = dict(chunk)
        for op in self._graph.job.ops:
            if op.name not in of:  # what passes have added lies where what it reads does
                of[op.name] = max(
                    (of[self._maker[each.name].name] for each in op.inputs), default=0
                )
        return np.array([of[op.name] for op in self._graph.job.ops]) % stages

    def plans(
        self, stages: int, rows: int, ways: Sequence[Mapping[str, int]]
    ) -> Iterator[PlanEstimate]:
        """All plans with so many stages of (rows, width) devices, whose ops are cut in these ways
        into chunks.
        """
        given = self._config.changes()
        counts = [
            count
            for count in _powers(MOST_MICROBATCHES if self._in_pieces else 1)
            if all(batch % (count * rows * self._rows) == 0 for batch in self._batches)
        ]
        if not self._batches:
            counts = [1]

        def options(name: str, choices: Sequence[object]) -> Sequence[object]:
            return [given[name]] if name in given else choices

        zeros = options("zero", (0, 1, 2, 3) if rows > 1 and self._of_ops.tensors.any() else (0,))
        again = options("recompute", ("none", "auto") if self._regions else ("none",))
        for deal, chunk in zip(CHUNKS_PER_STAGE, ways, strict=False):
            shares = self._of_ops.over(self._stages(chunk, stages), stages)
            for count, zero, recompute in product(options("microbatches", counts), zeros, again):
                assert isinstance(count, int)
                assert isinstance(zero, int)
                if stages > 1 and count == 1:
                    continue
                if deal > 1 and count % stages:
                    continue
                schedule = "gpipe" if stages == 1 else "1f1b" if deal == 1 else "interleaved"
                if given.get("schedule", schedule) != schedule:
                    continue
                settings: dict[str, Any] = {
                    "layout": "given",
                    "memory_bytes": 0,
                    "microbatches": count,
                }
                settings |= {"zero": zero, "recompute": recompute}
                if self._splits_sequences and "sequence_parallel" not in given:
                    settings["sequence_parallel"] = True
                if stages > 1:
                    settings["schedule"] = schedule
                way = _Way(stages, deal, rows, count, zero, recompute == "auto", shares)
                yield PlanEstimate(
                    stages,
                    stages * deal,
                    (rows, self._width),
                    settings,
                    self._seconds(way),
                    self._memory(way),
                    self._inner,
                )

    def _seconds(self, way: _Way) -> float:
        parts, shares, rows, count = self.parts, way.shares, way.rows, way.microbatches
        runs = [Phase.FORWARD, Phase.BACKWARD, *([Phase.FORWARD] if way.recompute else [])]
        ops, computing, moving = (
            sum(each[phase] for phase in runs)
            for each in (parts.ops, parts.computing, parts.boxing)
        )
        # What is computed again begins where calls do, and few of them end in a collective then.
        starting = parts.starts[Phase.FORWARD] + parts.starts[Phase.BACKWARD]
        # The launches of kernels and messages do not shrink with what they work on.
        launch, task = self._machine.device.launch_seconds, self._machine.host.task_seconds
        working = max(0.0, computing - ops * launch)
        slowest = float(shares.work.max() / (shares.work.sum() or 1.0))
        each = slowest * ((working + moving) / rows / count + ops * (launch + task) + starting)
        if way.stages > 1:
            each += 4 * way.deal * (self._machine.network or self._machine.node).latency_seconds
        seconds = (count + (way.stages - 1) / way.deal) * each
        weights = float(shares.parameters.max())
        link = self._link(rows)
        once = (rows - 1) / rows * weights * link.per_byte
        # Reductions start in buckets, but gathers one by one.
        start = (1 + math.log2(rows)) * link.per_message + task if rows > 1 else 0.0
        start *= float(shares.tensors.max())
        # Gradients are reduced while backward goes on, and layers gathered while others compute:
        # in the last micro-batch, or in all of them.
        if way.zero < 2:
            seconds += max(0.0, 2 * once - each / 2)
        else:
            gathers = 2 if way.zero == 3 else 0
            moved = (1 + gathers) * once + gathers * start
            seconds += max(0.0, count * (moved - each / (1 if gathers else 2)))
        if way.zero in (1, 2):
            seconds += once + start
        return float(seconds) + parts.computing[Phase.UPDATE] * weights / (
            float(shares.parameters.sum()) or 1.0
        ) / (rows if way.zero else 1)

    def _link(self, rows: int) -> LinkCost:
        """Along the data-parallel axis of a mesh with so many rows."""
        if rows not in self._links:
            self._links[rows] = links_of(self._machine, self._mesh(rows)).along((0,))
        return self._links[rows]

    def _mesh(self, rows: int) -> Placement:
        old = placement_of(self._job)
        ranks = [
            list(old.rank_list[row * self._width : (row + 1) * self._width]) for row in range(rows)
        ]
        return Placement(old.device_type, ranks, CUT_AXES[:2])

    def _memory(self, way: _Way) -> float:
        shares, rows, count, zero = way.shares, way.rows, way.microbatches, way.zero
        stages, deal = way.stages, way.deal
        weights = shares.parameters
        held = weights + shares.states
        if zero:
            held = held / rows
            # A layer's parameters are gathered while those before it are used.
            ahead = (1 + self._config.prefetch) * shares.layer
            held += weights if zero < 3 else np.minimum(weights, ahead)
        gradients = shares.gradients
        space = shares.largest / rows / count
        reduced = np.zeros(stages)
        if zero >= 2:
            # Those of a layer are reduced while those of the next ones are made.
            apart = (2 + self._config.prefetch) * shares.layer
            gradients = gradients / rows + np.minimum(gradients, apart)
        elif count > 1:
            # A micro-batch adds to them; after the last one they are reduced, where what
            # micro-batches work in is free.
            space = space + shares.gradient
            reduced = gradients if rows > 1 else reduced
        cast = shares.cast / (1 if zero < 3 else rows)
        flying = 1.0 if stages == 1 else np.minimum(count, stages - np.arange(stages))
        if deal > 1:
            flying = np.minimum(count, (stages * (deal + 1) - 2 * np.arange(stages)) / deal)
        narrower = 1.0 / rows / count
        alive = (shares.again if way.recompute else shares.kept) * flying * narrower
        if way.recompute:
            space = space + self._call * narrower
        if stages == 1:
            alive, space = np.zeros(1), space + alive
        return float((held + gradients + cast + alive + np.maximum(space, reduced)).max())


@dataclass(frozen=True)
class _ByStage:
    """What stages have of a model, or ops: bytes on a device of the inner mesh, of the whole
    batch.
    """

    work: np.ndarray
    """Seconds of forward and backward computation."""
    parameters: np.ndarray
    states: np.ndarray
    kept: np.ndarray
    """What forward leaves for backward, of data."""
    cast: np.ndarray
    """What it leaves that does not depend on data, such as parameters in half precision."""
    again: np.ndarray
    """What it leaves where calls are computed again."""
    gradients: np.ndarray
    """As they are made, before they are reduced."""
    gradient: np.ndarray
    """The largest of them."""
    tensors: np.ndarray
    """Parameters that are updated and have an axis to split: how many."""
    layer: np.ndarray
    """Parameters of the largest layer."""
    largest: np.ndarray
    """What the largest op of backward reads and makes, of data."""

    def over(self, stage_of: np.ndarray, stages: int) -> _ByStage:
        """That of stages, where this is that of ops."""
        return _ByStage(*(self._over(each.name, stage_of, stages) for each in fields(self)))

    def _over(self, name: str, stage_of: np.ndarray, stages: int) -> np.ndarray:
        of_ops = getattr(self, name)
        if name not in ("gradient", "layer", "largest"):
            return np.bincount(stage_of, of_ops, stages)
        most = np.zeros(stages)
        np.maximum.at(most, stage_of, of_ops)
        return most


def _layer(variable: Op) -> str:
    """What parameters of a layer have in common: their names up to the first number."""
    return re.sub(r"(\.\d+\.).*", r"\1", str(variable.attr("name")))


def _powers(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2
