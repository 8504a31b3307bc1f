"""Plans as bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plancompiler.ir.pipeline import Segment, SegmentKind, Slot
from plancompiler.ir.task import pack_register_id
from plancompiler.ir.wire import (
    DTYPES,
    PRIMITIVES,
    REDUCTIONS,
    TASK_KINDS,
    Codes,
    MessageKind,
    TableReader,
    TableWriter,
    build,
    flatten,
    pick,
    reading,
    seal,
    split,
    unseal,
    writing,
)
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
from plancompiler.proto import plan_pb2

STREAMS = Codes(Stream)
SEGMENT_KINDS = Codes(SegmentKind)
_SPEC_KINDS: dict[type, int] = {
    type(None): 0,
    ComputeSpec: 1,
    CollectiveSpec: 2,
    CopySpec: 3,
    SliceSpec: 4,
}


def plan_to_bytes(plan: Plan) -> bytes:
    """A plan as a frame of the wire format."""
    message = plan_pb2.Plan()
    with writing(MessageKind.PLAN):
        base = pack_register_id(plan.rank, 0)
        message.job = plan.job
        message.rank = plan.rank
        message.world_size = plan.world_size
        message.seed = plan.seed
        message.peak_live_bytes = plan.peak_live_bytes
        message.id_base = base
        tables = TableWriter()
        _write_tasks(message.tasks, tables, plan.tasks, base)
        _write_specs(message.tasks, tables, [task.spec for task in plan.tasks])
        _write_registers(message, tables, plan, base)
        _write_parts(message, tables, plan, base)
        _write_schedule(message, plan)
        tables.write(message.tables)
    return seal(MessageKind.PLAN, message)


def plan_from_bytes(data: bytes) -> Plan:
    """The plan in a frame; anything else is a WireFormatError."""
    message = plan_pb2.Plan()
    unseal(MessageKind.PLAN, data, message)
    with reading(MessageKind.PLAN):
        tables = TableReader(message.tables, len(data))
        base = message.id_base
        return Plan(
            job=message.job,
            rank=message.rank,
            world_size=message.world_size,
            seed=message.seed,
            tasks=_read_tasks(message.tasks, tables, base),
            registers=_read_registers(message.registers, tables, base),
            remote_registers=_read_remote_registers(message.remote_registers, tables, base),
            blocks=_read_blocks(message.blocks, tables),
            communicators=_read_communicators(message.communicators),
            variables=_read_variables(message.variables, tables, base),
            outputs=_read_outputs(message.outputs, tables, base),
            peak_live_bytes=message.peak_live_bytes,
            schedule=message.schedule,
            microbatches=message.microbatches,
            segments=_read_segments(message.segments),
            slots=tuple(
                build(Slot, message.segments.slot_segment[:], message.segments.slot_microbatch[:])
            ),
        )


def _absolute(column: Sequence[int], base: int) -> list[int]:
    return [each + base for each in column]


# --- writing --------------------------------------------------------------------------------------
# Generated stubs type an enum column by their own enum; it takes numbers: hence `arg-type` below.


def _write_tasks(
    message: plan_pb2.Tasks, tables: TableWriter, tasks: Sequence[Task], base: int
) -> None:
    message.id.extend([task.id - base for task in tasks])
    message.kind.extend(TASK_KINDS.encode(task.kind for task in tasks))  # type: ignore[arg-type]
    message.stream.extend(STREAMS.encode(task.stream for task in tasks))  # type: ignore[arg-type]
    message.name.extend([tables.strings[task.name] for task in tasks])
    message.inputs.extend([len(task.inputs) for task in tasks])
    message.outputs.extend([len(task.outputs) for task in tasks])
    message.controls_in.extend([len(task.controls_in) for task in tasks])
    message.controls_out.extend([len(task.controls_out) for task in tasks])
    message.input_register.extend([each - base for task in tasks for each in task.inputs])
    message.output_register.extend([each - base for task in tasks for each in task.outputs])
    message.control_in_register.extend([each - base for task in tasks for each in task.controls_in])
    message.control_out_register.extend(
        [each - base for task in tasks for each in task.controls_out]
    )
    message.source.extend([tables.source(task.source) for task in tasks])
    message.segment.extend([task.segment for task in tasks])


def _write_specs(message: plan_pb2.Tasks, tables: TableWriter, specs: Sequence[TaskSpec]) -> None:
    message.spec.extend([_SPEC_KINDS[type(spec)] for spec in specs])  # type: ignore[misc]
    compute = [spec for spec in specs if type(spec) is ComputeSpec]
    shapes, regions = tables.shapes, tables.regions
    message.compute_kind.extend([tables.strings[spec.kind] for spec in compute])
    message.compute_attrs.extend([tables.attrs(spec.attrs) for spec in compute])
    message.compute_inputs.extend([len(spec.input_shapes) for spec in compute])
    message.compute_outputs.extend([len(spec.output_shapes) for spec in compute])
    message.compute_input_shape.extend(
        [shapes[shape] for spec in compute for shape in spec.input_shapes]
    )
    message.compute_output_shape.extend(
        [shapes[shape] for spec in compute for shape in spec.output_shapes]
    )
    message.compute_input_regions.extend([len(spec.input_regions) for spec in compute])
    message.compute_output_regions.extend([len(spec.output_regions) for spec in compute])
    message.compute_input_region.extend(
        [regions[region] for spec in compute for region in spec.input_regions]
    )
    message.compute_output_region.extend(
        [regions[region] for spec in compute for region in spec.output_regions]
    )
    message.compute_input_pieces.extend([len(spec.input_pieces) for spec in compute])
    message.compute_output_pieces.extend([len(spec.output_pieces) for spec in compute])
    message.compute_input_piece.extend(flatten(spec.input_pieces for spec in compute))
    message.compute_output_piece.extend(flatten(spec.output_pieces for spec in compute))
    collective = [spec for spec in specs if type(spec) is CollectiveSpec]
    message.collective_primitive.extend(PRIMITIVES.encode(spec.primitive for spec in collective))  # type: ignore[arg-type]
    message.collective_communicator.extend([spec.communicator for spec in collective])
    message.collective_reduction.extend(REDUCTIONS.encode(spec.reduction for spec in collective))  # type: ignore[arg-type]
    message.collective_src_axis.extend([spec.src_axis for spec in collective])
    message.collective_dst_axis.extend([spec.dst_axis for spec in collective])
    message.copy_region.extend([regions[spec.region] for spec in specs if type(spec) is CopySpec])
    sliced = [spec for spec in specs if type(spec) is SliceSpec]
    pieces = flatten(spec.pieces for spec in sliced)
    message.slice_reduction.extend(REDUCTIONS.encode(spec.reduction for spec in sliced))  # type: ignore[arg-type]
    message.slice_pieces.extend([len(spec.pieces) for spec in sliced])
    message.piece_input.extend([piece.input for piece in pieces])
    message.piece_source.extend([regions[piece.source] for piece in pieces])
    message.piece_target.extend([regions[piece.target] for piece in pieces])


def _write_registers(message: plan_pb2.Plan, tables: TableWriter, plan: Plan, base: int) -> None:
    own, registers = message.registers, plan.registers
    strings, shapes = tables.strings, tables.shapes
    own.id.extend([each.id - base for each in registers])
    own.name.extend([strings[each.name] for each in registers])
    own.shape.extend([shapes[each.shape] for each in registers])
    own.dtype.extend(DTYPES.encode(each.dtype for each in registers))  # type: ignore[arg-type]
    own.sbp.extend([tables.sbp(each.sbp) for each in registers])
    own.producer.extend([each.producer - base for each in registers])
    own.consumers.extend([len(each.consumers) for each in registers])
    own.consumer.extend([one - base for each in registers for one in each.consumers])
    own.block.extend([each.block for each in registers])
    own.offset.extend([each.offset for each in registers])
    own.nbytes.extend([each.nbytes for each in registers])
    own.register_count.extend([each.register_count for each in registers])
    own.inplace_of.extend([each.inplace_of for each in registers])
    own.sync_id.extend([each.sync_id for each in registers])
    own.is_view.extend([each.is_view for each in registers])
    own.per_microbatch.extend([each.per_microbatch for each in registers])
    far, remote = message.remote_registers, plan.remote_registers
    far.id.extend([each.id - base for each in remote])
    far.sync_id.extend([each.sync_id for each in remote])
    far.name.extend([strings[each.name] for each in remote])
    far.shape.extend([shapes[each.shape] for each in remote])
    far.dtype.extend(DTYPES.encode(each.dtype for each in remote))  # type: ignore[arg-type]
    far.producer.extend([each.producer - base for each in remote])
    far.consumers.extend([len(each.consumers) for each in remote])
    far.consumer.extend([one - base for each in remote for one in each.consumers])
    far.per_microbatch.extend([each.per_microbatch for each in remote])


def _write_parts(message: plan_pb2.Plan, tables: TableWriter, plan: Plan, base: int) -> None:
    strings = tables.strings
    blocks, groups = message.blocks, message.communicators
    blocks.index.extend([block.index for block in plan.blocks])
    blocks.purpose.extend([strings[block.purpose] for block in plan.blocks])
    blocks.shared.extend([block.shared for block in plan.blocks])
    blocks.nbytes.extend([block.nbytes for block in plan.blocks])
    blocks.device.extend([strings[block.device] for block in plan.blocks])
    groups.ranks.extend([len(group.ranks) for group in plan.communicators])
    groups.rank.extend(flatten(group.ranks for group in plan.communicators))
    groups.families.extend([len(group.families) for group in plan.communicators])
    groups.family.extend(flatten(group.families for group in plan.communicators))
    variables, outputs = message.variables, message.outputs
    variables.name.extend([strings[each.name] for each in plan.variables])
    variables.register.extend([each.register - base for each in plan.variables])
    variables.shape.extend([tables.shapes[each.shape] for each in plan.variables])
    variables.dtype.extend(DTYPES.encode(each.dtype for each in plan.variables))  # type: ignore[arg-type]
    variables.placement.extend([tables.placements[each.placement] for each in plan.variables])
    variables.sbp.extend([tables.sbp(each.sbp) for each in plan.variables])
    variables.region.extend([tables.regions[each.region] for each in plan.variables])
    variables.attrs.extend([tables.attrs(each.attrs) for each in plan.variables])
    outputs.name.extend([strings[each.name] for each in plan.outputs])
    outputs.task.extend([each.task - base for each in plan.outputs])
    outputs.register.extend([each.register - base for each in plan.outputs])


def _write_schedule(message: plan_pb2.Plan, plan: Plan) -> None:
    message.schedule = plan.schedule
    message.microbatches = plan.microbatches
    segments = message.segments
    segments.kind.extend(SEGMENT_KINDS.encode(each.kind for each in plan.segments))  # type: ignore[arg-type]
    segments.chunk.extend([each.chunk for each in plan.segments])
    segments.slot_segment.extend([slot.segment for slot in plan.slots])
    segments.slot_microbatch.extend([slot.microbatch for slot in plan.slots])


# --- reading --------------------------------------------------------------------------------------


def _read_tasks(message: plan_pb2.Tasks, tables: TableReader, base: int) -> tuple[Task, ...]:
    return tuple(
        build(
            Task,
            _absolute(message.id[:], base),
            TASK_KINDS.decode(message.kind[:]),
            STREAMS.decode(message.stream[:]),
            pick(tables.strings, message.name[:]),
            split(_absolute(message.input_register[:], base), message.inputs[:]),
            split(_absolute(message.output_register[:], base), message.outputs[:]),
            _read_specs(message, tables),
            split(_absolute(message.control_in_register[:], base), message.controls_in[:]),
            split(_absolute(message.control_out_register[:], base), message.controls_out[:]),
            pick(tables.sources, message.source[:]),
            message.segment[:],
        )
    )


def _read_specs(message: plan_pb2.Tasks, tables: TableReader) -> list[TaskSpec]:
    shapes, regions = tables.shapes, tables.regions
    compute = build(
        ComputeSpec,
        pick(tables.strings, message.compute_kind[:]),
        pick(tables.attr_sets, message.compute_attrs[:]),
        split(pick(shapes, message.compute_input_shape[:]), message.compute_inputs[:]),
        split(pick(shapes, message.compute_output_shape[:]), message.compute_outputs[:]),
        split(pick(regions, message.compute_input_region[:]), message.compute_input_regions[:]),
        split(pick(regions, message.compute_output_region[:]), message.compute_output_regions[:]),
        split(message.compute_input_piece[:], message.compute_input_pieces[:]),
        split(message.compute_output_piece[:], message.compute_output_pieces[:]),
    )
    collective = build(
        CollectiveSpec,
        PRIMITIVES.decode(message.collective_primitive[:]),
        message.collective_communicator[:],
        REDUCTIONS.decode_optional(message.collective_reduction[:]),
        message.collective_src_axis[:],
        message.collective_dst_axis[:],
    )
    copies = build(CopySpec, pick(regions, message.copy_region[:]))
    pieces = build(
        Piece,
        message.piece_input[:],
        pick(regions, message.piece_source[:]),
        pick(regions, message.piece_target[:]),
    )
    sliced = build(
        SliceSpec,
        REDUCTIONS.decode_optional(message.slice_reduction[:]),
        split(pieces, message.slice_pieces[:]),
    )
    columns: list[list[Any]] = [compute, collective, copies, sliced]
    kinds: list[int] = message.spec[:]  # type: ignore[assignment]  # enum members are ints
    if any(kinds.count(kind) != len(column) for kind, column in enumerate(columns, start=1)):
        raise ValueError("specs do not fit their tasks")
    sources = [None, *map(iter, columns)]
    return [None if source is None else next(source) for source in pick(sources, kinds)]


def _read_registers(
    message: plan_pb2.Registers, tables: TableReader, base: int
) -> tuple[RegisterDesc, ...]:
    return tuple(
        build(
            RegisterDesc,
            _absolute(message.id[:], base),
            pick(tables.strings, message.name[:]),
            pick(tables.shapes, message.shape[:]),
            DTYPES.decode(message.dtype[:]),
            pick(tables.sbps, message.sbp[:]),
            _absolute(message.producer[:], base),
            split(_absolute(message.consumer[:], base), message.consumers[:]),
            message.block[:],
            message.offset[:],
            message.nbytes[:],
            message.register_count[:],
            message.inplace_of[:],
            message.sync_id[:],
            message.is_view[:],
            message.per_microbatch[:],
        )
    )


def _read_remote_registers(
    message: plan_pb2.RemoteRegisters, tables: TableReader, base: int
) -> tuple[RemoteRegister, ...]:
    return tuple(
        build(
            RemoteRegister,
            _absolute(message.id[:], base),
            message.sync_id[:],
            pick(tables.strings, message.name[:]),
            pick(tables.shapes, message.shape[:]),
            DTYPES.decode(message.dtype[:]),
            _absolute(message.producer[:], base),
            split(_absolute(message.consumer[:], base), message.consumers[:]),
            message.per_microbatch[:],
        )
    )


def _read_segments(message: plan_pb2.Segments) -> tuple[Segment, ...]:
    return tuple(build(Segment, SEGMENT_KINDS.decode(message.kind[:]), message.chunk[:]))


def _read_blocks(message: plan_pb2.Blocks, tables: TableReader) -> tuple[Block, ...]:
    purposes = pick(tables.strings, message.purpose[:])
    devices = pick(tables.strings, message.device[:])
    return tuple(
        build(Block, message.index[:], purposes, message.shared[:], message.nbytes[:], devices)
    )


def _read_communicators(message: plan_pb2.Communicators) -> tuple[Communicator, ...]:
    return tuple(
        build(
            Communicator,
            split(message.rank[:], message.ranks[:]),
            split(message.family[:], message.families[:]),
        )
    )


def _read_variables(
    message: plan_pb2.Variables, tables: TableReader, base: int
) -> tuple[VariableDesc, ...]:
    return tuple(
        build(
            VariableDesc,
            pick(tables.strings, message.name[:]),
            _absolute(message.register[:], base),
            pick(tables.shapes, message.shape[:]),
            DTYPES.decode(message.dtype[:]),
            pick(tables.placements, message.placement[:]),
            pick(tables.sbps, message.sbp[:]),
            pick(tables.regions, message.region[:]),
            pick(tables.attr_sets, message.attrs[:]),
        )
    )


def _read_outputs(
    message: plan_pb2.Outputs, tables: TableReader, base: int
) -> tuple[OutputDesc, ...]:
    return tuple(
        build(
            OutputDesc,
            pick(tables.strings, message.name[:]),
            _absolute(message.task[:], base),
            _absolute(message.register[:], base),
        )
    )
