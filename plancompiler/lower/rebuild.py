"""From a rank's slice to its task graph.

Everything is derived: local shapes from layouts, ids from (rank, family, lane, slot), remote ends
of crossing registers from the exchange's arithmetic. No other rank is asked and no other rank is
built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from plancompiler.boxing.exchange import Exchange, SourcePiece, exchange_readers, exchange_sources
from plancompiler.boxing.graph import (
    FamilyOutput,
    PlacedOp,
    RankSlice,
    TaskFamily,
    TensorLayout,
    Transfer,
    task_kind_of,
)
from plancompiler.errors import VerifyError
from plancompiler.ir import (
    NdSbp,
    Op,
    Partial,
    Placement,
    Reduction,
    Sbp,
    SourceLine,
    Split,
    Value,
)
from plancompiler.ir.pipeline import WHOLE_STEP, Pipeline
from plancompiler.ir.shard import (
    Region,
    local_shape,
    piece_shape,
    region_shape,
    relative,
    shard_region,
)
from plancompiler.ir.task import (
    CROSSING,
    Primitive,
    TaskKind,
    format_id,
    pack_register_id,
    pack_task_id,
)
from plancompiler.lower.rank_task_graph import (
    HOST,
    RankRegister,
    RankTask,
    RankTaskGraph,
)
from plancompiler.ops.registry import op_def
from plancompiler.plan.plan import (
    CollectiveSpec,
    Communicator,
    ComputeSpec,
    CopySpec,
    Group,
    OutputDesc,
    Piece,
    RemoteRegister,
    SliceSpec,
    Stream,
    TaskSpec,
    VariableDesc,
)

CANDIDATE_SLOT = 1
"""Slot of a CopyCommNet task's `candidate_in_regst_desc_id`; its output is slot 0."""

RemoteReaders = Callable[[FamilyOutput, int], tuple[int, ...]]
"""(output, rank) → CopyCommNet task ids of other ranks that read the rank's register of it."""


def rebuild_rank_task_graph(rank_slice: RankSlice, rank: int) -> RankTaskGraph:
    """The rank's task graph from its slice alone."""
    return build_rank_task_graph(rank_slice, rank, SliceReaders(rank_slice.families))


class SliceReaders:
    """Remote readers of a register, computed from the CopyCommNet families that read its output."""

    def __init__(self, families: tuple[TaskFamily, ...]) -> None:
        self._copies: dict[FamilyOutput, list[tuple[int, Exchange]]] = {}
        for family in families:
            if family.kind in CROSSING:
                self._copies.setdefault(family.inputs[0], []).append(
                    (family.number, exchange_of(family))
                )

    def __call__(self, output: FamilyOutput, rank: int) -> tuple[int, ...]:
        copies = self._copies.get(output)
        if copies is None:
            return ()
        return tuple(
            sorted(
                pack_task_id(dst_rank, number, lane)
                for number, exchange in copies
                for dst_rank, lane in exchange_readers(exchange, rank)
            )
        )


def sync_id_of(remote_consumers: tuple[int, ...]) -> int:
    """The id of a crossing register: the greatest candidate of its CopyCommNet consumers.

    A consumer's candidate is its own register id in the candidate slot; ids grow with the task id.
    """
    return max(remote_consumers) + CANDIDATE_SLOT if remote_consumers else -1


def exchange_of(family: TaskFamily) -> Exchange:
    """The exchange that a CopyCommNet or assembling SliceBoxing family is part of."""
    transfer = family.transfer
    if transfer is None or transfer.src_placement is None or transfer.src_sbp is None:
        raise VerifyError("an exchange family lacks its source layout", op=family.name)
    layout = family.outputs[0]
    return Exchange(
        layout.shape, transfer.src_placement, transfer.src_sbp, family.placement, layout.sbp
    )


def build_rank_task_graph(
    rank_slice: RankSlice, rank: int, remote_readers: RemoteReaders
) -> RankTaskGraph:
    """The rank's tasks, with remote readers of its registers as `remote_readers` knows them."""
    builder = _RankGraphBuilder(rank_slice, rank, remote_readers)
    for entry in rank_slice.in_order():
        if isinstance(entry, PlacedOp):
            builder.add_op(entry)
        elif rank in entry.placement:
            builder.add_transport(entry)
    return builder.finish()


