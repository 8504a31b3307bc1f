"""Small plans written by hand, and edits of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from plancompiler.ir import BROADCAST, DType, NdSbp, Placement, Reduction, SourceLine, Split
from plancompiler.ir.pipeline import WHOLE_STEP, Segment, Slot
from plancompiler.ir.shard import Region, element_count, rank_region
from plancompiler.ir.task import (
    Primitive,
    TaskKind,
    family_of,
    pack_register_id,
    pack_task_id,
    unpack_id,
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

ARENA, VARIABLES = 0, 1
MESH = Placement("cpu", [0, 1], ("dp",))
WHOLE = NdSbp((BROADCAST,))
ROWS = NdSbp((Split(0),))
CONTROL_SLOT = 31
STEP_END_FAMILY = 1000


def whole(shape: tuple[int, ...]) -> Region:
    """The box of all of a tensor."""
    return tuple((0, extent) for extent in shape)


@dataclass
class PlanBuilder:
    """Collects tasks and registers; consumers, sizes and offsets follow in `build`."""

    rank: int
    world_size: int = 2
    tasks: list[Task] = field(default_factory=list)
    registers: list[dict[str, Any]] = field(default_factory=list)
    remote_registers: list[RemoteRegister] = field(default_factory=list)
    communicators: tuple[Communicator, ...] = ()
    variables: list[VariableDesc] = field(default_factory=list)
    outputs: list[OutputDesc] = field(default_factory=list)
    schedule: str = ""
    microbatches: int = 1
    segments: tuple[Segment, ...] = (WHOLE_STEP,)
    slots: tuple[Slot, ...] = (Slot(0, 0),)
    segment: int = 0
    """Where the next tasks go."""
    scratch: int = 0
    """Bytes at the start of the arena that only registers with an offset use."""
    axes: dict[int, int] = field(default_factory=dict)
    """Register → axis of its pieces; the first unless listed."""

    @property
    def repeated(self) -> bool:
        """Whether the next tasks run once per micro-batch."""
        return self.segments[self.segment].kind.per_microbatch

    def id(self, family: int, lane: int = 0, slot: int = 0) -> int:
        """An id of this rank."""
        return pack_register_id(self.rank, family, lane, slot)

    def register(
        self,
        family: int,
        name: str,
        shape: tuple[int, ...] = (),
        *,
        lane: int = 0,
        slot: int = 0,
        block: int = ARENA,
        **others: Any,
    ) -> int:
        """An output register of the task of `family`; float32, whole, one slot unless told."""
        key = self.id(family, lane, slot)
        self.registers.append(
            {
                "id": key,
                "name": name,
                "shape": shape,
                "dtype": DType.FLOAT32,
                "sbp": WHOLE,
                "producer": pack_task_id(self.rank, family, lane),
                "block": block,
                "per_microbatch": self.repeated,
                **others,
            }
        )
        return key

    def control(self, family: int, name: str) -> int:
        """A control register of the task of `family`."""
        return self.register(family, name, slot=CONTROL_SLOT, block=-1, sbp=NdSbp(()))

    def task(
        self,
        family: int,
        kind: TaskKind,
        name: str,
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
        spec: TaskSpec = None,
        *,
        lane: int = 0,
        stream: Stream = Stream.COMPUTE,
        controls_in: tuple[int, ...] = (),
        controls_out: tuple[int, ...] = (),
    ) -> int:
        """One more task in plan order; its id."""
        key = pack_task_id(self.rank, family, lane)
        source = SourceLine("job.py", 10 + family)
        self.tasks.append(
            Task(
                key,
                kind,
                stream,
                name,
                inputs,
                outputs,
                spec,
                controls_in,
                controls_out,
                source,
                self.segment,
            )
        )
        return key

    def compute(
        self,
        family: int,
        name: str,
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
        *,
        op: str = "relu",
        kind: TaskKind = TaskKind.COMPUTE,
        attrs: tuple[tuple[str, Any], ...] = (),
        **others: Any,
    ) -> int:
        """A task with an op on its registers as they are (their local shape is the global one)."""
        shapes = {entry["id"]: entry["shape"] for entry in self.registers}
        ins, outs = (tuple(shapes[key] for key in keys) for keys in (inputs, outputs))
        spec = ComputeSpec(op, attrs, ins, outs, tuple(map(whole, ins)), tuple(map(whole, outs)))
        if self.repeated:
            pieces = [tuple(map(self._axis, keys)) for keys in (inputs, outputs)]
            spec = replace(
                spec,
                input_shapes=tuple(map(self._full, inputs)),
                output_shapes=tuple(map(self._full, outputs)),
                input_pieces=pieces[0],
                output_pieces=pieces[1],
            )
        return self.task(family, kind, name, inputs, outputs, spec, **others)

    def _axis(self, key: int) -> int:
        entry = next(entry for entry in self.registers if entry["id"] == key)
        return self.axes.get(key, 0) if entry["per_microbatch"] else -1

    def _full(self, key: int) -> tuple[int, ...]:
        """Shape of all pieces of a register."""
        shape = next(entry["shape"] for entry in self.registers if entry["id"] == key)
        axis = self._axis(key)
        return tuple(
            extent * self.microbatches if at == axis else extent for at, extent in enumerate(shape)
        )

    def end(self) -> None:
        """The end of the segment: waits for the tails of the collective and copy streams."""
        tails = {task.stream: task for task in self.tasks if task.segment == self.segment}
        waits = []
        for stream in (Stream.COLLECTIVE, Stream.COPY):
            if stream in tails:
                tail = tails[stream]
                waits.append(
                    self.register(
                        family_of(tail.id),
                        f"{tail.name}:control",
                        lane=unpack_id(tail.id).lane,
                        slot=CONTROL_SLOT,
                        block=-1,
                        sbp=NdSbp(()),
                    )
                )
                at = self.tasks.index(tail)
                self.tasks[at] = replace(tail, controls_out=(waits[-1],))
        self.task(
            STEP_END_FAMILY,
            TaskKind.STEP_END,
            f"{self.segments[self.segment]} end",
            lane=self.segment,
            controls_in=tuple(waits),
        )

    def build(self, peak_live_bytes: int = 0) -> Plan:
        """The plan; registers without an offset lie one after another."""
        ends = [self.scratch, 0]
        results: dict[int, RegisterDesc] = {}
        for entry in self.registers:
            readers = [
                task.id for task in self.tasks if entry["id"] in (*task.inputs, *task.controls_in)
            ]
            away = entry.pop("remote_consumers", ())
            register = RegisterDesc(consumers=(*readers, *away), **entry)
            nbytes = element_count(register.shape) * register.dtype.itemsize
            if register.is_control:
                results[register.id] = register
                continue
            slots = register.register_count
            nbytes = -(-nbytes // 64) * 64 if slots > 1 else nbytes
            if register.inplace_of != -1:
                offset = results[register.inplace_of].offset
            else:
                offset = entry.get("offset", ends[register.block])
            ends[register.block] = max(
                ends[register.block], -(-(offset + slots * nbytes) // 64) * 64
            )
            results[register.id] = replace(register, offset=offset, nbytes=nbytes)
        return Plan(
            job="pair",
            rank=self.rank,
            world_size=self.world_size,
            seed=7,
            tasks=tuple(self.tasks),
            registers=tuple(results[key] for key in sorted(results)),
            remote_registers=tuple(self.remote_registers),
            blocks=(
                Block(ARENA, "arena", True, ends[ARENA]),
                Block(VARIABLES, "variables", False, ends[VARIABLES]),
            ),
            communicators=self.communicators,
            variables=tuple(self.variables),
            outputs=tuple(self.outputs),
            peak_live_bytes=peak_live_bytes,
            schedule=self.schedule,
            microbatches=self.microbatches,
            segments=self.segments,
            slots=self.slots,
        )


def pair_plan(rank: int) -> Plan:
    """One of two ranks that train a weight together: every kind of task and register occurs."""
    other = 1 - rank
    build = PlanBuilder(rank, communicators=(Communicator((0, 1), (6, 8)),))
    x = build.register(0, "x", (2, 8), sbp=ROWS, register_count=2)
    build.task(
        0,
        TaskKind.INPUT,
        "x",
        (),
        (x,),
        ComputeSpec("input", (("name", "x"),), (), ((4, 8),), (), (_rows(rank, (4, 8)),)),
        stream=Stream.DATA,
    )
    w = build.register(1, "w", (8, 4), block=VARIABLES)
    build.compute(1, "w", (), (w,), op="variable", kind=TaskKind.VARIABLE)
    build.variables.append(
        VariableDesc(
            "w", w, (8, 4), DType.FLOAT32, MESH, WHOLE, whole((8, 4)), (("init", "uniform"),)
        )
    )
    h = build.register(2, "h", (2, 4), sbp=ROWS)
    build.task(
        2,
        TaskKind.COMPUTE,
        "matmul",
        (x, w),
        (h,),
        ComputeSpec(
            "matmul",
            (("transpose_b", False),),
            ((4, 8), (8, 4)),
            ((4, 4),),
            (_rows(rank, (4, 8)), whole((8, 4))),
            (_rows(rank, (4, 4)),),
        ),
    )
    a = build.register(3, "a", (2, 4), sbp=ROWS, inplace_of=h)
    build.compute(3, "relu", (h,), (a,))
    v = build.register(4, "v", (8,), sbp=ROWS, inplace_of=a, is_view=True)
    build.compute(4, "flatten", (a,), (v,), op="reshape")
    g = build.register(5, "g", (8, 4))
    build.compute(5, "gradient", (x, a, v), (g,), op="contract")
    r = build.register(6, "g:all_reduce", (8, 4))
    reduce = CollectiveSpec(Primitive.ALL_REDUCE, 0, Reduction.SUM)
    collective = {"stream": Stream.COLLECTIVE}
    build.task(6, TaskKind.COLLECTIVE_BOXING, "g all_reduce", (g,), (r,), reduce, **collective)
    s = build.register(7, "s", ())
    build.compute(7, "sum", (v,), (s,), op="sum")
    loss = build.register(8, "loss", ())
    done = () if rank == 0 else (build.control(8, "loss:control"),)
    build.task(
        8,
        TaskKind.COLLECTIVE_BOXING,
        "s all_reduce",
        (s,),
        (loss,),
        reduce,
        controls_out=done,
        **collective,
    )
    copy_here = pack_task_id(rank, 10, other)
    copy_there = pack_task_id(other, 10, rank)
    b = build.register(
        9, "b", (2, 4), sbp=ROWS, remote_consumers=(copy_there,), sync_id=copy_there + 1
    )
    build.compute(9, "scale", (a,), (b,), op="mul_scalar", attrs=(("scalar", 0.5),))
    away = RemoteRegister(
        id=pack_register_id(other, 9),
        sync_id=copy_here + 1,
        name="b",
        shape=(2, 4),
        dtype=DType.FLOAT32,
        producer=pack_task_id(other, 9),
        consumers=(copy_here,),
    )
    build.remote_registers.append(away)
    c = build.register(10, "b:copy", (2, 3), lane=other, sbp=ROWS)
    build.task(
        10,
        TaskKind.COPY_COMM_NET,
        f"b from rank {other}",
        (away.id,),
        (c,),
        CopySpec(((0, 2), (1, 4))),
        lane=other,
        stream=Stream.COPY,
    )
    m = build.register(11, "b:moved", (4, 3))
    build.task(
        11,
        TaskKind.SLICE_BOXING,
        "b put together",
        (b, c),
        (m,),
        SliceSpec(
            None,
            (
                Piece(0, ((0, 2), (1, 4)), ((2 * rank, 2 * rank + 2), (0, 3))),
                Piece(1, ((0, 2), (0, 3)), ((2 * other, 2 * other + 2), (0, 3))),
            ),
        ),
    )
    n = build.register(12, "w:next", (8, 4), block=VARIABLES, inplace_of=w)
    build.compute(12, "sgd", (w, r, m), (n,), op="sgd_update", attrs=(("lr", 0.1),))
    if rank == 0:
        build.outputs.append(
            OutputDesc("loss", build.compute(13, "out", (loss,), kind=TaskKind.OUTPUT), loss)
        )
    build.task(STEP_END_FAMILY, TaskKind.STEP_END, "step_end", controls_in=done)
    return build.build()


def _rows(rank: int, shape: tuple[int, ...]) -> Region:
    return rank_region(shape, MESH, ROWS, rank)


def pair_plans() -> dict[int, Plan]:
    """Both ranks' plans."""
    return {rank: pair_plan(rank) for rank in (0, 1)}


