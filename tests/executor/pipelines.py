"""Hand-made plans of steps with several micro-batches, and what NumPy says they compute.

`train` is a model of two matrix products on two stages, forward, backward and update, with T ranks
a stage that share the work (the first product is split along its rows, the second along its
columns). Rank s * T + t is rank t of stage s:

    prologue     c = scale + scale, made on stage 0 and copied to stage 1
    forward 0    x (fed);  h = all_reduce(x @ w0)
    forward 1    h copied;  y = h @ w1 * c
    backward 1   dw1 += hᵀ @ (y * c);  dh = all_reduce((y * c) @ w1ᵀ)
    backward 0   dh copied;  dw0 += xᵀ @ dh        (in a weight segment with zero_bubble)
    epilogue     w -= dw on both stages; y put together; dw0 copied to stage 1
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from plancompiler.ir import Reduction
from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind, Slot, in_flight
from plancompiler.ir.task import Primitive, pack_register_id, unpack_id
from plancompiler.plan.plan import Plan, Stream
from tests.executor.plans import CONTROL_SLOT, Sketch

PROLOGUE, EPILOGUE = Segment(SegmentKind.PROLOGUE), Segment(SegmentKind.EPILOGUE)
FLOAT = "float32"
ROWS, WIDTH, HIDDEN, COLUMNS = 2, 4, 3, 6
"""Rows of a micro-batch, and the sizes of the two products."""


def stage_slots(
    schedule: str, microbatches: int, stages: int, stage: int, chunks: int = 0
) -> list[tuple[Segment, int]]:
    """(segment, micro-batch) of a stage in a step; a chunk per stage unless said."""
    pipeline = Pipeline(schedule, microbatches, stages, chunks or stages)
    return [(pipeline.segments[segment], m) for segment, m in pipeline.slots(stage)]


def alive(slots: Sequence[tuple[Segment, int]], first: Segment, last: Segment) -> int:
    """Slots of a register made in one segment and last read in another."""
    index = {segment: number for number, (segment, _) in enumerate(slots)}
    numbered = [Slot(index[segment], m) for segment, m in slots]
    return in_flight(numbered, index[first], index[last])


class _Train:
    """The tasks of `train`, family by family over all ranks."""

    def __init__(self, schedule: str, microbatches: int, tp: int, copy_each: bool) -> None:
        self.sketch = Sketch(2 * tp, microbatches=microbatches)
        self.microbatches, self.tp, self.copy_each = microbatches, tp, copy_each
        self.stages = [range(tp), range(tp, 2 * tp)]
        self.slots = [stage_slots(schedule, microbatches, 2, stage) for stage in range(2)]
        self.weight = SegmentKind.WEIGHT if schedule == "zero_bubble" else SegmentKind.BACKWARD
        self.family = 0
        self.made: dict[str, dict[int, int]] = {}

    def next(self) -> int:
        self.family += 1
        return self.family

    def begin(self, stage: int, segment: Segment) -> None:
        for rank in self.stages[stage]:
            self.sketch.begin(rank, segment)

    def end(self, stage: int) -> None:
        family = self.next()
        for rank in self.stages[stage]:
            self.sketch.step_end(rank, family)

    def op(
        self, stage: int, name: str, kind: str, inputs: str, shape: Sequence[int], **more
    ) -> None:
        family = self.next()
        for rank in self.stages[stage]:
            (self.made.setdefault(name, {})[rank],) = self.sketch.compute(
                rank,
                family,
                kind,
                [self.made[one][rank] for one in inputs.split()],
                [(shape, FLOAT)],
                **more,
            )

    def variable(self, stage: int, name: str, shape: Sequence[int]) -> None:
        family = self.next()
        for rank in self.stages[stage]:
            register = self.sketch.variable(rank, family, name, shape, "normal", (0.0, 0.5))
            self.made.setdefault(name, {})[rank] = register

    def reduce(self, stage: int, name: str, source: str, shape: Sequence[int]) -> None:
        """All-reduce over a stage; nothing to do for a single rank."""
        ranks = list(self.stages[stage])
        inputs = {rank: self.made[source][rank] for rank in ranks}
        if self.tp > 1:
            shapes = dict.fromkeys(ranks, shape)
            inputs = self.sketch.collective(
                ranks, self.next(), Primitive.ALL_REDUCE, inputs, shapes, reduction=Reduction.SUM
            )
        self.made.setdefault(name, {}).update(inputs)

    def copy(self, to: int, name: str, source: str, count: int = 1) -> None:
        """From each rank of the other stage to its partner."""
        family = self.next()
        for rank in self.stages[to]:
            partner = (rank + self.tp) % (2 * self.tp)
            self.made.setdefault(name, {})[rank] = self.sketch.copy(
                rank, family, self.made[source][partner], count=count
            )

    def build(self) -> dict[int, Plan]:
        for stage in range(2):
            for rank in self.stages[stage]:
                self.sketch.follow(rank, self.slots[stage])
        return self.sketch.build()


def train(
    schedule: str, microbatches: int, tp: int = 1, copy_each: bool = False, ahead: int = 0
) -> dict[int, Plan]:
    """See above. With `copy_each` stage 1 copies c anew for every micro-batch. Registers between
    stages have `ahead` slots more than they need.
    """
    made = _Train(schedule, microbatches, tp, copy_each)
    sketch, own = made.sketch, COLUMNS // tp
    inner = WIDTH // tp
    forward = [Segment(SegmentKind.FORWARD, stage) for stage in range(2)]
    backward = [Segment(SegmentKind.BACKWARD, stage) for stage in range(2)]
    weight = [Segment(made.weight, stage) for stage in range(2)]
    kept = [alive(made.slots[stage], forward[stage], weight[stage]) + ahead for stage in range(2)]

    for stage in range(2):
        made.begin(stage, PROLOGUE)
    family = made.next()
    made.made["scale"] = {rank: sketch.input(rank, family, "scale", ()) for rank in made.stages[0]}
    made.op(0, "c", "add", "scale scale", ())
    made.variable(0, "w0", (inner, HIDDEN))
    made.variable(1, "w1", (HIDDEN, own))
    if not copy_each:
        made.copy(1, "c", "c")
    made.end(0)
    made.end(1)

    made.begin(0, forward[0])
    family = made.next()
    made.made["x"] = {}
    for rank in made.stages[0]:
        region = ((0, ROWS), (rank * inner, (rank + 1) * inner))
        made.made["x"][rank] = sketch.input(
            rank, family, "x", (ROWS * microbatches, WIDTH), region=region, count=kept[0]
        )
    made.op(0, "h_part", "matmul", "x w0", (ROWS, HIDDEN), count=1 + ahead)
    made.reduce(0, "h", "h_part", (ROWS, HIDDEN))
    made.end(0)

    made.begin(1, forward[1])
    if copy_each:
        made.copy(1, "c", "c", alive(made.slots[1], forward[1], backward[1]))
    made.copy(1, "h", "h", kept[1])
    made.op(1, "p", "matmul", "h w1", (ROWS, own))
    crossing = alive(made.slots[1], forward[1], backward[1])
    made.op(1, "y", "mul", "p c", (ROWS, own), count=crossing)
    made.op(
        1, "all_y", "collect_pieces", "y", (ROWS * microbatches, own), attrs={"axis": 0}, once=True
    )
    made.end(1)

    gradients = alive(made.slots[1], backward[1], weight[1])
    made.begin(1, backward[1])
    made.op(1, "dy", "mul", "y c", (ROWS, own), count=gradients)
    made.op(
        1,
        "dh_part",
        "matmul",
        "dy w1",
        (ROWS, HIDDEN),
        attrs={"transpose_b": True},
        count=1 + ahead,
    )
    made.reduce(1, "dh", "dh_part", (ROWS, HIDDEN))
    if weight[1] != backward[1]:
        made.end(1)
        made.begin(1, weight[1])
    made.op(1, "dw1_part", "matmul", "h dy", (HIDDEN, own), attrs={"transpose_a": True}, piece=-1)
    made.op(
        1, "dw1", "accumulate", "dw1_part", (HIDDEN, own), attrs={"reduction": "sum"}, once=True
    )
    made.end(1)

    made.begin(0, backward[0])
    made.copy(0, "dh", "dh", alive(made.slots[0], backward[0], weight[0]))
    if weight[0] != backward[0]:
        made.end(0)
        made.begin(0, weight[0])
    made.op(0, "dw0_part", "matmul", "x dh", (inner, HIDDEN), attrs={"transpose_a": True}, piece=-1)
    made.op(
        0, "dw0", "accumulate", "dw0_part", (inner, HIDDEN), attrs={"reduction": "sum"}, once=True
    )
    made.end(0)

    for stage in range(2):
        made.begin(stage, EPILOGUE)
    made.reduce(0, "dw0_sum", "dw0", (inner, HIDDEN))
    made.copy(1, "dw0_copy", "dw0")
    outputs = {
        0: {"dw0_sum": "dw0_sum"},
        1: {"y": "all_y", "dw0": "dw0_copy", "dw1": "dw1"},
    }
    for stage, shown in outputs.items():
        for label, name in shown.items():
            family = made.next()
            for rank in made.stages[stage]:
                sketch.output(rank, family, f"{label}_{rank % tp}", made.made[name][rank])
    for stage, name, shape in ((0, "w0", (inner, HIDDEN)), (1, "w1", (HIDDEN, own))):
        family = made.next()
        for rank in made.stages[stage]:
            old = made.made[name][rank]
            gradient = made.made[f"d{name}"][rank]
            sketch.compute(rank, family, "sub", [old, gradient], [(shape, FLOAT)], inplace_of=old)
        made.end(stage)
    return made.build()


def train_reference(
    feeds: Mapping[str, np.ndarray], w0: np.ndarray, w1: np.ndarray
) -> dict[str, np.ndarray]:
    """One step of `train` on whole arrays; gradients and the new variables by name."""
    c = feeds["scale"] * 2
    h = feeds["x"] @ w0
    y = h @ w1 * c
    dw1 = h.T @ (y * c)
    dw0 = feeds["x"].T @ ((y * c) @ w1.T)
    return {"y": y, "dw0": dw0, "dw1": dw1, "w0": w0 - dw0, "w1": w1 - dw1}


def accumulation(
    kind: str, microbatches: int, merged: bool = True, attrs: dict | None = None, count: int = 1
) -> dict[int, Plan]:
    """One rank: each micro-batch of x goes through an op; the pieces y and their sum are reported.

    Forward and backward are one segment, or two slots after each other.
    """
    sketch = Sketch(1, microbatches=microbatches)
    kinds = (
        [SegmentKind.FORWARD_BACKWARD] if merged else [SegmentKind.FORWARD, SegmentKind.BACKWARD]
    )
    segments = [Segment(kind, 0) for kind in kinds]
    sketch.begin(0, segments[0])
    x = sketch.input(0, 0, "x", (ROWS * microbatches, 3), region=((0, ROWS), (0, 3)), count=count)
    (y,) = sketch.compute(0, 1, kind, [x], [((ROWS, 3), FLOAT)], attrs=attrs, name="the_op")
    if not merged:
        sketch.step_end(0, 2)
        sketch.begin(0, segments[1])
    (pieces,) = sketch.compute(
        0,
        3,
        "collect_pieces",
        [y],
        [((ROWS * microbatches, 3), FLOAT)],
        attrs={"axis": 0},
        once=True,
    )
    (total,) = sketch.compute(
        0, 4, "accumulate", [y], [((ROWS, 3), FLOAT)], attrs={"reduction": "sum"}, once=True
    )
    sketch.step_end(0, 5)
    sketch.begin(0, EPILOGUE)
    sketch.output(0, 6, "y", pieces)
    sketch.output(0, 7, "total", total)
    sketch.step_end(0, 8)
    work = [(segment, m) for m in range(microbatches) for segment in segments]
    sketch.follow(0, [*work, (EPILOGUE, 0)])
    return sketch.build()


# --- random plans ---------------------------------------------------------------------------------


def random_pipeline(seed: int) -> dict[int, Plan]:
    """A random legal world: a rank per stage, values that go forward and come back by copies,
    registers carried over several segments, accumulated and per-step ones, on all streams.

    Registers have as many slots as the slots of the step make necessary, and sometimes more.
    """
    return _RandomPipeline(random.Random(seed)).build()


class _RandomPipeline:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.stages = rng.randint(1, 3)
        self.microbatches = rng.randint(2, 5)
        schedule = rng.choice(["gpipe", "1f1b", "zero_bubble", "interleaved"])
        chunks = self.stages
        if schedule == "interleaved":
            chunks, self.microbatches = 2 * self.stages, 2 * self.stages
        self.pipeline = Pipeline(schedule, self.microbatches, self.stages, chunks)
        self.sketch = Sketch(self.stages, microbatches=self.microbatches)
        self.slots = [
            stage_slots(schedule, self.microbatches, self.stages, stage, chunks)
            for stage in range(self.stages)
        ]
        self.once: list[list[int]] = [[] for _ in range(self.stages)]
        """Registers with one value per step that are complete."""
        self.each: list[list[int]] = [[] for _ in range(self.stages)]
        self.collected: list[list[int]] = [[] for _ in range(self.stages)]
        self.home: dict[int, Segment] = {}
        self.last: dict[int, Segment] = {}
        """Register → segment of its last reader."""
        self.family = 0

    def build(self) -> dict[int, Plan]:
        for segment in self.pipeline.segments:
            per_step = not segment.kind.per_microbatch
            ranks = range(self.stages) if per_step else [segment.chunk % self.stages]
            for rank in ranks:
                self.sketch.begin(rank, segment)
                if segment.kind is SegmentKind.EPILOGUE:
                    self.once[rank] += self.collected[rank]
                self.add(rank, "input")
            for _ in range(self.rng.randint(1, 6)):
                rank = self.rng.choice(list(ranks))
                self.add(
                    rank, self.rng.choice(["compute", "compute", "copy", "collect", "control"])
                )
            for rank in ranks:
                self.family += 1
                self.sketch.step_end(rank, self.family)
        for rank in range(self.stages):
            self.sketch.follow(rank, self.slots[rank])
            self._give_slots(rank)
        return self.sketch.build()

    def add(self, rank: int, kind: str) -> None:
        segment = self.sketch.ranks[rank].segment
        each = segment.kind.per_microbatch
        self.family += 1
        stream = self.rng.choice([Stream.COMPUTE, Stream.COLLECTIVE, Stream.DATA, Stream.COPY])
        made = None
        if kind == "input":
            made = self._task(rank, "input", (), stream=stream)
        elif kind == "compute":
            known = [*self.once[rank], *(self.each[rank] if each else ())]
            inputs = [self.rng.choice(known) for _ in range(self.rng.randint(1, 3))]
            made = self._task(rank, "add", inputs, stream=stream)
        elif kind == "collect" and each:
            inputs = [self.rng.choice(self.each[rank])]
            self.collected[rank] += self._task(rank, "accumulate", inputs, stream=stream, once=True)
        elif kind == "copy":
            source = self._copy_source(rank, segment)
            if source is not None:
                made = (self.sketch.copy(rank, self.family, source),)
        elif kind == "control":
            self._control(rank)
        if made is not None:
            (register,) = made
            each_value = each and self.sketch.pieces[register] >= 0
            (self.each if each_value else self.once)[rank].append(register)
            self.home[register] = segment

    def _task(self, rank: int, kind: str, inputs: Sequence[int], **options) -> tuple[int, ...]:
        segment = self.sketch.ranks[rank].segment
        made = self.sketch.compute(rank, self.family, kind, inputs, [((2,), FLOAT)], **options)
        for register in inputs:
            self.last[register] = segment
        return made

    def _copy_source(self, rank: int, segment: Segment) -> int | None:
        """A register of a neighbour that can be complete by now."""
        before = {SegmentKind.FORWARD: -1, SegmentKind.BACKWARD: 1}
        if segment.kind in before and self.stages > 1:
            chunk = segment.chunk + before[segment.kind]
            neighbour = Segment(segment.kind, chunk)
            source = [one for one in self.each[chunk % self.stages] if self.home[one] == neighbour]
        elif not segment.kind.per_microbatch and self.stages > 1:
            other = self.rng.choice([one for one in range(self.stages) if one != rank])
            source = self.once[other]
        else:
            source = []
        return self.rng.choice(source) if source else None

    def _control(self, rank: int) -> None:
        """Let a task of the current segment wait for an earlier one where that is possible."""
        state = self.sketch.ranks[rank]
        current = len(state.segments) - 1
        later = [task for task in state.tasks if task.segment == current]
        if not later:
            return
        after = self.rng.choice(later)
        before = self.rng.choice(state.tasks[: state.tasks.index(after)] or [after])
        per_microbatch = [
            state.segments[one.segment].kind.per_microbatch for one in (before, after)
        ]
        crosses = all(per_microbatch) and before.segment != after.segment
        known = state.registers.get(pack_register_id(*unpack_id(before.id)[:2], 0, CONTROL_SLOT))
        fits = known is None or known.per_microbatch == all(per_microbatch)
        if before is not after and fits and not crosses:
            families = [unpack_id(one.id).family for one in (before, after)]
            self.sketch.control(rank, *families)

    def _give_slots(self, rank: int) -> None:
        registers = self.sketch.ranks[rank].registers
        for register, described in list(registers.items()):
            if described.per_microbatch and not described.is_control:
                home = self.home[register]
                need = alive(self.slots[rank], home, self.last.get(register, home))
                count = need + self.rng.choice([0, 0, 1])
                registers[register] = replace(described, register_count=count)