class _RankGraphBuilder:
    def __init__(self, rank_slice: RankSlice, rank: int, remote_readers: RemoteReaders) -> None:
        self._slice = rank_slice
        self._rank = rank
        self._remote_readers = remote_readers
        self._family = {family.number: family for family in rank_slice.families}
        self._coordinates: dict[Placement, tuple[int, ...]] = {}
        """The rank's place in each mesh."""
        self._tasks: list[RankTask] = []
        self._registers: dict[int, RankRegister] = {}
        self._consumers: dict[int, dict[int, None]] = {}
        self._remote: dict[int, RemoteRegister] = {}
        self._groups: dict[Group, list[int]] = {}
        self._group_index: dict[Group, int] = {}
        self._known_groups: dict[
            tuple[Placement, tuple[int, ...], Stream], tuple[int, list[int]]
        ] = {}
        self._variables: list[VariableDesc] = []
        self._outputs: list[OutputDesc] = []
        pipeline = rank_slice.pipeline
        self._segments = (WHOLE_STEP,) if pipeline is None else pipeline.segments
        self._microbatches = 1 if pipeline is None else pipeline.microbatches

    def add_op(self, placed: PlacedOp) -> None:
        op, rank = placed.op, self._rank
        kind = task_kind_of(op.kind)
        if kind is TaskKind.OUTPUT and rank != op.placement.rank_list[0]:
            return  # every rank of the placement holds the value; one reports it
        task = pack_task_id(rank, placed.family)
        inputs = tuple(self._local_register(source) for source in placed.inputs)
        outputs = []
        micro = op.micro
        segment = 0 if micro is None else micro.segment
        repeated = self._segments[segment].kind.per_microbatch
        per_microbatch = repeated and not op_def(op.kind).collects
        input_axes, output_axes = piece_axes(op, self._slice.pipeline)
        input_regions = self._regions(op.inputs, input_axes, op, placed.signature.inputs)
        output_regions = self._regions(op.outputs, output_axes, op, placed.signature.outputs)
        for slot, (value, sbp) in enumerate(zip(op.outputs, placed.signature.outputs, strict=True)):
            layout = TensorLayout(value.shape, value.dtype, sbp)
            shape = region_shape(output_regions[slot])
            output = FamilyOutput(placed.family, slot)
            outputs.append(
                self._register(
                    output,
                    value.name,
                    layout,
                    shape,
                    task,
                    per_microbatch=per_microbatch,
                    device=op.placement.device_type,
                )
            )
        spec = ComputeSpec(
            kind=op.kind,
            attrs=op.attrs,
            input_shapes=tuple(value.shape for value in op.inputs),
            output_shapes=tuple(value.shape for value in op.outputs),
            input_regions=input_regions,
            output_regions=output_regions,
            input_pieces=input_axes if repeated else (),
            output_pieces=output_axes if repeated else (),
        )
        spec, lanes = self._with_lanes(placed, spec, task, repeated)
        self._task(
            RankTask(
                task,
                placed.family,
                kind,
                op.name,
                op.kind,
                inputs,
                (*outputs, *lanes),
                spec,
                op.source,
                segment=segment,
            )
        )
        if kind is TaskKind.VARIABLE:
            value = op.outputs[0]
            self._variables.append(
                VariableDesc(
                    str(op.attr("name")),
                    outputs[0],
                    value.shape,
                    value.dtype,
                    op.placement,
                    placed.signature.outputs[0],
                    spec.output_regions[0],
                    op.attrs,
                )
            )
        elif kind is TaskKind.OUTPUT:
            self._outputs.append(OutputDesc(str(op.attr("name")), task, inputs[0]))

    def _with_lanes(
        self, placed: PlacedOp, spec: ComputeSpec, task: int, repeated: bool
    ) -> tuple[ComputeSpec, list[int]]:
        """An op's spec with the communicator of what its kernel passes between devices, if it does;
        and the registers of that.
        """
        op = placed.op
        passing, signature = op_def(op.kind).passing, placed.signature
        if passing is None:
            return spec, []
        axes = passing.mesh_axes(signature.inputs, signature.outputs, op.placement.hierarchy)
        if not axes:
            return spec, []
        communicator, families = self._group(op.placement, axes, Stream.COMPUTE)
        families.append(placed.family)
        size = op.placement.hierarchy[axes[0]]
        lanes = passing.lanes(op.input_types, spec.input_regions, size)
        whole = NdSbp.broadcast(op.placement.ndim)
        registers = [
            self._register(
                FamilyOutput(placed.family, len(op.outputs) + number),
                f"{op.name}:lane {number}",
                TensorLayout(lane.shape, lane.dtype, whole),
                lane.shape,
                task,
                per_microbatch=repeated,
                device=op.placement.device_type,
            )
            for number, lane in enumerate(lanes)
        ]
        boxes = tuple(tuple((0, extent) for extent in lane.shape) for lane in lanes)
        spec = replace(
            spec,
            output_shapes=(*spec.output_shapes, *(lane.shape for lane in lanes)),
            output_regions=(*spec.output_regions, *boxes),
            output_pieces=(*spec.output_pieces, *[-1] * (len(lanes) if repeated else 0)),
            communicator=communicator,
            lanes=len(lanes),
        )
        return spec, registers

    def _regions(
        self, values: Sequence[Value], axes: tuple[int, ...], op: Op, sbps: Sequence[NdSbp]
    ) -> tuple[Region, ...]:
        """This rank's box of each value, of its first piece where micro-batches have pieces."""
        return tuple(
            self._region(
                value.shape if axis < 0 else piece_shape(value.shape, axis, self._microbatches),
                op.placement,
                sbp,
            )
            for value, axis, sbp in zip(values, axes, sbps, strict=True)
        )

    def _region(self, shape: tuple[int, ...], placement: Placement, sbp: NdSbp) -> Region:
        """This rank's box of a value."""
        coordinates = self._coordinates.get(placement)
        if coordinates is None:
            coordinates = placement.coordinates(placement.parallel_id(self._rank))
            self._coordinates[placement] = coordinates
        return shard_region(shape, placement.hierarchy, sbp, coordinates)

    def add_transport(self, family: TaskFamily) -> None:
        if family.kind in CROSSING:
            self._add_copies(family)
        elif family.kind is TaskKind.COLLECTIVE_BOXING:
            self._add_collective(family)
        elif (
            family.kind is TaskKind.COPY_HD and _transfer_of(family).primitive is Primitive.EXCHANGE
        ):
            self._add_uploads(family)
        else:
            self._add_slice(family)

    def finish(self) -> RankTaskGraph:
        return RankTaskGraph(
            rank=self._rank,
            rank_slice=self._slice,
            tasks=tuple(self._tasks),
            registers=self._registers,
            consumers={register: tuple(tasks) for register, tasks in self._consumers.items()},
            remote_registers=tuple(self._remote[key] for key in sorted(self._remote)),
            communicators=tuple(
                Communicator(group.ranks, tuple(families), group.stream)
                for group, families in self._groups.items()
            ),
            variables=tuple(self._variables),
            outputs=tuple(self._outputs),
        )

    def _add_collective(self, family: TaskFamily) -> None:
        transfer = _transfer_of(family)
        communicator, families = self._group(family.placement, transfer.mesh_axes, transfer.stream)
        families.append(family.number)
        spec = CollectiveSpec(
            primitive=transfer.primitive,
            communicator=communicator,
            reduction=transfer.reduction,
            src_axis=transfer.src_axis,
            dst_axis=transfer.dst_axis,
        )
        inputs = tuple(self._local_register(source) for source in family.inputs)
        self._transport_task(family, family.kind, inputs, spec)

    def _group(
        self, placement: Placement, mesh_axes: tuple[int, ...], stream: Stream
    ) -> tuple[int, list[int]]:
        """The communicator of this rank along some mesh axes on a stream, and its families so far.

        Looked up by placement: a group may have as many ranks as the world, and to list and hash
        them for each family would take time for families times ranks.
        """
        key = (placement, mesh_axes, stream)
        known = self._known_groups.get(key)
        if known is None:
            group = Group(placement.group(self._rank, mesh_axes), stream)
            families = self._groups.setdefault(group, [])
            index = self._group_index.setdefault(group, len(self._group_index))
            known = self._known_groups[key] = (index, families)
        return known

    def _add_copies(self, family: TaskFamily) -> None:
        """One CopyCommNet task per box that another rank holds, with the box's lane."""
        exchange, source = exchange_of(family), family.inputs[0]
        producer = self._family[source.family]
        for piece in exchange_sources(exchange, self._rank):
            if piece.rank == self._rank:
                continue
            remote = self._remote_register(producer, source, piece.rank)
            self._piece_task(family, piece, remote, CopySpec(piece.source))

    def _add_uploads(self, family: TaskFamily) -> None:
        """One CopyHd task per copy that came from another rank, with its lane."""
        (copied,) = family.inputs
        for piece in exchange_sources(exchange_of(family), self._rank):
            copy = pack_register_id(self._rank, copied.family, piece.lane, copied.slot)
            whole = tuple((0, extent) for extent in region_shape(piece.source))
            self._piece_task(family, piece, copy, SliceSpec(None, (Piece(0, whole, whole),)))

    def _piece_task(
        self, family: TaskFamily, piece: SourcePiece, source: int, spec: TaskSpec
    ) -> None:
        """A task that makes one box of an exchange in a register of its own."""
        task = pack_task_id(self._rank, family.number, piece.lane)
        register = self._register(
            FamilyOutput(family.number, 0),
            family.name,
            family.outputs[0],
            region_shape(piece.source),
            task,
            lane=piece.lane,
            per_microbatch=family.per_microbatch,
            device=_device_of(family),
        )
        name = f"{family.name} from rank {piece.rank}"
        self._transport(family, task, family.kind, name, (source,), (register,), spec)

    def _remote_register(self, producer: TaskFamily, source: FamilyOutput, rank: int) -> int:
        register = pack_register_id(rank, source.family, 0, source.slot)
        if register not in self._remote:
            layout = producer.outputs[source.slot]
            readers = self._remote_readers(source, rank)
            self._remote[register] = RemoteRegister(
                id=register,
                sync_id=sync_id_of(readers),
                name=producer.name,
                shape=local_shape(layout.shape, producer.placement, layout.sbp, rank),
                dtype=layout.dtype,
                producer=pack_task_id(rank, source.family),
                consumers=readers,
                per_microbatch=producer.per_microbatch,
            )
        return register

    def _add_slice(self, family: TaskFamily) -> None:
        transfer = _transfer_of(family)
        if transfer.primitive is Primitive.EXCHANGE:
            self._add_assembly(family)
            return
        source = self._local_register(family.inputs[0])
        if source not in self._registers:
            raise self._lacks(source, family.name, family.source)
        whole = tuple((0, extent) for extent in self._registers[source].shape)
        kind, reduction = family.kind, None
        pieces: tuple[Piece, ...] = (Piece(0, whole, whole),)
        if transfer.primitive is Primitive.SLICE:
            layout = family.outputs[0]
            before = transfer.src_sbp
            if before is None:
                raise VerifyError("a slice family lacks its source layout", op=family.name)
            src = self._region(layout.shape, family.placement, before)
            dst = self._region(layout.shape, family.placement, layout.sbp)
            box = relative(dst, src)
            pieces = (Piece(0, box, tuple((0, stop - start) for start, stop in box)),)
        elif transfer.primitive is Primitive.PARTIALISE and not self._keeps_value(family):
            kind, reduction, pieces = TaskKind.BOXING_ZEROS, transfer.reduction, ()
        self._transport_task(
            family, kind, (source,) if pieces else (), SliceSpec(reduction, pieces)
        )

    def _keeps_value(self, family: TaskFamily) -> bool:
        """Whether this rank keeps the value in B → P: the first along the axes, or all for avg."""
        transfer = _transfer_of(family)
        if transfer.reduction is Reduction.AVG:
            return True
        coordinates = family.placement.coordinates(family.placement.parallel_id(self._rank))
        return all(coordinates[axis] == 0 for axis in transfer.mesh_axes)

    def _add_assembly(self, family: TaskFamily) -> None:
        """Put together the boxes that this rank reads, from its own register and from copies."""
        exchange = exchange_of(family)
        source, copied = family.inputs
        sources = exchange_sources(exchange, self._rank)
        inputs, pieces = [], []
        for position, piece in enumerate(sources):
            if piece.rank == self._rank:
                inputs.append(self._local_register(source))
                pieces.append(Piece(position, piece.source, piece.target))
            else:
                inputs.append(pack_register_id(self._rank, copied.family, piece.lane, copied.slot))
                box = tuple((0, stop - start) for start, stop in piece.source)
                pieces.append(Piece(position, box, piece.target))
        partial = any(isinstance(entry, Partial) for entry in exchange.src_sbp)
        reduction = exchange.reduction if partial and sources else None
        kind = family.kind
        if not sources:
            kind, reduction = TaskKind.BOXING_ZEROS, exchange.fill(self._rank) or Reduction.SUM
        self._transport_task(family, kind, tuple(inputs), SliceSpec(reduction, tuple(pieces)))

    def _transport_task(
        self, family: TaskFamily, kind: TaskKind, inputs: tuple[int, ...], spec: TaskSpec
    ) -> None:
        """A transport task whose outputs are laid out as the family says."""
        task = pack_task_id(self._rank, family.number)
        registers = tuple(
            self._register(
                FamilyOutput(family.number, slot),
                family.name,
                layout,
                region_shape(self._region(layout.shape, family.placement, layout.sbp)),
                task,
                per_microbatch=family.per_microbatch,
                device=_device_of(family),
            )
            for slot, layout in enumerate(family.outputs)
        )
        self._transport(family, task, kind, family.name, inputs, registers, spec)

    def _transport(
        self,
        family: TaskFamily,
        task: int,
        kind: TaskKind,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        spec: TaskSpec,
    ) -> None:
        transfer = _transfer_of(family)
        self._task(
            RankTask(
                task,
                family.number,
                kind,
                name,
                "",
                inputs,
                outputs,
                spec,
                family.source,
                transfer.late,
                family.segment,
                transfer.stream if kind is TaskKind.COLLECTIVE_BOXING else None,
            )
        )

    def _local_register(self, source: FamilyOutput) -> int:
        return pack_register_id(self._rank, source.family, 0, source.slot)

    def _register(
        self,
        output: FamilyOutput,
        name: str,
        layout: TensorLayout,
        shape: tuple[int, ...],
        task: int,
        lane: int = 0,
        per_microbatch: bool = False,
        device: str = HOST,
    ) -> int:
        register = pack_register_id(self._rank, output.family, lane, output.slot)
        readers = self._remote_readers(output, self._rank)
        self._registers[register] = RankRegister(
            id=register,
            name=name,
            shape=shape,
            dtype=layout.dtype,
            sbp=layout.sbp,
            producer=task,
            remote_consumers=readers,
            sync_id=sync_id_of(readers),
            per_microbatch=per_microbatch,
            device=device,
        )
        return register

    def _task(self, task: RankTask) -> None:
        for register in task.inputs:
            if register not in self._registers and register not in self._remote:
                raise self._lacks(register, task.name, task.source)
            self._consumers.setdefault(register, {})[task.id] = None
        self._tasks.append(task)

    def _lacks(self, register: int, name: str, source: SourceLine) -> VerifyError:
        return VerifyError(
            "the slice lacks what makes an input of a task",
            op=name,
            source=source,
            rank=self._rank,
            got=format_id(register),
        )


def piece_axes(op: Op, pipeline: Pipeline | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per input, and per output, the axis along which micro-batches split it, or -1."""
    micro = op.micro
    if (
        micro is None
        or pipeline is None
        or not pipeline.segments[micro.segment].kind.per_microbatch
    ):
        return (-1,) * len(op.inputs), (-1,) * len(op.outputs)
    return _split_axes(micro.inputs, len(op.inputs)), _split_axes(micro.outputs, len(op.outputs))


def _split_axes(over: Sequence[Sbp], count: int) -> tuple[int, ...]:
    if not over:
        return (-1,) * count
    return tuple(sbp.axis if isinstance(sbp, Split) else -1 for sbp in over)


def _device_of(family: TaskFamily) -> str:
    """Device type of the memory that a transport family fills."""
    in_host_memory = family.kind is TaskKind.COPY_COMM_NET or (
        family.kind is TaskKind.COPY_HD and _transfer_of(family).primitive is Primitive.COPY
    )
    return HOST if in_host_memory else family.placement.device_type


def _transfer_of(family: TaskFamily) -> Transfer:
    if family.transfer is None:
        raise VerifyError("a transport family lacks its transfer", op=family.name)
    return family.transfer
