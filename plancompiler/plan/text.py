"""The text form of a plan: what a person reads, and, but for source lines, a plan's identity.

Everything that matters in a `Plan` appears, so two plans are the same if and only if their texts
are. Registers are `%name` and tasks their name where that is unique on the rank, else with their
id; what belongs to other ranks is named by id, `rank.family.lane.slot`. For example

    stream compute, 2 tasks
      [0] 0.2.0.0 Compute linear = matmul  # mlp.py:12
          in  %x at [0:32, 0:784] of [64, 784]
          in  %w
          out %h 0.2.0.0 float32[32, 10] at [0:32, 0:10] of [64, 10] [S(0)] 1280 bytes, ...

`[0]` is the place in plan order over all streams. A register without `at` holds the whole global
tensor. After `->` come the consumers.

A step of several micro-batches has two more lines at the top,

    schedule 1f1b, 3 micro-batches
    slots P F0(0) F0(1) B0(0) F0(2) B0(1) B0(2) E

where a slot is its segment's letters (P prologue, F forward, B backward, FB both in one, W weight,
E epilogue), its chunk, and in parentheses its micro-batch. Tasks of a stream stand below a line for
their segment. An operand's box is that of micro-batch 0; `pieces along axis 0` says that the others
take the next boxes along that axis, `whole` that they take the same one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from plancompiler.ir.job import format_attr, format_name
from plancompiler.ir.op import Attrs
from plancompiler.ir.pipeline import WHOLE_STEP, Segment, SegmentKind, Slot
from plancompiler.ir.sbp import NdSbp
from plancompiler.ir.shard import Region
from plancompiler.ir.task import format_id
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    RegisterDesc,
    RemoteRegister,
    SliceSpec,
    Stream,
    Task,
    VariableDesc,
)

_INDENT = " " * 10
_LETTERS = {
    SegmentKind.STEP: "S",
    SegmentKind.PROLOGUE: "P",
    SegmentKind.FORWARD: "F",
    SegmentKind.BACKWARD: "B",
    SegmentKind.WEIGHT: "W",
    SegmentKind.EPILOGUE: "E",
    SegmentKind.FORWARD_BACKWARD: "FB",
}


def format_plan(plan: Plan, *, sources: bool = True) -> str:
    """The plan as text, deterministic and complete; it ends with a newline.

    Without `sources`, the user's source lines are left out: what remains does not depend on where
    the user's files lie, nor on the folder from which they are named.
    """
    return "\n".join(_PlanText(plan, sources).lines()) + "\n"


def format_shape(shape: tuple[int, ...]) -> str:
    """`[32, 10]`."""
    return f"[{', '.join(map(str, shape))}]"


def format_region(region: Region) -> str:
    """`[0:32, 0:10]`."""
    return f"[{', '.join([f'{start}:{stop}' for start, stop in region])}]"


def format_slot(segments: Sequence[Segment], slot: Slot) -> str:
    """`F0(3)`, or `P` for a segment that runs once per step."""
    if not 0 <= slot.segment < len(segments):
        return f"?{slot.segment}({slot.microbatch})"
    segment = segments[slot.segment]
    once = not segment.kind.per_microbatch and slot.microbatch == 0
    chunk = str(segment.chunk) if segment.chunk >= 0 else ""
    return f"{_LETTERS[segment.kind]}{chunk}" + ("" if once else f"({slot.microbatch})")


def format_bytes(nbytes: int) -> str:
    """Exact bytes, with a short form beside large ones: `4096 bytes (4.0 KiB)`."""
    scaled, unit = float(nbytes), ""
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024:
            break
        scaled, unit = scaled / 1024, larger
    return f"{nbytes} bytes ({scaled:.1f} {unit})" if unit else f"{nbytes} bytes"


class _PlanText:
    """Lines of one plan; strings that occur often are made once."""

    def __init__(self, plan: Plan, sources: bool) -> None:
        self.plan = plan
        self.sources = sources
        registers: list[RegisterDesc | RemoteRegister] = [*plan.registers, *plan.remote_registers]
        self.registers = _labels("%", [(register.id, register.name) for register in registers])
        self.tasks = _labels("", [(task.id, task.name) for task in plan.tasks])
        self.shape = cache(format_shape)
        self.region = cache(format_region)
        self.sbp: Callable[[NdSbp], str] = cache(str)
        self.printed: set[int] = set()
        self.parted = bool(plan.schedule) or plan.microbatches != 1
        self.parted |= plan.segments != (WHOLE_STEP,) or plan.slots != (Slot(0, 0),)

    def lines(self) -> Iterator[str]:
        plan = self.plan
        yield (
            f"plan {json.dumps(plan.job)} rank {plan.rank} of {plan.world_size}, seed {plan.seed}"
        )
        yield (
            f"{len(plan.tasks)} tasks, {len(plan.registers)} registers, "
            f"{len(plan.remote_registers)} remote registers"
        )
        if self.parted:
            yield f"schedule {format_name(plan.schedule)}, {plan.microbatches} micro-batches"
            yield f"slots {' '.join([format_slot(plan.segments, slot) for slot in plan.slots])}"
        arena, peak = plan.arena_bytes, plan.peak_live_bytes
        ratio = f", ratio {arena / peak:.4f}" if peak > 0 else ""
        yield f"arenas {format_bytes(arena)}, peak live {format_bytes(peak)}{ratio}"
        for block in plan.blocks:
            shared = "shared" if block.shared else "private"
            where = "" if block.device == "cpu" else f" on {block.device}"
            yield (
                f"block {block.index} {block.purpose} {shared}{where} {format_bytes(block.nbytes)}"
            )
        for index, communicator in enumerate(plan.communicators):
            families = ", ".join(map(str, communicator.families))
            yield f"communicator {index} of ranks {communicator.group}: families {families}"
        for variable in plan.variables:
            yield self.variable(variable)
        for output in plan.outputs:
            name = format_name(output.name)
            yield f"output {name}: {self.register(output.register)} of {self.task(output.task)}"
        for remote in plan.remote_registers:
            yield (
                f"remote {self.register(remote.id)} {format_id(remote.id)}"
                f" {remote.dtype}{self.shape(remote.shape)} sync {format_id(remote.sync_id)}"
                f" from {self.task(remote.producer)}{_rate(remote)}"
                f"{self.consumers(remote.consumers)}"
            )
        by_stream: dict[Stream, list[tuple[int, Task]]] = {stream: [] for stream in Stream}
        for index, task in enumerate(plan.tasks):
            by_stream[task.stream].append((index, task))
        for stream, tasks in by_stream.items():
            if tasks:
                yield f"stream {stream}, {len(tasks)} tasks"
            segment = -1 if self.parted else 0
            for index, task in tasks:
                if task.segment != segment:
                    segment = task.segment
                    yield f"  segment {self.segment(segment)}"
                yield from self.task_lines(index, task)
        for register in plan.registers:
            if register.id not in self.printed:
                yield f"register of no task: {self.definition(register, '')}"

    def variable(self, variable: VariableDesc) -> str:
        return (
            f"variable {format_name(variable.name)}: {self.register(variable.register)}"
            f" {variable.dtype}{self.shape(variable.shape)} on {variable.placement}"
            f" {self.sbp(variable.sbp)} at {self.region(variable.region)}"
            f"{self.attrs(variable.attrs)}"
        )

    def task_lines(self, index: int, task: Task) -> Iterator[str]:
        spec = task.spec
        head = f"  [{index}] {format_id(task.id)} {task.kind} {format_name(task.name)}"
        known = self.sources and (task.source.file or task.source.line)
        source = f"  # {task.source}" if known else ""
        yield f"{head}{self.spec(task)}{source}"
        inputs, outputs = [""] * len(task.inputs), [""] * len(task.outputs)
        if isinstance(spec, ComputeSpec):
            inputs = self.boxes(task.inputs, spec.input_shapes, spec.input_regions)
            inputs = _with_pieces(inputs, spec.input_pieces)
            outputs = self.boxes(task.outputs, spec.output_shapes, spec.output_regions)
            outputs = _with_pieces(outputs, spec.output_pieces)
        elif isinstance(spec, SliceSpec):
            inputs = [f" as {position}" for position in range(len(inputs))]
        for register, box in zip(task.inputs, inputs, strict=True):
            yield f"{_INDENT}in  {self.register(register)}{box}"
        for register in task.controls_in:
            yield f"{_INDENT}wait {self.register(register)}"
        if isinstance(spec, SliceSpec):
            for piece in spec.pieces:
                yield (
                    f"{_INDENT}piece {piece.input} {self.region(piece.source)}"
                    f" -> {self.region(piece.target)}"
                )
        for word, registers, boxes in (
            ("out", task.outputs, outputs),
            ("signal", task.controls_out, [""] * len(task.controls_out)),
        ):
            for register, box in zip(registers, boxes, strict=True):
                desc = self.plan.register_by_id.get(register)
                if desc is None:
                    yield f"{_INDENT}{word} {self.register(register)}"
                    continue
                self.printed.add(register)
                origin = "" if desc.producer == task.id else f" from {self.task(desc.producer)}"
                yield f"{_INDENT}{word} {self.definition(desc, box)}{origin}"

    def segment(self, index: int) -> str:
        segments = self.plan.segments
        return str(segments[index]) if 0 <= index < len(segments) else str(index)

    def spec(self, task: Task) -> str:
        spec = task.spec
        if spec is None:
            return ""
        if isinstance(spec, ComputeSpec):
            ring = f" on communicator {spec.communicator}" if spec.lanes else ""
            return f" = {spec.kind}{self.attrs(spec.attrs)}{ring}"
        if isinstance(spec, CopySpec):
            return f" = read {self.region(spec.region)}"
        if isinstance(spec, SliceSpec):
            return " = copy" if spec.reduction is None else f" = {spec.reduction}"
        assert isinstance(spec, CollectiveSpec)
        reduction = "" if spec.reduction is None else f" {spec.reduction}"
        source = "" if spec.src_axis < 0 else f" from axis {spec.src_axis}"
        target = "" if spec.dst_axis < 0 else f" to axis {spec.dst_axis}"
        return f" = {spec.primitive}{reduction}{source}{target} on communicator {spec.communicator}"

    def boxes(
        self,
        registers: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        regions: tuple[Region, ...],
    ) -> list[str]:
        """Per register, the box that it is; empty where it is the whole global tensor."""
        if not len(registers) == len(shapes) == len(regions):
            return [f" of {shapes} at {regions}"] * len(registers)
        boxes = []
        for register, shape, region in zip(registers, shapes, regions, strict=True):
            desc = self.plan.register_by_id.get(register)
            if (
                desc is not None
                and desc.shape == shape
                and all(box == (0, extent) for box, extent in zip(region, shape, strict=False))
            ):
                boxes.append("")
            else:
                boxes.append(f" at {self.region(region)} of {self.shape(shape)}")
        return boxes

    def definition(self, register: RegisterDesc, box: str) -> str:
        head = (
            f"{self.register(register.id)} {format_id(register.id)}"
            f" {register.dtype}{self.shape(register.shape)}{box} {self.sbp(register.sbp)}"
            f" {register.nbytes} bytes, block {register.block} + {register.offset}"
        )
        parts = [head]
        if register.register_count != 1:
            parts.append(f", {register.register_count} slots")
        parts.append(_rate(register))
        if register.inplace_of != -1:
            word = "view of" if register.is_view else "overwrites"
            parts.append(f", {word} {self.register(register.inplace_of)}")
        elif register.is_view:
            parts.append(", view")
        if register.sync_id != -1:
            parts.append(f", sync {format_id(register.sync_id)}")
        parts.append(self.consumers(register.consumers))
        return "".join(parts)

    def consumers(self, tasks: tuple[int, ...]) -> str:
        return f" -> {', '.join(map(self.task, tasks))}" if tasks else ""

    def register(self, register: int) -> str:
        return self.registers.get(register) or format_id(register)

    def task(self, task: int) -> str:
        return self.tasks.get(task) or format_id(task)

    def attrs(self, attrs: Attrs) -> str:
        return "".join([f" {format_name(key)}={format_attr(value)}" for key, value in attrs])


def _rate(register: RegisterDesc | RemoteRegister) -> str:
    return ", per micro-batch" if register.per_microbatch else ""


def _with_pieces(boxes: list[str], pieces: tuple[int, ...]) -> list[str]:
    """Boxes with what micro-batches take of them; nothing where the task runs once per step."""
    if not pieces:
        return boxes
    if len(pieces) != len(boxes):
        return [f"{box}, pieces {pieces}" for box in boxes]
    return [
        f"{box}, whole" if axis == -1 else f"{box}, pieces along axis {axis}"
        for box, axis in zip(boxes, pieces, strict=True)
    ]


def _labels(prefix: str, named: list[tuple[int, str]]) -> dict[int, str]:
    """Short names by id: the name alone where it is unique, else with the id."""
    uses = Counter(name for _, name in named)
    labels = {}
    for number, name in named:
        label = prefix + format_name(name)
        labels[number] = label if uses[name] == 1 else f"{label}({format_id(number)})"
    return labels
