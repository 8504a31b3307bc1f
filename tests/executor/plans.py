"""Builds small plans by hand, for all ranks at once, from the real plan types.

`Sketch` gives every register its own bytes and fills in consumers, remote registers and sync ids,
as the compiler would; tests only say tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plancompiler.ir import DType, NdSbp, Placement, Reduction, SourceLine, freeze_attrs
from plancompiler.ir.pipeline import WHOLE_STEP, Segment, Slot
from plancompiler.ir.shard import Region, element_count, region_shape
from plancompiler.ir.task import Primitive, TaskKind, pack_register_id, pack_task_id, unpack_id
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
    VariableDesc,
)

CONTROL_SLOT = 31
ARENA, VARIABLES = 0, 1


def whole(shape: Sequence[int]) -> Region:
    """The region of a whole tensor."""
    return tuple((0, extent) for extent in shape)


@dataclass
class _Rank:
    tasks: list[Task] = field(default_factory=list)
    registers: dict[int, RegisterDesc] = field(default_factory=dict)
    communicators: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    variables: list[VariableDesc] = field(default_factory=list)
    outputs: list[OutputDesc] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0, 0])
    segments: list[Segment] = field(default_factory=list)
    slots: tuple[Slot, ...] = (Slot(0, 0),)

    @property
    def segment(self) -> Segment:
        """Where tasks are added."""
        return self.segments[-1] if self.segments else WHOLE_STEP


class Sketch:
    """Plans of `world_size` ranks under construction. Tasks are added in plan order."""

    def __init__(
        self, world_size: int, seed: int = 0, shared: bool = True, microbatches: int = 1
    ) -> None:
        self.microbatches = microbatches
        self.pieces: dict[int, int] = {}
        """Register → the axis along which micro-batches are its pieces."""
        self.world_size = world_size
        self.seed = seed
        self.shared = shared
        self.ranks = [_Rank() for _ in range(world_size)]

    def begin(self, rank: int, segment: Segment) -> None:
        """Tasks of a rank belong to this segment from now on."""
        self.ranks[rank].segments.append(segment)

    def follow(self, rank: int, slots: Sequence[tuple[Segment, int]]) -> None:
        """What a rank runs in a step: segments that it has begun, and micro-batches."""
        index = {segment: number for number, segment in enumerate(self.ranks[rank].segments)}
        self.ranks[rank].slots = tuple(Slot(index[segment], m) for segment, m in slots)

    def task(
        self,
        rank: int,
        family: int,
        kind: TaskKind,
        stream: Stream,
        spec: object,
        inputs: Sequence[int] = (),
        outputs: Sequence[tuple[Sequence[int], str]] = (),
        *,
        name: str = "",
        lane: int = 0,
        count: int = 1,
        block: int = ARENA,
        inplace_of: int = -1,
        once: bool = False,
        piece: int = 0,
    ) -> tuple[int, ...]:
        """Add a task; ids of its output registers. `count` is their number of slots.

        In a segment that runs for every micro-batch outputs have a version for each, pieces along
        axis `piece` (-1: not pieces), or one for all with `once`.
        """
        state = self.ranks[rank]
        per_microbatch = state.segment.kind.per_microbatch and not once
        task_id = pack_task_id(rank, family, lane)
        made = []
        for slot, (shape, dtype_name) in enumerate(outputs):
            shape, dtype = tuple(shape), DType.parse(dtype_name)
            register = pack_register_id(rank, family, lane, slot)
            nbytes = element_count(shape) * dtype.itemsize
            if inplace_of >= 0:
                old = state.registers[inplace_of]
                place, offset = old.block, old.offset
            else:
                place, offset = block, state.sizes[block]
                state.sizes[block] += -(-max(nbytes, 1) * count // 64) * 64
            state.registers[register] = RegisterDesc(
                register,
                f"r{rank}.{family}.{lane}.{slot}",
                shape,
                dtype,
                NdSbp(()),
                task_id,
                (),
                place,
                offset,
                nbytes,
                count,
                inplace_of,
                per_microbatch=per_microbatch,
            )
            self.pieces[register] = piece if per_microbatch else -1
            made.append(register)
        state.tasks.append(
            Task(
                task_id,
                kind,
                stream,
                name or f"{kind.value.lower()}_{family}",
                tuple(inputs),
                tuple(made),
                spec,
                source=SourceLine("sketch.py", family + 1),
                segment=max(0, len(state.segments) - 1),
            )
        )
        return tuple(made)

    # --- kinds of tasks -------------------------------------------------------------------------

    def compute(
        self,
        rank: int,
        family: int,
        kind: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[Sequence[int], str]],
        *,
        attrs: dict | None = None,
        stream: Stream = Stream.COMPUTE,
        task_kind: TaskKind = TaskKind.COMPUTE,
        **options: object,
    ) -> tuple[int, ...]:
        """An op on whole tensors, or on whole micro-batches of them."""
        state = self.ranks[rank]
        shapes_in = tuple(state.registers[one].shape for one in inputs)
        shapes_out = tuple(tuple(shape) for shape, _ in outputs)
        pieces_in: tuple[int, ...] = ()
        pieces_out: tuple[int, ...] = ()
        if state.segment.kind.per_microbatch:
            pieces_in = tuple(self.pieces[one] for one in inputs)
            made = -1 if options.get("once") else options.get("piece", 0)
            pieces_out = (made,) * len(outputs)
        spec = ComputeSpec(
            kind,
            freeze_attrs(attrs or {}),
            self._global(shapes_in, pieces_in),
            self._global(shapes_out, pieces_out),
            tuple(map(whole, shapes_in)),
            tuple(map(whole, shapes_out)),
            pieces_in,
            pieces_out,
        )
        return self.task(rank, family, task_kind, stream, spec, inputs, outputs, **options)

    def _global(
        self, shapes: Sequence[tuple[int, ...]], pieces: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(
                extent * self.microbatches if pieces and axis == pieces[number] else extent
                for axis, extent in enumerate(shape)
            )
            for number, shape in enumerate(shapes)
        )

    def input(
        self,
        rank: int,
        family: int,
        name: str,
        shape: Sequence[int],
        dtype: str = "float32",
        region: Region | None = None,
        **options: object,
    ) -> int:
        """This rank's region of a fed array, or of its first micro-batch."""
        box = region if region is not None else whole(shape)
        pieces = (0,) if self.ranks[rank].segment.kind.per_microbatch else ()
        spec = ComputeSpec(
            "input", freeze_attrs({"name": name}), (), (tuple(shape),), (), (box,), (), pieces
        )
        options.setdefault("stream", Stream.DATA)
        stream = options.pop("stream")
        return self.task(
            rank,
            family,
            TaskKind.INPUT,
            stream,
            spec,
            (),
            [(region_shape(box), dtype)],
            name=name,
            **options,
        )[0]

    def output(
        self, rank: int, family: int, name: str, register: int, *, finite: bool = False
    ) -> None:
        """Report a register."""
        self.compute(
            rank,
            family,
            "output",
            [register],
            [],
            attrs={"name": name, "finite": finite},
            task_kind=TaskKind.OUTPUT,
            name=name,
        )
        self.ranks[rank].outputs.append(OutputDesc(name, pack_task_id(rank, family), register))

    def variable(
        self,
        rank: int,
        family: int,
        name: str,
        shape: Sequence[int],
        init: str = "ones",
        init_args: tuple[float, ...] = (),
        dtype: str = "float32",
    ) -> int:
        """A variable, whole on this rank."""
        attrs = {"name": name, "init": init, "init_args": init_args}
        (register,) = self.compute(
            rank,
            family,
            "variable",
            [],
            [(shape, dtype)],
            attrs=attrs,
            task_kind=TaskKind.VARIABLE,
            block=VARIABLES,
            name=name,
        )
        self.ranks[rank].variables.append(
            VariableDesc(
                name,
                register,
                tuple(shape),
                DType.parse(dtype),
                Placement("cpu", [rank]),
                NdSbp.of(["B"]),
                whole(shape),
                freeze_attrs(attrs),
            )
        )
        return register

    def collective(
        self,
        ranks: Sequence[int],
        family: int,
        primitive: Primitive,
        inputs: dict[int, int],
        shapes: dict[int, Sequence[int]],
        dtype: str = "float32",
        *,
        reduction: Reduction | None = None,
        src_axis: int = -1,
        dst_axis: int = -1,
        stream: Stream = Stream.COLLECTIVE,
        in_place: bool = False,
        count: int = 1,
        piece: int = 0,
    ) -> dict[int, int]:
        """One collective on all its ranks; output registers by rank."""
        collective = {}
        for rank in ranks:
            state = self.ranks[rank]
            known = [members for members, _ in state.communicators]
            if tuple(ranks) not in known:
                state.communicators.append((tuple(ranks), []))
                known.append(tuple(ranks))
            index = known.index(tuple(ranks))
            state.communicators[index][1].append(family)
            (collective[rank],) = self.task(
                rank,
                family,
                TaskKind.COLLECTIVE_BOXING,
                stream,
                CollectiveSpec(primitive, index, reduction, src_axis, dst_axis),
                [inputs[rank]],
                [(shapes[rank], dtype)],
                inplace_of=inputs[rank] if in_place else -1,
                count=count,
                piece=piece,
            )
        return collective

    def copy(
        self,
        rank: int,
        family: int,
        source: int,
        region: Region | None = None,
        lane: int = 0,
        count: int = 1,
    ) -> int:
        """Read a box of another rank's register."""
        remote = self.ranks[unpack_id(source).rank].registers[source]
        box = region if region is not None else whole(remote.shape)
        return self.task(
            rank,
            family,
            TaskKind.COPY_COMM_NET,
            Stream.COPY,
            CopySpec(box),
            [source],
            [(region_shape(box), str(remote.dtype))],
            lane=lane,
            count=count,
            piece=self.pieces[source],
        )[0]

    def slice(
        self,
        rank: int,
        family: int,
        inputs: Sequence[int],
        shape: Sequence[int],
        dtype: str,
        pieces: Sequence[tuple[int, Region, Region]],
        reduction: Reduction | None = None,
        kind: TaskKind = TaskKind.SLICE_BOXING,
    ) -> int:
        """Put boxes together."""
        spec = SliceSpec(reduction, tuple(Piece(*piece) for piece in pieces))
        return self.task(rank, family, kind, Stream.COMPUTE, spec, inputs, [(shape, dtype)])[0]

    def step_end(self, rank: int, family: int) -> None:
        """A task that waits for the last task of every other stream but the one that runs ahead,
        in the rank's segment."""
        self.task(rank, family, TaskKind.STEP_END, Stream.COMPUTE, None)
        tasks = self.ranks[rank].tasks
        last = {task.stream: task for task in tasks if task.segment == tasks[-1].segment}
        for stream, task in last.items():
            if stream not in (Stream.COMPUTE, Stream.DATA):
                self.control(rank, unpack_id(task.id).family, family)

    def control(self, rank: int, before: int, after: int) -> None:
        """Let the task of family `after` wait for that of family `before`."""
        state = self.ranks[rank]
        register = pack_register_id(rank, before, 0, CONTROL_SLOT)
        segments = state.segments or [WHOLE_STEP]
        each = {
            segments[task.segment].kind.per_microbatch
            for task in state.tasks
            if unpack_id(task.id).family in (before, after)
        }
        ids = {pack_task_id(rank, before): "controls_out", pack_task_id(rank, after): "controls_in"}
        for position, task in enumerate(state.tasks):
            if task.id in ids:
                have = getattr(task, ids[task.id])
                if register not in have:
                    state.tasks[position] = replace(task, **{ids[task.id]: (*have, register)})
        state.registers.setdefault(
            register,
            RegisterDesc(
                register,
                f"control_{before}",
                (),
                DType.UINT8,
                NdSbp(()),
                pack_task_id(rank, before),
                (),
                -1,
                per_microbatch=each == {True},
            ),
        )

    # --- the end --------------------------------------------------------------------------------

    def build(self) -> dict[int, Plan]:
        """The plans of all ranks."""
        readers: dict[int, list[Task]] = {}
        for state in self.ranks:
            for task in state.tasks:
                for register in dict.fromkeys((*task.inputs, *task.controls_in)):
                    readers.setdefault(register, []).append(task)
        plans = {}
        for rank, state in enumerate(self.ranks):
            remote = {
                register: self._described(register, readers)
                for task in state.tasks
                for register in task.inputs
                if unpack_id(register).rank != rank
            }
            plans[rank] = Plan(
                "sketch",
                rank,
                self.world_size,
                self.seed,
                tuple(state.tasks),
                tuple(self._described(register, readers) for register in state.registers),
                tuple(
                    RemoteRegister(
                        one.id,
                        one.sync_id,
                        one.name,
                        one.shape,
                        one.dtype,
                        one.producer,
                        tuple(
                            task
                            for task in one.consumers
                            if unpack_id(task).rank != unpack_id(one.id).rank
                        ),
                        one.per_microbatch,
                    )
                    for one in remote.values()
                ),
                (
                    Block(ARENA, "arena", self.shared, state.sizes[ARENA]),
                    Block(VARIABLES, "variables", self.shared, state.sizes[VARIABLES]),
                ),
                tuple(
                    Communicator(ranks, tuple(families)) for ranks, families in state.communicators
                ),
                tuple(state.variables),
                tuple(state.outputs),
                schedule="sketch" if self.microbatches > 1 else "",
                microbatches=self.microbatches,
                segments=tuple(state.segments) or (WHOLE_STEP,),
                slots=state.slots,
            )
        return plans

    def _described(self, register: int, readers: dict[int, list[Task]]) -> RegisterDesc:
        home = unpack_id(register).rank
        tasks = readers.get(register, [])
        local = [task.id for task in tasks if unpack_id(task.id).rank == home]
        away = sorted(task.id for task in tasks if unpack_id(task.id).rank != home)
        candidates = [task.outputs[0] for task in tasks if unpack_id(task.id).rank != home]
        return replace(
            self.ranks[home].registers[register],
            consumers=(*local, *away),
            sync_id=max(candidates, default=-1),
        )


