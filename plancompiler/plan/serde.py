"""Plans as bytes, and back."""

from __future__ import annotations

from typing import Any

from plancompiler.ir.columns import (
    ATTRS,
    DTYPE,
    GIVEN,
    PLACEMENT,
    PLAIN,
    REGION,
    RELATIVE,
    SBP,
    SHAPE,
    SOURCE,
    STRING,
    Columns,
    Ragged,
    coded,
)
from plancompiler.ir.pipeline import Segment, SegmentKind, Slot
from plancompiler.ir.task import pack_register_id
from plancompiler.ir.wire import (
    PRIMITIVES,
    REDUCTIONS,
    TASK_KINDS,
    Codes,
    MessageKind,
    TableReader,
    TableWriter,
    pick,
    reading,
    seal,
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
_REDUCTION = coded(REDUCTIONS, optional=True)
_TASKS = Columns(
    Task,
    id=RELATIVE,
    kind=coded(TASK_KINDS),
    stream=coded(STREAMS),
    name=STRING,
    inputs=Ragged(RELATIVE, "input_register"),
    outputs=Ragged(RELATIVE, "output_register"),
    spec=GIVEN,
    controls_in=Ragged(RELATIVE, "control_in_register"),
    controls_out=Ragged(RELATIVE, "control_out_register"),
    source=SOURCE,
)
_SPECS: dict[type, Columns[Any]] = {
    ComputeSpec: Columns(
        ComputeSpec,
        "compute_",
        kind=STRING,
        attrs=ATTRS,
        input_shapes=("inputs", Ragged(SHAPE, "compute_input_shape")),
        output_shapes=("outputs", Ragged(SHAPE, "compute_output_shape")),
        input_regions=Ragged(REGION, "compute_input_region"),
        output_regions=Ragged(REGION, "compute_output_region"),
        input_pieces=Ragged(PLAIN, "compute_input_piece"),
        output_pieces=Ragged(PLAIN, "compute_output_piece"),
    ),
    CollectiveSpec: Columns(
        CollectiveSpec, "collective_", primitive=coded(PRIMITIVES), reduction=_REDUCTION
    ),
    CopySpec: Columns(CopySpec, "copy_", region=REGION),
    SliceSpec: Columns(
        SliceSpec,
        "slice_",
        reduction=_REDUCTION,
        pieces=Ragged(Columns(Piece, "piece_", source=REGION, target=REGION)),
    ),
}
"""By their numbers in `SpecKind`, from one on."""
_KINDS = {kind: number for number, kind in enumerate((type(None), *_SPECS))}
_TABLES: dict[str, Columns[Any]] = {
    "registers": Columns(
        RegisterDesc,
        id=RELATIVE,
        name=STRING,
        shape=SHAPE,
        dtype=DTYPE,
        sbp=SBP,
        producer=RELATIVE,
        consumers=Ragged(RELATIVE, "consumer"),
    ),
    "remote_registers": Columns(
        RemoteRegister,
        id=RELATIVE,
        name=STRING,
        shape=SHAPE,
        dtype=DTYPE,
        producer=RELATIVE,
        consumers=Ragged(RELATIVE, "consumer"),
    ),
    "blocks": Columns(Block, purpose=STRING, device=STRING),
    "communicators": Columns(
        Communicator,
        ranks=Ragged(PLAIN, "rank"),
        families=Ragged(PLAIN, "family"),
        stream=coded(STREAMS),
    ),
    "variables": Columns(
        VariableDesc,
        name=STRING,
        register=RELATIVE,
        shape=SHAPE,
        dtype=DTYPE,
        placement=PLACEMENT,
        sbp=SBP,
        region=REGION,
        attrs=ATTRS,
    ),
    "outputs": Columns(OutputDesc, name=STRING, task=RELATIVE, register=RELATIVE),
    "segments": Columns(Segment, kind=coded(SEGMENT_KINDS)),
}
"""Parts of a plan that are tables of their own, by their field."""
_SLOTS = Columns(Slot, "slot_")
_PLAIN = (*("job", "rank", "world_size", "seed", "peak_live_bytes", "schedule", "microbatches"),)


def plan_to_bytes(plan: Plan) -> bytes:
    """A plan as a frame of the wire format."""
    message = plan_pb2.Plan()
    with writing(MessageKind.PLAN):
        for name in _PLAIN:
            setattr(message, name, getattr(plan, name))
        message.id_base = pack_register_id(plan.rank, 0)
        tables = TableWriter(message.id_base)
        _TASKS.write(message.tasks, plan.tasks, tables)
        message.tasks.spec.extend([_KINDS[type(task.spec)] for task in plan.tasks])  # type: ignore[misc]  # stubs want the enum's own type
        for kind, columns in _SPECS.items():
            specs = [task.spec for task in plan.tasks if type(task.spec) is kind]
            columns.write(message.tasks, specs, tables)
        for name, table in _TABLES.items():
            table.write(getattr(message, name), getattr(plan, name), tables)
        _SLOTS.write(message.segments, plan.slots)
        tables.write(message.tables)
    return seal(MessageKind.PLAN, message)


def plan_from_bytes(data: bytes) -> Plan:
    """The plan in a frame; anything else is a WireFormatError."""
    message = plan_pb2.Plan()
    unseal(MessageKind.PLAN, data, message)
    with reading(MessageKind.PLAN):
        tables = TableReader(message.tables, len(data), message.id_base)
        parts: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
        for name, table in _TABLES.items():
            parts[name] = tuple(table.read(getattr(message, name), tables))
        tasks = _TASKS.read(message.tasks, tables, spec=_read_specs(message.tasks, tables))
        slots = tuple(_SLOTS.read(message.segments))
        return Plan(tasks=tuple(tasks), slots=slots, **parts)


def _read_specs(message: plan_pb2.Tasks, tables: TableReader) -> list[TaskSpec]:
    columns = [each.read(message, tables) for each in _SPECS.values()]
    kinds: list[int] = message.spec[:]  # type: ignore[assignment]  # enum members are ints
    if any(kinds.count(kind) != len(column) for kind, column in enumerate(columns, start=1)):
        raise ValueError("specs do not fit their tasks")
    sources = [None, *map(iter, columns)]
    return [None if source is None else next(source) for source in pick(sources, kinds)]
