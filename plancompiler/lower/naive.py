"""`naive` mode: the reference that the other modes are compared with.

Every task of every rank is made, in one graph of the whole job. Then the graph is cut by rank, and
`naive_plan` writes each part down as a plan. A register's remote readers are the tasks that were
really made to read it, boxes are found by looking at every device, and order is reachability.

None of the code that it checks is used here: no slices, no `rebuild`, none of the schedule,
storage and lifetimes behind `emit_plan`. Shared is what both must read: the op table, placements
and layouts, ids, the slots of a schedule, and the search that packs intervals into bytes. Equal
plans therefore say that the rules were carried out rightly twice, in two different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

from plancompiler.boxing.graph import (
    BoxingTaskGraph,
    FamilyOutput,
    PlacedOp,
    TaskFamily,
    Transfer,
    task_kind_of,
)
from plancompiler.errors import VerifyError
from plancompiler.ir import (
    Broadcast,
    DType,
    NdSbp,
    Partial,
    Placement,
    Reduction,
    Split,
    TensorType,
)
from plancompiler.ir.halo import Halo
from plancompiler.ir.pipeline import WHOLE_STEP
from plancompiler.ir.shard import Region
from plancompiler.ir.task import (
    CROSSING,
    Primitive,
    TaskKind,
    pack_register_id,
    pack_task_id,
    rank_of,
    unpack_id,
)
from plancompiler.lower.naive_plan import HOST, RankPart
from plancompiler.ops.registry import op_def
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Piece,
    RegisterDesc,
    RemoteRegister,
    SliceSpec,
    Stream,
    Task,
    TaskSpec,
    VariableDesc,
)

_STREAMS = {
    TaskKind.INPUT: Stream.DATA,
    TaskKind.COPY_COMM_NET: Stream.COPY,
    TaskKind.SEND_RECV: Stream.COPY,
    TaskKind.COPY_HD: Stream.COPY_HD,
}


@dataclass(frozen=True)
class _Read:
    """A box that a destination device reads from a source device."""

    rank: int
    source: Region
    """In the source's own coordinates."""
    target: Region
    """In the destination's own coordinates."""