# --- plans that several tests use -----------------------------------------------------------------


def chain(count: int = 1) -> dict[int, Plan]:
    """One rank: y = relu(x @ w), with x on the data stream."""
    sketch = Sketch(1)
    x = sketch.input(0, 0, "x", (3, 4), count=count)
    w = sketch.variable(0, 1, "w", (4, 2), "normal", (0.0, 1.0))
    (h,) = sketch.compute(0, 2, "matmul", [x, w], [((3, 2), "float32")])
    (y,) = sketch.compute(0, 3, "relu", [h], [((3, 2), "float32")])
    sketch.output(0, 4, "y", y)
    sketch.step_end(0, 5)
    return sketch.build()


def data_parallel(world_size: int = 2, rows: int = 6, columns: int = 4) -> dict[int, Plan]:
    """Each rank adds its rows of x to a running sum w: w += sum over ranks; reports w."""
    sketch = Sketch(world_size)
    ranks = range(world_size)
    xs, ws, sums = {}, {}, {}
    per_rank = rows // world_size
    for rank in ranks:
        box = ((rank * per_rank, (rank + 1) * per_rank), (0, columns))
        xs[rank] = sketch.input(rank, 0, "x", (rows, columns), region=box, count=2)
        ws[rank] = sketch.variable(rank, 1, "w", (columns,), "zeros")
        (sums[rank],) = sketch.compute(
            rank,
            2,
            "sum",
            [xs[rank]],
            [((columns,), "float32")],
            attrs={"axes": (0,), "keepdims": False},
        )
    totals = sketch.collective(
        ranks,
        3,
        Primitive.ALL_REDUCE,
        sums,
        dict.fromkeys(ranks, (columns,)),
        reduction=Reduction.SUM,
    )
    for rank in ranks:
        (new,) = sketch.compute(
            rank,
            4,
            "add",
            [ws[rank], totals[rank]],
            [((columns,), "float32")],
            inplace_of=ws[rank],
        )
        sketch.output(rank, 5, f"w{rank}", new, finite=True)
        sketch.step_end(rank, 6)
    return sketch.build()


