"""`Plan`: everything one rank needs to run a step, as frozen data.

A plan stands alone: tasks with their streams and order, register descriptors with their memory,
communicators, variables and outputs. Ids are those of `plancompiler.ir.task`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from plancompiler.ir import (
    UNKNOWN_SOURCE,
    Attrs,
    DType,
    NdSbp,
    Placement,
    Reduction,
    SourceLine,
)
from plancompiler.ir.pipeline import WHOLE_STEP, Segment, Slot
from plancompiler.ir.shard import Region
from plancompiler.ir.task import Primitive, TaskKind


class Stream(enum.Enum):
    """Where tasks run in plan order. One thread (or CUDA stream) each."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    COPY = "copy"
    DATA = "data"
    COPY_HD = "copy_hd"
    """Copies between host and device."""
    GRADIENT = "gradient"
    """Reductions of gradients, for which backward does not wait."""
    PARAMETER = "parameter"
    """Gathers of parameters, which are known before what computes with them."""

    def __str__(self) -> str:
        return str(self.value)


COLLECTIVE_STREAMS = {
    str(stream): stream
    for stream in (Stream.COLLECTIVE, Stream.GRADIENT, Stream.PARAMETER, Stream.COMPUTE)
}
"""Streams that may run collectives, by name."""


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous piece of a rank's memory."""

    index: int
    purpose: str
    """`arena` (reused within the step) or `variables` (kept between steps)."""
    shared: bool
    """Read by other ranks, so it lives in memory that other processes can map."""
    nbytes: int
    device: str = "cpu"
    """Whose memory it is: a device type of placements. What is on no device is read by the host."""


@dataclass(frozen=True, slots=True)
class RegisterDesc:
    """A register descriptor: the output buffers of one task, with one or more slots in memory.

    Version v lies in slot k = v mod register_count, at `offset + k * nbytes` of its block. Versions
    are numbered over the run: by step, or by step * microbatches + microbatch.
    """

    id: int
    name: str
    """The value's name in the job."""
    shape: tuple[int, ...]
    """Local shape."""
    dtype: DType
    sbp: NdSbp
    """Layout of the global value on its placement (for reading; the local shape already follows).
    """
    producer: int
    """Task id."""
    consumers: tuple[int, ...]
    """Task ids in plan order; tasks of other ranks (CopyCommNet) included, last, by id."""
    block: int
    """Index of the memory block; -1 for a register without bytes (control)."""
    offset: int = 0
    """Bytes from the start of the block; aligned to 64."""
    nbytes: int = 0
    """Bytes of one slot."""
    register_count: int = 1
    """Slots: how many versions the producer may run ahead of its consumers."""
    inplace_of: int = -1
    """Register whose memory this one aliases (same bytes: a view, a mutation, or in place)."""
    sync_id: int = -1
    """The id all ranks know a register by that crosses ranks: the greatest candidate of its
    CopyCommNet consumers. -1 for a register that stays on its rank (known by its own id)."""
    is_view: bool = False
    """With `inplace_of`: the producer leaves the bytes as they are. Without, it overwrites them."""
    per_microbatch: bool = False
    """Whether each micro-batch has a version of its own; else each step has one."""

    @property
    def is_control(self) -> bool:
        return self.block < 0


@dataclass(frozen=True, slots=True)
class RemoteRegister:
    """A register of another rank that a CopyCommNet or SendRecv task of this rank reads."""

    id: int
    sync_id: int
    name: str
    shape: tuple[int, ...]
    """Local shape on its own rank."""
    dtype: DType
    producer: int
    consumers: tuple[int, ...]
    """CopyCommNet task ids of all ranks that read it, by id."""
    per_microbatch: bool = False
    """As in RegisterDesc."""


@dataclass(frozen=True, slots=True)
class ComputeSpec:
    """One op on this rank's shards (kinds Compute, Input, Variable, Output)."""

    kind: str
    attrs: Attrs
    input_shapes: tuple[tuple[int, ...], ...]
    """Global shapes."""
    output_shapes: tuple[tuple[int, ...], ...]
    input_regions: tuple[Region, ...]
    """The box of the global tensor that each local array is (for the first micro-batch)."""
    output_regions: tuple[Region, ...]
    input_pieces: tuple[int, ...] = ()
    """Per input, the axis along which micro-batches are its pieces, -1 for the whole; empty where
    the task runs once per step on whole tensors."""
    output_pieces: tuple[int, ...] = ()
    communicator: int = -1
    """Index into the plan's communicators of the ring in which inputs go round (`ops.ring`); -1
    where none do."""
    lanes: int = 0
    """How many of the outputs, the last ones, are no results of the op but the memory of what goes
    round; peers read it."""


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One collective: all members of the communicator run it together. A fused one does the same
    to several values: input i to output i.

    Register shapes give the sizes: along `src_axis`, all_gather and all_to_all put member i's
    piece at `balanced_range(extent of the output, members, i)`; along `dst_axis`, reduce_scatter
    and all_to_all take the piece at `balanced_range(extent of the input, members, i)`.
    """

    primitive: Primitive
    """all_reduce, reduce_scatter, all_gather or all_to_all."""
    communicator: int
    """Index into the plan's communicators."""
    reduction: Reduction | None = None
    src_axis: int = -1
    """Tensor axis that is split before (all_gather, all_to_all)."""
    dst_axis: int = -1
    """Tensor axis that is split after (reduce_scatter, all_to_all)."""


