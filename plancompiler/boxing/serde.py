"""Boxing task graphs and rank slices as bytes, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from plancompiler.boxing.graph import (
    BoxingTaskGraph,
    FamilyOutput,
    PlacedGraph,
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
from plancompiler.plan.serde import STREAMS
from plancompiler.proto import boxing_task_graph_pb2 as graph_pb2

Graph = TypeVar("Graph", bound=PlacedGraph)
_Message = graph_pb2.BoxingTaskGraph | graph_pb2.RankSlice
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
    stream=coded(STREAMS),
)


def graph_to_bytes(graph: BoxingTaskGraph) -> bytes:
    """A boxing task graph as a frame of the wire format."""
    return _to_bytes(MessageKind.BOXING_TASK_GRAPH, graph_pb2.BoxingTaskGraph(), graph)


def graph_from_bytes(data: bytes) -> BoxingTaskGraph:
    """The boxing task graph in a frame; anything else is a WireFormatError."""
    message = graph_pb2.BoxingTaskGraph()
    return _from_bytes(MessageKind.BOXING_TASK_GRAPH, message, BoxingTaskGraph, data)


def slice_to_bytes(rank_slice: RankSlice) -> bytes:
    """A rank's slice as a frame of the wire format."""
    return _to_bytes(MessageKind.RANK_SLICE, graph_pb2.RankSlice(), rank_slice)


def slice_from_bytes(data: bytes) -> RankSlice:
    """The slice in a frame; anything else is a WireFormatError."""
    return _from_bytes(MessageKind.RANK_SLICE, graph_pb2.RankSlice(), RankSlice, data)


def _to_bytes(kind: MessageKind, message: _Message, graph: PlacedGraph) -> bytes:
    with writing(kind):
        _write(message.body, graph)
    return seal(kind, message)


def _from_bytes(kind: MessageKind, message: _Message, cls: type[Graph], data: bytes) -> Graph:
    unseal(kind, data, message)
    with reading(kind):
        body = message.body
        return cls(body.job_name, body.seed, body.world_size, *_read(body, len(data)))


def _write(body: graph_pb2.PlacedGraph, graph: PlacedGraph) -> None:
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
    graph: PlacedGraph,
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
    sbps = [sbp.entries[0] for sbp in pick(tables.sbps, body.micro_sbp[:])]
    operands = _operands(sbps, body.micro_inputs, body.micro_outputs)
    places = build(Micro, body.micro_segment[:], *operands)
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
    sbps = pick(tables.sbps, body.signature_sbp[:])
    return build(NdSignature, *_operands(sbps, body.signature_inputs, body.signature_outputs))


def _operands(
    sbps: Sequence[Any], inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Inputs and outputs of each of so many of them, which lie one after another."""
    operands = split(sbps, [count for pair in zip(inputs, outputs, strict=True) for count in pair])
    return operands[::2], operands[1::2]


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
