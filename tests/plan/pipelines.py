"""Small plans of several micro-batches written by hand: two stages, one rank each."""

from __future__ import annotations

from typing import Any

from plancompiler.ir import DType, Placement, Reduction
from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind, Slot, in_flight
from plancompiler.ir.task import Primitive, TaskKind, pack_register_id, pack_task_id
from plancompiler.plan.plan import (
    CollectiveSpec,
    Communicator,
    CopySpec,
    OutputDesc,
    Plan,
    RemoteRegister,
    Stream,
    VariableDesc,
)
from tests.plan.builder import VARIABLES, WHOLE, PlanBuilder, whole

HERE = {"t": 12, "d": 32}
"""Families of what crosses the stages: activations and their gradient."""
CROSSING_SLOTS = 2


def stage_plans(schedule: str, microbatches: int = 3) -> dict[int, Plan]:
    """Plans of both stages; with 1F1B the last one has one segment for forward and backward."""
    return {0: first_stage(schedule, microbatches), 1: last_stage(schedule, microbatches)}


def stage_builder(schedule: str, microbatches: int, rank: int) -> PlanBuilder:
    """A builder with the segments and slots of a stage."""
    pipeline = Pipeline(schedule, microbatches, 2, 2)
    both = schedule == "1f1b" and rank == 1
    kinds = [SegmentKind.FORWARD, SegmentKind.BACKWARD]
    if both:
        kinds = [SegmentKind.FORWARD_BACKWARD]
    segments = (
        Segment(SegmentKind.PROLOGUE),
        *(Segment(kind, rank) for kind in kinds),
        Segment(SegmentKind.EPILOGUE),
    )
    if both:
        slots = [Slot(0, 0), *(Slot(1, m) for m in range(microbatches)), Slot(2, 0)]
    else:
        named = [pipeline.segments[slot.segment] for slot in pipeline.slots(rank)]
        slots = [
            Slot(segments.index(segment), slot.microbatch)
            for segment, slot in zip(named, pipeline.slots(rank), strict=True)
        ]
    return PlanBuilder(
        rank,
        communicators=(Communicator((0, 1), (40,)),),
        schedule=schedule,
        microbatches=microbatches,
        segments=segments,
        slots=tuple(slots),
        scratch=64,
    )


def first_stage(schedule: str, microbatches: int = 3) -> Plan:
    """%x and %t go from forward to backward; %u and %e are forgotten within their segments."""
    build = stage_builder(schedule, microbatches, 0)
    alive = in_flight(build.slots, 1, 2)
    w = variable(build)
    build.end()
    build.segment = 1
    x = build.register(11, "x", (2, 4), register_count=alive + 1)
    build.compute(11, "x", (), (x,), op="input", kind=TaskKind.INPUT, stream=Stream.DATA)
    u = build.register(13, "u", (2, 4), offset=0)
    build.compute(13, "matmul", (x, w), (u,), op="matmul")
    t = build.register(12, "t", (2, 4), register_count=alive, **sent(0, "t"))
    build.compute(12, "relu", (u,), (t,))
    build.end()
    build.segment = 2
    d = receive(build, "d")
    e = build.register(33, "e", (2, 4), offset=0)
    build.compute(33, "relu_grad", (d, t), (e,), op="relu_grad")
    g = weight_gradient(build, x, e)
    build.end()
    build.segment = 3
    update(build, w, g)
    build.end()
    return build.build()


def last_stage(schedule: str, microbatches: int = 3) -> Plan:
    """%y is read in place by the loss; the loss is summed over the micro-batches."""
    build = stage_builder(schedule, microbatches, 1)
    backward = len(build.segments) - 2
    alive = in_flight(build.slots, 1, backward)
    w = variable(build)
    build.end()
    build.segment = 1
    c = receive(build, "t", register_count=alive)
    y = build.register(14, "y", (2, 4), register_count=alive)
    build.compute(14, "matmul", (c, w), (y,), op="matmul")
    v = build.register(15, "v", (2, 4), register_count=alive, inplace_of=y)
    build.compute(15, "relu", (y,), (v,))
    s = build.register(16, "s", ())
    build.axes[s] = -1
    build.compute(16, "sum", (v,), (s,), op="sum")
    loss = build.register(17, "loss", (), per_microbatch=False)
    build.compute(17, "add up", (s,), (loss,), op="accumulate")
    if backward > 1:
        build.end()
    build.segment = backward
    d = build.register(32, "d", (2, 4), register_count=CROSSING_SLOTS, **sent(1, "d"))
    build.compute(32, "matmul_grad", (v, w), (d,), op="matmul")
    g = weight_gradient(build, c, v)
    build.end()
    build.segment = backward + 1
    update(build, w, g)
    out = build.compute(43, "out", (loss,), kind=TaskKind.OUTPUT)
    build.outputs.append(OutputDesc("loss", out, loss))
    build.end()
    return build.build()


def variable(build: PlanBuilder) -> int:
    """The stage's weight, in the prologue."""
    w = build.register(1, "w", (4, 4), block=VARIABLES)
    build.compute(1, "w", (), (w,), op="variable", kind=TaskKind.VARIABLE)
    mesh = Placement("cpu", [build.rank])
    build.variables.append(
        VariableDesc("w", w, (4, 4), DType.FLOAT32, mesh, WHOLE, whole((4, 4)), ())
    )
    return w


def weight_gradient(build: PlanBuilder, activation: int, gradient: int) -> int:
    """The weight's gradient, summed over the micro-batches."""
    part = build.register(34, "part", (4, 4))
    build.axes[part] = -1
    build.compute(34, "contract", (activation, gradient), (part,), op="contract")
    g = build.register(35, "g", (4, 4), per_microbatch=False)
    build.compute(35, "accumulate", (part,), (g,), op="accumulate")
    return g


def update(build: PlanBuilder, w: int, g: int) -> None:
    """The weight's update, by a gradient that is summed over the stages."""
    r = build.register(40, "r", (4, 4))
    build.task(
        40,
        TaskKind.COLLECTIVE_BOXING,
        "all_reduce",
        (g,),
        (r,),
        CollectiveSpec(Primitive.ALL_REDUCE, 0, Reduction.SUM),
        stream=Stream.COLLECTIVE,
    )
    n = build.register(42, "w:next", (4, 4), block=VARIABLES, inplace_of=w)
    build.compute(42, "sgd", (w, r), (n,), op="sgd_update")


def sent(rank: int, name: str) -> dict[str, Any]:
    """What a register has that the other stage reads."""
    reader = pack_task_id(1 - rank, HERE[name] + 8, rank)
    return {"remote_consumers": (reader,), "sync_id": reader + 1}


def receive(build: PlanBuilder, name: str, **others: Any) -> int:
    """A copy of the other stage's register."""
    away, family = 1 - build.rank, HERE[name]
    here = pack_task_id(build.rank, family + 8, away)
    remote = RemoteRegister(
        id=pack_register_id(away, family),
        sync_id=here + 1,
        name=name,
        shape=(2, 4),
        dtype=DType.FLOAT32,
        producer=pack_task_id(away, family),
        consumers=(here,),
        per_microbatch=True,
    )
    build.remote_registers.append(remote)
    copy = build.register(family + 8, f"{name}:copy", (2, 4), lane=away, **others)
    build.task(
        family + 8,
        TaskKind.COPY_COMM_NET,
        f"{name} from rank {away}",
        (remote.id,),
        (copy,),
        CopySpec(whole((2, 4))),
        lane=away,
        stream=Stream.COPY,
    )
    return copy
