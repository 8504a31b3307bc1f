"""One object of each wire kind in which every field and every enum member occurs."""

from __future__ import annotations

from dataclasses import replace

from plancompiler.boxing.graph import (
    BoxingTaskGraph,
    FamilyOutput,
    PlacedOp,
    RankSlice,
    TaskFamily,
    TensorLayout,
    Transfer,
)
from plancompiler.ir import (
    BROADCAST,
    DType,
    Job,
    Micro,
    NdSbp,
    Op,
    Origin,
    Partial,
    Phase,
    Placement,
    Reduction,
    SourceLine,
    Split,
    Value,
    freeze_attrs,
)
from plancompiler.ir.pipeline import Pipeline, Segment, SegmentKind, Slot
from plancompiler.ir.task import Primitive, TaskKind, pack_register_id
from plancompiler.ops.rule import NdSignature
from plancompiler.passes import Config
from plancompiler.plan.plan import (
    Block,
    CollectiveSpec,
    Communicator,
    ComputeSpec,
    CopySpec,
    OutputDesc,
    Piece,
    Plan,
    RegisterDesc,
    RemoteRegister,
    SliceSpec,
    Stream,
    Task,
    TaskSpec,
    VariableDesc,
)

MESH = Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
OTHER = Placement("cuda", [7, 5, 4, 9])
SBPS = [
    NdSbp.of(["S(0)", "B"]),
    NdSbp.of(["B", "P"]),
    *(NdSbp.of([f"P({each})", "S(3)"]) for each in Reduction if each is not Reduction.SUM),
]
ATTRS = freeze_attrs(
    {
        "yes": True,
        "no": False,
        "int": -3,
        "big": (1 << 63) - 1,
        "small": -(1 << 63),
        "float": 0.1,
        "zero": -0.0,
        "inf": float("inf"),
        "text": "π \n",
        "empty": (),
        "ints": (1, -2, 3),
        "floats": (1.0, 2.5),
        "texts": ("a", ""),
        "mixed": (1, 1.0, True, "1"),
    }
)
SOURCE = SourceLine("model.py", 12)
CONFIG = Config(
    passes=("zero", "sequence_parallel", "recompute", "mixed_precision", "microbatch"),
    zero=3,
    prefetch=2,
    schedule="1f1b",
    microbatches=2,
    fuse_bytes=1,
    streams="one",
    recompute="auto",
    memory_bytes=1,
    precision="float16",
    loss_scale=256,
    loss_scale_steps=7,
    sequence_parallel=True,
    dp_axes=("x", "y"),
    machine="h200-sxm",
    layout="auto",
    tp_axes=("z",),
)


PIPELINE = Pipeline("zero_bubble", 6, 2, 2)


def sample_job() -> Job:
    """Ops with every dtype, with and without SBP, and with every kind of attribute."""
    values = [
        Value(f"v{index}", (index, 4), dtype, MESH if index % 2 else OTHER)
        for index, dtype in enumerate(DType)
    ]
    ops = [
        Op("first", "input", (), tuple(values), ATTRS, MESH, SBPS[0], SOURCE),
        Op("second", "add", tuple(values[:2]), (), (), OTHER),
        *(
            Op(f"of {phase}", "x", (), (), (), MESH, origin=Origin(phase, "blocks.0", True, 2))
            for phase in Phase
        ),
        *(
            Op(f"op{index}", "x", (values[0], values[0]), (), (), MESH, sbp, SOURCE)
            for index, sbp in enumerate(SBPS)
        ),
    ]
    return Job("a job", tuple(ops), -5, CONFIG)


def _graph_parts() -> tuple[tuple[PlacedOp, ...], tuple[TaskFamily, ...]]:
    signatures = [
        NdSignature((SBPS[0], SBPS[1]), (SBPS[2],)),
        NdSignature((), ()),
        NdSignature((SBPS[0], SBPS[1]), (SBPS[2],)),
    ]
    overs = [BROADCAST, Split(1), *(Partial(each) for each in Reduction)]
    placed = tuple(
        PlacedOp(
            replace(
                op,
                micro=Micro(
                    index % len(PIPELINE.segments),
                    tuple(overs[number % len(overs)] for number in range(len(op.inputs))),
                    tuple(overs[number % len(overs)] for number in range(len(op.outputs))),
                ),
            ),
            signatures[index % 3],
            10 + index,
            (FamilyOutput(index, 2),) * (index % 3),
        )
        for index, op in enumerate(sample_job().ops)
    )
    layout = TensorLayout((2, 3), DType.FLOAT16, SBPS[0])
    families = [
        TaskFamily(index, kind, f"family{index}", MESH, (FamilyOutput(1, index),), (layout,))
        for index, kind in enumerate(TaskKind)
    ]
    families += [
        TaskFamily(
            100 + index,
            TaskKind.COLLECTIVE_BOXING,
            "transport",
            OTHER,
            (),
            (layout, TensorLayout((), dtype, SBPS[1])),
            Transfer(primitive, (0, 1), reduction, 3, 2, OTHER, SBPS[1], late=True, stream=stream),
            SOURCE,
            segment=index % 4,
            per_microbatch=True,
        )
        for index, (primitive, reduction, dtype, stream) in enumerate(
            zip(
                Primitive,
                [*Reduction, None, None, None],
                list(DType)[: len(Primitive)],
                [*Stream, Stream.COPY],
                strict=True,
            )
        )
    ]
    families.append(
        TaskFamily(200, TaskKind.COPY_COMM_NET, "c", MESH, (), (), Transfer(Primitive.COPY))
    )
    return placed, tuple(families)