def task_named(plan: Plan, name: str) -> Task:
    """The task of that name."""
    return next(task for task in plan.tasks if task.name == name)


def register_named(plan: Plan, name: str) -> RegisterDesc:
    """The register of that name."""
    return next(register for register in plan.registers if register.name == name)


def edit_task(plan: Plan, name: str, /, **changes: Any) -> Plan:
    """The plan with one task changed."""
    return replace(
        plan,
        tasks=tuple(replace(task, **changes) if task.name == name else task for task in plan.tasks),
    )


def edit_register(plan: Plan, name: str, /, **changes: Any) -> Plan:
    """The plan with one register changed."""
    return replace(
        plan,
        registers=tuple(
            replace(register, **changes) if register.name == name else register
            for register in plan.registers
        ),
    )


def edit_remote(plan: Plan, **changes: Any) -> Plan:
    """The plan with its first remote register changed."""
    first, *others = plan.remote_registers
    return replace(plan, remote_registers=(replace(first, **changes), *others))


def edit_spec(plan: Plan, name: str, /, **changes: Any) -> Plan:
    """The plan with one task's spec changed."""
    return edit_task(plan, name, spec=replace(task_named(plan, name).spec, **changes))


def without_task(plan: Plan, name: str) -> Plan:
    """The plan without a task, with the registers that it made and without its name as a reader."""
    gone = task_named(plan, name)
    made = {*gone.outputs, *gone.controls_out}
    return replace(
        plan,
        tasks=tuple(task for task in plan.tasks if task is not gone),
        registers=tuple(
            replace(register, consumers=tuple(key for key in register.consumers if key != gone.id))
            for register in plan.registers
            if register.id not in made
        ),
        remote_registers=tuple(
            remote for remote in plan.remote_registers if remote.id not in gone.inputs
        ),
    )


def moved_task(plan: Plan, name: str, before: str) -> Plan:
    """The plan with one task moved before another in plan order."""
    task = task_named(plan, name)
    tasks = [other for other in plan.tasks if other is not task]
    tasks.insert(tasks.index(task_named(plan, before)), task)
    return replace(plan, tasks=tuple(tasks))