def pipeline(stages: int = 2, count: int = 1) -> dict[int, Plan]:
    """x on rank 0, doubled on each rank (x + x), handed to the next by CopyCommNet."""
    sketch = Sketch(stages)
    value = sketch.input(0, 0, "x", (5, 3))
    for rank in range(stages):
        if rank:
            value = sketch.copy(rank, 3 * rank, value)
        (value,) = sketch.compute(
            rank, 3 * rank + 1, "add", [value, value], [((5, 3), "float32")], count=count
        )
    sketch.output(stages - 1, 3 * stages, "y", value)
    for rank in range(stages):
        sketch.step_end(rank, 3 * stages + 1)
    return sketch.build()


def with_op(
    kind: str, world_size: int = 2, on_rank: int = 0, attrs: dict | None = None
) -> dict[int, Plan]:
    """All ranks all-reduce a vector x; on one of them it first goes through an op.

    The others take the maximum of x and itself, which is x.
    """
    sketch = Sketch(world_size)
    ranks = range(world_size)
    values = {}
    for rank in ranks:
        x = sketch.input(rank, 0, "x", (3,))
        chosen = (kind, [x]) if rank == on_rank else ("maximum", [x, x])
        (values[rank],) = sketch.compute(
            rank,
            1,
            *chosen,
            [((3,), "float32")],
            attrs=attrs if rank == on_rank else None,
            name="the_op",
        )
    totals = sketch.collective(
        ranks,
        2,
        Primitive.ALL_REDUCE,
        values,
        dict.fromkeys(ranks, (3,)),
        reduction=Reduction.SUM,
    )
    for rank in ranks:
        sketch.output(rank, 3, f"y{rank}", totals[rank], finite=True)
        sketch.step_end(rank, 4)
    return sketch.build()


def failing(world_size: int = 2, on_rank: int = 1, step: int = 1) -> dict[int, Plan]:
    """`with_op` of a kernel that raises in one step."""
    return with_op("test_fail", world_size, on_rank, {"step": step})