def sample_graph() -> BoxingTaskGraph:
    """Families of every task kind, transfers of every primitive and reduction."""
    return BoxingTaskGraph("graph", 1 << 40, 10, *_graph_parts(), PIPELINE)


def sample_slice() -> RankSlice:
    """The same parts as a slice."""
    return RankSlice("slice", -1, 3, *_graph_parts(), PIPELINE)


def _specs() -> list[TaskSpec]:
    box = ((0, 2), (1, 5))
    return [
        None,
        ComputeSpec("matmul", ATTRS, ((2, 3), ()), ((4,),), (box, ()), (box,)),
        ComputeSpec("fill", (), (), (), (), ()),
        ComputeSpec("attention", (), ((2,),), ((2,),), (box,), (box,), communicator=1, lanes=2),
        ComputeSpec("add", (), ((4,), ()), ((4,),), (((0, 2),), ()), (((0, 2),),), (0, -1), (0,)),
        *(CollectiveSpec(each, 1, Reduction.MAX, 2, 3) for each in Primitive),
        *(CollectiveSpec(Primitive.ALL_REDUCE, 0, each) for each in Reduction),
        CopySpec(box),
        SliceSpec(Reduction.PROD, (Piece(0, box, box), Piece(1, (), ()))),
        SliceSpec(None, ()),
    ]


def sample_plan() -> Plan:
    """Tasks of every kind, stream and spec; registers and the rest with every field set."""
    rank = 9
    own = [pack_register_id(rank, family, family % 3, family % 2) for family in range(40)]
    far = pack_register_id(2, 5, 1)
    kinds, streams, specs = list(TaskKind), list(Stream), _specs()
    tasks = tuple(
        Task(
            own[index],
            kinds[index % len(kinds)],
            streams[index % len(streams)],
            f"task{index}",
            (own[0], far),
            (own[index],),
            specs[index % len(specs)],
            (own[1],) * (index % 2),
            (own[2],) * (index % 3),
            SOURCE,
            index % 7,
        )
        for index in range(max(len(kinds), len(specs)))
    )
    registers = tuple(
        RegisterDesc(
            own[index],
            f"value{index}",
            (index, 2),
            dtype,
            SBPS[index % len(SBPS)],
            own[3],
            (own[4], far),
            index - 1,
            64 * index,
            128,
            1 + index,
            own[5] if index % 2 else -1,
            far if index % 3 else -1,
            index % 2 == 0,
            index % 3 == 0,
        )
        for index, dtype in enumerate(DType)
    )
    return Plan(
        job="plan",
        rank=rank,
        world_size=10,
        seed=-7,
        tasks=tasks,
        registers=registers,
        remote_registers=(
            RemoteRegister(far, own[6], "far", (3,), DType.INT64, far, (own[7], own[8]), True),
        ),
        blocks=(
            Block(0, "arena", True, 1 << 40),
            Block(1, "variables", False, 0, "cuda"),
        ),
        communicators=(
            Communicator((2, 9), (3, 4, 5)),
            Communicator((9,), (), Stream.GRADIENT),
        ),
        variables=(
            VariableDesc(
                "w", own[9], (4, 4), DType.FLOAT64, OTHER, NdSbp.of("S(0)"), ((0, 2), (0, 4)), ATTRS
            ),
        ),
        outputs=(OutputDesc("loss", own[10], own[11]),),
        peak_live_bytes=123456789,
        schedule="1f1b",
        microbatches=3,
        segments=tuple(Segment(kind, index - 1) for index, kind in enumerate(SegmentKind)),
        slots=(Slot(0, 0), Slot(6, 2), Slot(1, (1 << 32) - 1)),
    )


def empty_plan() -> Plan:
    """A rank without work."""
    return Plan("", 0, 1, 0, (), (), (), (), (), (), ())