@dataclass
class WholeGraph:
    """All tasks and registers of all ranks."""

    graph: BoxingTaskGraph
    tasks: dict[int, list[Task]] = field(default_factory=dict)
    """Rank → its tasks, family by family. Communicators are not numbered yet."""
    registers: dict[int, RegisterDesc] = field(default_factory=dict)
    """By id; without memory, consumers and sync ids."""
    readers: dict[int, list[int]] = field(default_factory=dict)
    """Register → the tasks of all ranks that read it."""
    made_in: dict[int, str] = field(default_factory=dict)
    """Register → the name of the family that makes it."""
    devices: dict[int, str] = field(default_factory=dict)
    """Register → the device type of its memory."""
    groups: dict[int, tuple[tuple[int, ...], Stream]] = field(default_factory=dict)
    """Collective's task → ranks that run it together, and the stream on which they do."""
    late: set[int] = field(default_factory=set)
    variables: dict[int, VariableDesc] = field(default_factory=dict)
    """By register."""

    def __post_init__(self) -> None:
        pipeline = self.graph.pipeline
        self.segments = (WHOLE_STEP,) if pipeline is None else pipeline.segments
        self.microbatches = 1 if pipeline is None else pipeline.microbatches
        self.tasks = {rank: [] for rank in range(self.graph.world_size)}
        made: list[tuple[int, PlacedOp | TaskFamily]] = [
            (placed.family, placed) for placed in self.graph.ops
        ]
        made += [(one.number, one) for one in self.graph.families if one.transfer is not None]
        for _, one in sorted(made, key=lambda numbered: numbered[0]):
            if isinstance(one, PlacedOp):
                for rank in one.op.placement.rank_list:
                    self._add_op(one, rank)
            else:
                for rank in one.placement.rank_list:
                    self._add_transport(one, rank)
        for tasks in self.tasks.values():
            for task in tasks:
                for register in dict.fromkeys(task.inputs):
                    self.readers.setdefault(register, []).append(task.id)

    def part(self, rank: int) -> RankPart:
        """What one rank has of it."""
        communicators: dict[tuple[tuple[int, ...], Stream], list[int]] = {}
        tasks, registers, remotes = [], {}, {}
        for task in self.tasks[rank]:
            spec = task.spec
            if isinstance(spec, (CollectiveSpec, ComputeSpec)) and task.id in self.groups:
                families = communicators.setdefault(self.groups[task.id], [])
                families.append(unpack_id(task.id).family)
                number = list(communicators).index(self.groups[task.id])
                task = replace(task, spec=replace(spec, communicator=number))
            tasks.append(task)
            for key in task.outputs:
                readers = self.readers.get(key, [])
                here = [reader for reader in readers if rank_of(reader) == rank]
                away = sorted(reader for reader in readers if rank_of(reader) != rank)
                registers[key] = replace(
                    self.registers[key], consumers=(*here, *away), sync_id=_sync_id(away)
                )
            for key in task.inputs:
                if rank_of(key) != rank:
                    remote = self.registers[key]
                    home = rank_of(key)
                    readers = sorted(one for one in self.readers[key] if rank_of(one) != home)
                    remotes[key] = RemoteRegister(
                        id=key,
                        sync_id=_sync_id(readers),
                        name=self.made_in[key],
                        shape=remote.shape,
                        dtype=remote.dtype,
                        producer=remote.producer,
                        consumers=tuple(readers),
                        per_microbatch=remote.per_microbatch,
                    )
        return RankPart(
            graph=self.graph,
            rank=rank,
            tasks=tasks,
            registers=registers,
            remotes=tuple(remotes[key] for key in sorted(remotes)),
            communicators={group: tuple(each) for group, each in communicators.items()},
            variables=[self.variables[key] for key in registers if key in self.variables],
            late=self.late,
            devices=self.devices,
        )

    def _add_op(self, placed: PlacedOp, rank: int) -> None:
        op, signature = placed.op, placed.signature
        kind = task_kind_of(op.kind)
        if kind is TaskKind.OUTPUT and rank != op.placement.rank_list[0]:
            return  # one rank reports it
        segment = 0 if op.micro is None else op.micro.segment
        each = self.segments[segment].kind.per_microbatch
        boxes, pieces = [], []
        for values, sbps, over in (
            (op.inputs, signature.inputs, None if op.micro is None else op.micro.inputs),
            (op.outputs, signature.outputs, None if op.micro is None else op.micro.outputs),
        ):
            axes = [-1] * len(values)
            if each and over:
                axes = [one.axis if isinstance(one, Split) else -1 for one in over]
            pieces.append(tuple(axes) if each else ())
            boxes.append(
                tuple(
                    _box(self._piece(value.shape, axis), op.placement, sbp, rank)
                    for value, axis, sbp in zip(values, axes, sbps, strict=True)
                )
            )
        spec = ComputeSpec(
            kind=op.kind,
            attrs=op.attrs,
            input_shapes=tuple(value.shape for value in op.inputs),
            output_shapes=tuple(value.shape for value in op.outputs),
            input_regions=boxes[0],
            output_regions=boxes[1],
            input_pieces=pieces[0],
            output_pieces=pieces[1],
        )
        task = pack_task_id(rank, placed.family)
        hierarchy = op.placement.hierarchy
        passing = op_def(op.kind).passing
        along: tuple[int, ...] = ()
        lanes: tuple[TensorType, ...] = ()
        if passing is not None:
            along = passing.mesh_axes(signature.inputs, signature.outputs, hierarchy)
        if passing is not None and along:
            members = _group(op.placement, along, rank)
            self.groups[task] = members, Stream.COMPUTE
            lanes = passing.lanes(op.input_types, boxes[0], len(members))
            spec = replace(
                spec,
                output_shapes=(*spec.output_shapes, *(lane.shape for lane in lanes)),
                output_regions=(*spec.output_regions, *(_whole(lane.shape) for lane in lanes)),
                output_pieces=(*spec.output_pieces, *(-1 for _ in lanes if each)),
                lanes=len(lanes),
            )
        outputs = tuple(
            self._register(
                task,
                slot,
                value.name,
                _extents(boxes[1][slot]),
                value.dtype,
                signature.outputs[slot],
                per_microbatch=each and not op_def(op.kind).collects,
                device=op.placement.device_type,
                made_in=op.name,
            )
            for slot, value in enumerate(op.outputs)
        ) + tuple(
            self._register(
                task,
                len(op.outputs) + number,
                f"{op.name}:lane {number}",
                lane.shape,
                lane.dtype,
                NdSbp.broadcast(len(hierarchy)),
                per_microbatch=each,
                device=op.placement.device_type,
                made_in=op.name,
            )
            for number, lane in enumerate(lanes)
        )
        self.tasks[rank].append(
            Task(
                id=task,
                kind=kind,
                stream=Stream.DATA
                if op_def(op.kind).source
                else _STREAMS.get(kind, Stream.COMPUTE),
                name=op.name,
                inputs=tuple(_here(rank, source) for source in placed.inputs),
                outputs=outputs,
                spec=spec,
                source=op.source,
                segment=segment,
            )
        )
        if kind is TaskKind.VARIABLE:
            (value,) = op.outputs
            self.variables[outputs[0]] = VariableDesc(
                name=str(op.attr("name")),
                register=outputs[0],
                shape=value.shape,
                dtype=value.dtype,
                placement=op.placement,
                sbp=signature.outputs[0],
                region=boxes[1][0],
                attrs=op.attrs,
            )

    def _piece(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """The shape of one micro-batch's piece along an axis."""
        if axis < 0:
            return shape
        return (*shape[:axis], shape[axis] // self.microbatches, *shape[axis + 1 :])

    def _add_transport(self, family: TaskFamily, rank: int) -> None:
        transfer = _transfer(family)
        exchange = transfer.primitive is Primitive.EXCHANGE
        if exchange and (family.kind in CROSSING or family.kind is TaskKind.COPY_HD):
            self._add_reads(family, rank)
        elif exchange:
            self._add_assembly(family, rank)
        elif family.kind is TaskKind.COLLECTIVE_BOXING:
            spec = CollectiveSpec(
                transfer.primitive, -1, transfer.reduction, transfer.src_axis, transfer.dst_axis
            )
            inputs = [_here(rank, source) for source in family.inputs]
            self.groups[pack_task_id(rank, family.number)] = (
                _group(family.placement, transfer.mesh_axes, rank),
                transfer.stream,
            )
            self._transport(family, rank, family.kind, inputs, spec)
        else:
            self._add_local(family, transfer, rank)

    def _add_reads(self, family: TaskFamily, rank: int) -> None:
        """A task per box from afar: the copy to this rank, or that copy's way on to its device."""
        (source,) = family.inputs
        for lane, read in enumerate(_reads(family, rank)):
            if read.rank == rank:
                continue
            spec: TaskSpec = CopySpec(read.source)
            register = pack_register_id(read.rank, source.family, 0, source.slot)
            if family.kind not in CROSSING:
                whole = _whole(_extents(read.source))
                spec = SliceSpec(None, (Piece(0, whole, whole),))
                register = pack_register_id(rank, source.family, lane, source.slot)
            name = f"{family.name} from rank {read.rank}"
            shapes = [_extents(read.source)]
            self._transport(family, rank, family.kind, [register], spec, lane, name, shapes)

    def _add_assembly(self, family: TaskFamily, rank: int) -> None:
        """The boxes that this rank reads, its own and those copied to it, become one."""
        transfer, (source, copied) = _transfer(family), family.inputs
        inputs, pieces = [], []
        for lane, read in enumerate(_reads(family, rank)):
            box = read.source
            if read.rank == rank:
                inputs.append(_here(rank, source))
            else:
                inputs.append(pack_register_id(rank, copied.family, lane, copied.slot))
                box = _whole(_extents(box))
            pieces.append(Piece(lane, box, read.target))
        reduction = next(
            (one.reduction for one in transfer.src_sbp or () if isinstance(one, Partial)), None
        )
        kind = family.kind
        if not pieces:
            kind = TaskKind.BOXING_ZEROS
            reduction = _identity(family.placement, family.outputs[0].sbp, rank) or Reduction.SUM
        self._transport(family, rank, kind, inputs, SliceSpec(reduction, tuple(pieces)))

    def _add_local(self, family: TaskFamily, transfer: Transfer, rank: int) -> None:
        """A change of layout that needs no other rank: slice, partialise, copy."""
        (source,) = family.inputs
        register = _here(rank, source)
        whole = _whole(self.registers[register].shape)
        layout = family.outputs[0]
        if transfer.primitive is Primitive.SLICE and transfer.src_sbp is not None:
            before = _box(layout.shape, family.placement, transfer.src_sbp, rank)
            after = _box(layout.shape, family.placement, layout.sbp, rank)
            inside = _shifted(after, before)
            piece = Piece(0, inside, _whole(_extents(inside)))
        else:
            piece = Piece(0, whole, whole)
        first = all(
            coordinate == 0
            for axis, coordinate in enumerate(_coordinates(family.placement, rank))
            if axis in transfer.mesh_axes
        )
        if (
            transfer.primitive is Primitive.PARTIALISE
            and transfer.reduction is not Reduction.AVG
            and not first
        ):
            spec = SliceSpec(transfer.reduction, ())
            self._transport(family, rank, TaskKind.BOXING_ZEROS, [], spec)
        else:
            self._transport(family, rank, family.kind, [register], SliceSpec(None, (piece,)))

    def _transport(
        self,
        family: TaskFamily,
        rank: int,
        kind: TaskKind,
        inputs: Sequence[int],
        spec: TaskSpec,
        lane: int = 0,
        name: str = "",
        shapes: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """A task of a transport family; its outputs are laid out as the family says, or given."""
        task = pack_task_id(rank, family.number, lane)
        from_host = family.kind is TaskKind.COPY_COMM_NET or (
            family.kind is TaskKind.COPY_HD and _transfer(family).primitive is Primitive.COPY
        )
        outputs = tuple(
            self._register(
                task,
                slot,
                family.name,
                shapes[slot]
                if shapes
                else _extents(_box(layout.shape, family.placement, layout.sbp, rank)),
                layout.dtype,
                layout.sbp,
                per_microbatch=family.per_microbatch,
                device=HOST if from_host else family.placement.device_type,
                made_in=family.name,
            )
            for slot, layout in enumerate(family.outputs)
        )
        if _transfer(family).late:
            self.late.add(task)
        self.tasks[rank].append(
            Task(
                id=task,
                kind=kind,
                stream=_transfer(family).stream
                if kind is TaskKind.COLLECTIVE_BOXING
                else _STREAMS.get(kind, Stream.COMPUTE),
                name=name or family.name,
                inputs=tuple(inputs),
                outputs=outputs,
                spec=spec,
                source=family.source,
                segment=family.segment,
            )
        )

    def _register(
        self,
        task: int,
        slot: int,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        sbp: NdSbp,
        *,
        per_microbatch: bool,
        device: str,
        made_in: str,
    ) -> int:
        ids = unpack_id(task)
        key = pack_register_id(ids.rank, ids.family, ids.lane, slot)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        self.registers[key] = RegisterDesc(
            id=key,
            name=name,
            shape=shape,
            dtype=dtype,
            sbp=sbp,
            producer=task,
            consumers=(),
            block=0,
            nbytes=nbytes,
            per_microbatch=per_microbatch,
        )
        self.made_in[key] = made_in
        self.devices[key] = device
        return key


def _here(rank: int, source: FamilyOutput) -> int:
    return pack_register_id(rank, source.family, 0, source.slot)


def _sync_id(readers: Sequence[int]) -> int:
    """The greatest of the readers' candidates, which are their registers in slot 1; or -1."""
    return max((pack_register_id(*unpack_id(task)[:3], 1) for task in readers), default=-1)


def _transfer(family: TaskFamily) -> Transfer:
    if family.transfer is None:
        raise VerifyError("a transport family lacks its transfer", op=family.name)
    return family.transfer


# --- boxes, by looking at every device -----------------------------------------------------------


def _coordinates(placement: Placement, rank: int) -> tuple[int, ...]:
    """Where a rank stands in its mesh."""
    return _mesh(placement)[rank]


@lru_cache(maxsize=64)
def _mesh(placement: Placement) -> dict[int, tuple[int, ...]]:
    """Rank → coordinates, in row-major order."""
    places = product(*map(range, placement.hierarchy))
    return dict(zip(placement.rank_list, places, strict=True))


def _group(placement: Placement, mesh_axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The ranks that stand where this one does, but for some mesh axes."""
    return _lines(placement, tuple(mesh_axes))[
        tuple(
            coordinate
            for axis, coordinate in enumerate(_coordinates(placement, rank))
            if axis not in mesh_axes
        )
    ]


@lru_cache(maxsize=64)
def _lines(
    placement: Placement, mesh_axes: tuple[int, ...]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Ranks by their coordinates along all other mesh axes."""
    lines: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank, place in _mesh(placement).items():
        others = tuple(place[axis] for axis in range(len(place)) if axis not in mesh_axes)
        lines[others] = (*lines.get(others, ()), rank)
    return lines


@lru_cache(maxsize=65536)
def _box(shape: tuple[int, ...], placement: Placement, sbp: NdSbp, rank: int) -> Region:
    """The box of a tensor that a rank holds: cut again along every mesh axis that splits it."""
    box = [(0, extent) for extent in shape]
    cut: dict[Halo, tuple[int, int]] = {}
    for entry, parts, place in zip(
        sbp, placement.hierarchy, _coordinates(placement, rank), strict=True
    ):
        if isinstance(entry, Split):
            box[entry.axis] = _cut(box[entry.axis], parts, place)
        elif isinstance(entry, Halo):
            cut[entry] = _cut(cut.get(entry, (0, entry.pieces_of)), parts, place)
            box[entry.axis] = entry.range_of(*cut[entry])
    return tuple(box)


def _cut(whole: tuple[int, int], parts: int, place: int) -> tuple[int, int]:
    start, stop = whole
    sizes = [(stop - start) // parts] * parts
    for longer in range((stop - start) % parts):
        sizes[longer] += 1
    start += sum(sizes[:place])
    return start, start + sizes[place]


def _extents(box: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _whole(shape: tuple[int, ...]) -> Region:
    return tuple((0, extent) for extent in shape)


def _shifted(box: Region, origin: Region) -> Region:
    """A box in the coordinates of another."""
    return tuple(
        (start - corner, stop - corner)
        for (start, stop), (corner, _) in zip(box, origin, strict=True)
    )


def _identity(placement: Placement, sbp: NdSbp, rank: int) -> Reduction | None:
    """The reduction whose identity a rank holds instead of the value; None where it holds that.

    Of the axes along which the layout is partial and the rank is not first, the last decides.
    """
    reduction = None
    for entry, coordinate in zip(sbp, _coordinates(placement, rank), strict=True):
        if isinstance(entry, Partial) and entry.reduction is not Reduction.AVG and coordinate:
            reduction = entry.reduction
    return reduction


def _reads(family: TaskFamily, rank: int) -> list[_Read]:
    """What a rank reads in an exchange, by the places of the source devices in their mesh."""
    transfer, layout = _transfer(family), family.outputs[0]
    source, src_sbp = transfer.src_placement, transfer.src_sbp
    if source is None or src_sbp is None:
        raise VerifyError("an exchange family lacks its source layout", op=family.name)
    if _identity(family.placement, layout.sbp, rank) is not None:
        return []
    target = _box(layout.shape, family.placement, layout.sbp, rank)
    # Of several replicas, the rank's own; else the one that stands where the rank does; else in
    # turn, so that no source serves all.
    if rank in source:
        replica = _coordinates(source, rank)
    elif source.hierarchy == family.placement.hierarchy:
        replica = _coordinates(family.placement, rank)
    else:
        number = family.placement.rank_list.index(rank) % source.size
        replica = _coordinates(source, source.rank_list[number])
    reads = []
    for other, place in _mesh(source).items():
        if any(
            isinstance(entry, Broadcast) and here != there
            for entry, here, there in zip(src_sbp, place, replica, strict=True)
        ):
            continue
        held = _box(layout.shape, source, src_sbp, other)
        common = tuple(
            (max(one[0], two[0]), min(one[1], two[1]))
            for one, two in zip(held, target, strict=True)
        )
        if all(start < stop for start, stop in common):
            reads.append(_Read(other, _shifted(common, held), _shifted(common, target)))
    return reads