@dataclass(frozen=True, slots=True)
class CopySpec:
    """CopyCommNet, SendRecv: read a box of another rank's register into this task's output."""

    region: Region
    """In local coordinates of the remote register."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a SliceBoxing: a box of an input goes to a box of the output."""

    input: int
    """Position in the task's inputs."""
    source: Region
    """In the input register's local coordinates."""
    target: Region
    """In the output register's local coordinates."""


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """SliceBoxing, BoxingZeros, BoxingIdentity, CopyHd: fill the output from boxes of local
    registers.

    Where `reduction` is set the output starts as the reduction's identity and pieces are combined
    (add mode); else pieces are copied and cover the output.
    """

    reduction: Reduction | None
    pieces: tuple[Piece, ...]


TaskSpec = ComputeSpec | CollectiveSpec | CopySpec | SliceSpec | None


def communicator_of(spec: TaskSpec) -> int | None:
    """Index of the communicator whose members run a task together; None for other tasks."""
    if isinstance(spec, CollectiveSpec):
        return spec.communicator
    if isinstance(spec, ComputeSpec) and spec.lanes:
        return spec.communicator
    return None


def exchanged(spec: TaskSpec, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, ...]:
    """Those of the registers of a task that its communicator's members may read."""
    if isinstance(spec, CollectiveSpec):
        return (*inputs, *outputs)
    if isinstance(spec, ComputeSpec) and spec.lanes:
        return tuple(outputs[-spec.lanes :])
    return ()


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work of one rank, run once for each slot of its segment."""

    id: int
    kind: TaskKind
    stream: Stream
    name: str
    """The op's name, or for transport the value's name and what is done to it."""
    inputs: tuple[int, ...]
    """Register ids, in the op's order (a register may occur twice)."""
    outputs: tuple[int, ...]
    spec: TaskSpec
    controls_in: tuple[int, ...] = ()
    """Control registers to wait for."""
    controls_out: tuple[int, ...] = ()
    """Control registers this task makes."""
    source: SourceLine = UNKNOWN_SOURCE
    segment: int = 0
    """Index into the plan's segments."""


class Group(NamedTuple):
    """Ranks that run collectives together, and the stream on which each of them does."""

    ranks: tuple[int, ...]
    stream: Stream

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.ranks))} on stream {self.stream}"


@dataclass(frozen=True, slots=True)
class Communicator:
    """Ranks that run collectives together, and the order of those (family numbers).

    All of them run on one stream: where some ranks have collectives on several streams, they have a
    communicator for each.
    """

    ranks: tuple[int, ...]
    families: tuple[int, ...]
    stream: Stream = Stream.COLLECTIVE

    @property
    def group(self) -> Group:
        """What tells the communicators of a plan apart, and is the same on all its ranks."""
        return Group(self.ranks, self.stream)


@dataclass(frozen=True, slots=True)
class VariableDesc:
    """A tensor that lives from step to step."""

    name: str
    """Name in checkpoints."""
    register: int
    shape: tuple[int, ...]
    """Global shape."""
    dtype: DType
    placement: Placement
    sbp: NdSbp
    region: Region
    """The box of the global tensor that this rank holds."""
    attrs: Attrs
    """Those of the `variable` op: `init` and its arguments among them."""


@dataclass(frozen=True, slots=True)
class OutputDesc:
    """A value that this rank reports after each step."""

    name: str
    task: int
    register: int


@dataclass(frozen=True)
class Plan:
    """One rank's plan."""

    job: str
    rank: int
    world_size: int
    seed: int
    tasks: tuple[Task, ...]
    """In plan order: the global order restricted to this rank."""
    registers: tuple[RegisterDesc, ...]
    remote_registers: tuple[RemoteRegister, ...]
    blocks: tuple[Block, ...]
    communicators: tuple[Communicator, ...]
    variables: tuple[VariableDesc, ...]
    outputs: tuple[OutputDesc, ...]
    peak_live_bytes: int = 0
    """Lower bound of the arena bytes: the most that is alive at once."""
    schedule: str = ""
    """Name of the pipeline schedule; empty for a step without micro-batches."""
    microbatches: int = 1
    segments: tuple[Segment, ...] = (WHOLE_STEP,)
    """The parts of a step in which this rank has tasks, in plan order."""
    slots: tuple[Slot, ...] = (Slot(0, 0),)
    """What every stream of this rank runs in a step, one after another."""

    @cached_property
    def register_by_id(self) -> dict[int, RegisterDesc]:
        return {register.id: register for register in self.registers}

    @cached_property
    def remote_register_by_id(self) -> dict[int, RemoteRegister]:
        return {register.id: register for register in self.remote_registers}

    @cached_property
    def task_by_id(self) -> dict[int, Task]:
        return {task.id: task for task in self.tasks}

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to do, as there are more ranks than the job needs."""
        return all(task.kind is TaskKind.STEP_END for task in self.tasks)

    @property
    def device(self) -> str:
        """Device type of this rank: where its ops run."""
        devices = {block.device for block in self.blocks}
        return next(iter(sorted(devices - {"cpu"})), "cpu")

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas (variables not included)."""
        return sum(block.nbytes for block in self.blocks if block.purpose == "arena")
