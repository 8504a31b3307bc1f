"""Boxing task graphs and rank slices as bytes, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from plancompiler.boxing.graph import (
    BoxingTaskGraph,
    FamilyOutput,
    PlacedOp,
    RankSlice,
    TaskFamily,
    TensorLayout,
    Transfer,
)
from plancompiler.boxing.slices import Slicer
from plancompiler.ir import Micro, NdSbp
from plancompiler.ir.columns import (
    DTYPE,
    FLAG,
    GIVEN,
    OPTIONAL_PLACEMENT,
    OPTIONAL_SBP,
    PLACEMENT,
    PLAIN,
    SBP,
    SHAPE,
    SOURCE,
    STRING,
    Columns,
    Ragged,
    coded,
)
from plancompiler.ir.pipeline import Pipeline
from plancompiler.ir.wire import (
    PRIMITIVES,
    REDUCTIONS,
    TASK_KINDS,
    MessageKind,
    TableReader,
    TableWriter,
    build,
    pick,
    pick_optional,
    reading,
    seal,
    split,
    unseal,
    writing,
)
from plancompiler.ir.wire_ops import read_ops, write_ops
from plancompiler.ops.rule import NdSignature
from plancompiler.proto import boxing_task_graph_pb2 as graph_pb2

_PLACED = Columns(
    PlacedOp,
    "op_",
    op=GIVEN,
    signature=GIVEN,
    inputs=("sources", Ragged(Columns(FamilyOutput, "op_source_"))),
)
_FAMILIES = Columns(
    TaskFamily,
    "family_",
    kind=coded(TASK_KINDS),
    name=STRING,
    placement=PLACEMENT,
    inputs=Ragged(Columns(FamilyOutput, "family_input_")),
    outputs=Ragged(Columns(TensorLayout, "family_output_", shape=SHAPE, dtype=DTYPE, sbp=SBP)),
    transfer=GIVEN,
    source=SOURCE,
    segment=GIVEN,
    per_microbatch=GIVEN,
)
_TRANSFERS = Columns(
    Transfer,
    "transfer_",
    primitive=coded(PRIMITIVES),
    mesh_axes=Ragged(PLAIN, "transfer_mesh_axis"),
    reduction=coded(REDUCTIONS, optional=True),
    src_placement=OPTIONAL_PLACEMENT,
    src_sbp=OPTIONAL_SBP,
    late=FLAG,
)


def graph_to_bytes(graph: BoxingTaskGraph) -> bytes:
    """A boxing task graph as a frame of the wire format."""
    message = graph_pb2.BoxingTaskGraph()
    with writing(MessageKind.BOXING_TASK_GRAPH):
        _write(message.body, graph)
    return seal(MessageKind.BOXING_TASK_GRAPH, message)


def graph_from_bytes(data: bytes) -> BoxingTaskGraph:
    """The boxing task graph in a frame; anything else is a WireFormatError."""
    message = graph_pb2.BoxingTaskGraph()
    unseal(MessageKind.BOXING_TASK_GRAPH, data, message)
    with reading(MessageKind.BOXING_TASK_GRAPH):
        body = message.body
        ops, families, pipeline = _read(body, len(data))
        return BoxingTaskGraph(body.job_name, body.seed, body.world_size, ops, families, pipeline)


def slice_to_bytes(rank_slice: RankSlice) -> bytes:
    """A rank's slice as a frame of the wire format."""
    message = graph_pb2.RankSlice()
    with writing(MessageKind.RANK_SLICE):
        _write(message.body, rank_slice)
    return seal(MessageKind.RANK_SLICE, message)


def slice_from_bytes(data: bytes) -> RankSlice:
    """The slice in a frame; anything else is a WireFormatError."""
    message = graph_pb2.RankSlice()
    unseal(MessageKind.RANK_SLICE, data, message)
    with reading(MessageKind.RANK_SLICE):
        body = message.body
        ops, families, pipeline = _read(body, len(data))
        return RankSlice(body.job_name, body.seed, body.world_size, ops, families, pipeline)


def _write(body: graph_pb2.PlacedGraph, graph: BoxingTaskGraph | RankSlice) -> None:
    body.job_name = graph.job_name
    body.seed = graph.seed
    body.world_size = graph.world_size
    tables = TableWriter()
    placed = graph.ops
    write_ops(body.ops, tables, [each.op for each in placed])
    _PLACED.write(body, placed, tables)
    _write_signatures(body, tables, [each.signature for each in placed])
    transfers = [family.transfer for family in graph.families if family.transfer is not None]
    _FAMILIES.write(body, graph.families, tables)
    body.family_transfers.extend([int(each.transfer is not None) for each in graph.families])
    _TRANSFERS.write(body, transfers, tables)
    if graph.pipeline is not None:
        _write_pipeline(body, tables, graph, graph.pipeline)
    tables.write(body.tables)


def _write_pipeline(
    body: graph_pb2.PlacedGraph,
    tables: TableWriter,
    graph: BoxingTaskGraph | RankSlice,
    pipeline: Pipeline,
) -> None:
    body.schedule = pipeline.schedule
    body.microbatches = pipeline.microbatches
    body.stages = pipeline.stages
    body.chunks = pipeline.chunks
    distinct: dict[Micro, int] = {}
    body.op_micro.extend(
        [
            0 if each.op.micro is None else 1 + distinct.setdefault(each.op.micro, len(distinct))
            for each in graph.ops
        ]
    )
    body.micro_segment.extend([micro.segment for micro in distinct])
    body.micro_inputs.extend([len(micro.inputs) for micro in distinct])
    body.micro_outputs.extend([len(micro.outputs) for micro in distinct])
    body.micro_sbp.extend(
        [tables.sbp(NdSbp((sbp,))) for micro in distinct for sbp in (*micro.inputs, *micro.outputs)]
    )
    body.family_segment.extend([family.segment for family in graph.families])
    body.family_per_microbatch.extend([int(family.per_microbatch) for family in graph.families])


def _read_pipeline(body: graph_pb2.PlacedGraph) -> Pipeline | None:
    if not body.schedule:
        return None
    pipeline = Pipeline(body.schedule, body.microbatches, body.stages, body.chunks)
    pipeline.check()
    return pipeline


def _read_micros(body: graph_pb2.PlacedGraph, tables: TableReader) -> list[Micro | None]:
    counts = [
        count for pair in zip(body.micro_inputs, body.micro_outputs, strict=True) for count in pair
    ]
    sbps = [sbp.entries[0] for sbp in pick(tables.sbps, body.micro_sbp[:])]
    operands = split(sbps, counts)
    places = build(Micro, body.micro_segment[:], operands[::2], operands[1::2])
    return pick_optional(places, body.op_micro[:])


def _write_signatures(
    body: graph_pb2.PlacedGraph, tables: TableWriter, signatures: Sequence[NdSignature]
) -> None:
    distinct: dict[NdSignature, int] = {}
    body.op_signature.extend([distinct.setdefault(each, len(distinct)) for each in signatures])
    body.signature_inputs.extend([len(each.inputs) for each in distinct])
    body.signature_outputs.extend([len(each.outputs) for each in distinct])
    body.signature_sbp.extend(
        [tables.sbp(sbp) for each in distinct for sbp in (*each.inputs, *each.outputs)]
    )


def _read(
    body: graph_pb2.PlacedGraph, data_bytes: int
) -> tuple[tuple[PlacedOp, ...], tuple[TaskFamily, ...], Pipeline | None]:
    tables = TableReader(body.tables, data_bytes)
    pipeline = _read_pipeline(body)
    micros = None if pipeline is None else _read_micros(body, tables)
    ops = _PLACED.read(
        body,
        tables,
        op=read_ops(body.ops, tables, micros),
        signature=pick(_read_signatures(body, tables), body.op_signature[:]),
    )
    families = tuple(_read_families(body, tables))
    if pipeline is not None:
        _check_segments(pipeline, ops, families)
    return tuple(ops), families, pipeline


def _check_segments(
    pipeline: Pipeline, ops: Sequence[PlacedOp], families: Sequence[TaskFamily]
) -> None:
    """Segments are indices; columns of the wire are only numbers."""
    named = {family.segment for family in families}
    for placed in ops:
        micro = placed.op.micro
        if micro is None:
            raise ValueError("an op has no place among the micro-batches")
        named.add(micro.segment)
        if (len(micro.inputs), len(micro.outputs)) != (
            len(placed.op.inputs),
            len(placed.op.outputs),
        ):
            raise ValueError("an op's layouts over micro-batches do not fit its operands")
    if named and max(named) >= len(pipeline.segments):
        raise ValueError("a segment is not one of the pipeline's")


def _read_signatures(body: graph_pb2.PlacedGraph, tables: TableReader) -> list[NdSignature]:
    counts = [
        count
        for pair in zip(body.signature_inputs, body.signature_outputs, strict=True)
        for count in pair
    ]
    operands = split(pick(tables.sbps, body.signature_sbp[:]), counts)
    return build(NdSignature, operands[::2], operands[1::2])


def _read_families(body: graph_pb2.PlacedGraph, tables: TableReader) -> list[TaskFamily]:
    if sum(body.family_transfers) != len(body.transfer_primitive):
        raise ValueError("transfers do not fit their families")
    transfers = iter(_TRANSFERS.read(body, tables))
    given: dict[str, Sequence[Any]] = {
        "transfer": [next(transfers) if flag else None for flag in body.family_transfers]
    }
    if body.schedule:
        given["segment"] = body.family_segment[:]
        given["per_microbatch"] = list(map(bool, body.family_per_microbatch))
    return _FAMILIES.read(body, tables, **given)


def slices_by_rank(
    graph: BoxingTaskGraph, ranks: Iterable[int]
) -> tuple[dict[int, RankSlice], dict[int, bytes]]:
    """The slices of some ranks, and their wire forms; equal ones are one object."""
    slicer = Slicer(graph)
    slices = {rank: slicer.for_rank(rank) for rank in ranks}
    distinct = {id(each): each for each in slices.values()}
    data = {key: slice_to_bytes(each) for key, each in distinct.items()}
    return slices, {rank: data[id(each)] for rank, each in slices.items()}
