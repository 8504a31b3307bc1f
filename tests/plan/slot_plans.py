"""Random plans of several micro-batches on one rank, and an oracle that runs them.

Streams follow the slots as threads, in any interleaving that data and credits allow; every 64 bytes
of memory remember which version of which value was last written there.
"""

from __future__ import annotations

import random
from dataclasses import replace

from plancompiler.ir import BROADCAST, DType, NdSbp
from plancompiler.ir.pipeline import Pipeline, Slot, in_flight
from plancompiler.ir.task import CONTROL_SLOT, TaskKind, pack_register_id, pack_task_id
from plancompiler.plan.plan import Block, Plan, RegisterDesc, Stream, Task

STEPS = 3
LINE = 64
"""Bytes of every register."""


def random_plan(seed: int) -> Plan:
    """A few tasks per segment on any stream; some registers are moved onto others' bytes.

    All rules but those about memory hold.
    """
    return _Random(random.Random(seed)).plan()


class _Random:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        stages, microbatches = chance.randint(2, 3), chance.randint(2, 4)
        schedule = chance.choice(["gpipe", "1f1b", "zero_bubble"])
        pipeline = Pipeline(schedule, microbatches, stages, stages)
        named = pipeline.slots(chance.randrange(stages))
        present = sorted({slot.segment for slot in named})
        self.schedule, self.microbatches = schedule, microbatches
        self.segments = tuple(pipeline.segments[segment] for segment in present)
        self.slots = tuple(Slot(present.index(slot.segment), slot.microbatch) for slot in named)
        self.tasks: list[Task] = []
        self.registers: dict[int, RegisterDesc] = {}
        self.root: dict[int, int] = {}

    def plan(self) -> Plan:
        for segment in range(len(self.segments)):
            for _ in range(self.chance.randint(1, 4)):
                self.add_task(segment)
            self.add_end(segment)
        for _ in range(self.chance.randint(0, 3)):
            self.add_control()
        self.close_registers()
        self.place()
        return Plan(
            "random", 0, 1, 0, tuple(self.tasks), tuple(self.registers.values()), (),
            (Block(0, "arena", False, 1 << 20),), (), (), (),
            schedule=self.schedule, microbatches=self.microbatches, segments=self.segments,
            slots=self.slots,
        )  # fmt: skip

    def repeated(self, segment: int) -> bool:
        return self.segments[segment].kind.per_microbatch

    def segment_of(self, register: RegisterDesc) -> int:
        return next(task.segment for task in self.tasks if task.id == register.producer)

    def add_task(self, segment: int) -> None:
        chance, family = self.chance, len(self.tasks)
        streams = [Stream.COMPUTE] * 3 + [Stream.COLLECTIVE, Stream.COPY, Stream.DATA]
        stream = chance.choice(streams)
        repeated = self.repeated(segment)
        # A task may read what is made as often, and if it is repeated what was made before all.
        known = [
            one
            for one in self.registers.values()
            if not one.is_control
            and (one.per_microbatch or not repeated or not self.repeated(self.segment_of(one)))
            and (repeated or not one.per_microbatch)
        ]
        known = [] if stream is Stream.DATA else known[-6:]
        inputs = chance.sample(known, min(len(known), chance.choice([0, 1, 1, 2, 2])))
        collects = repeated and chance.random() < 0.15
        taken = -1
        if inputs and not collects and chance.random() < 0.2:
            old = inputs[0]
            if old.per_microbatch is repeated and self.root[old.id] >= 0:
                taken = old.id
        key = pack_register_id(0, family)
        self.registers[key] = RegisterDesc(
            id=key,
            name=f"r{family}",
            shape=(LINE,),
            dtype=DType.UINT8,
            sbp=NdSbp((BROADCAST,)),
            producer=pack_task_id(0, family),
            consumers=(),
            block=0,
            nbytes=LINE,
            inplace_of=taken,
            is_view=taken >= 0 and chance.random() < 0.4,
            per_microbatch=repeated and not collects,
        )
        self.root[key] = self.root.get(taken, key)
        reads = tuple(one.id for one in inputs)
        self.append(TaskKind.COMPUTE, stream, f"t{family}", reads, (key,), segment)

    def append(
        self,
        kind: TaskKind,
        stream: Stream,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        segment: int,
    ) -> None:
        key = pack_task_id(0, len(self.tasks))
        self.tasks.append(Task(key, kind, stream, name, inputs, outputs, None, segment=segment))

    def add_end(self, segment: int) -> None:
        tails = {
            task.stream: place for place, task in enumerate(self.tasks) if task.segment == segment
        }
        name = f"{self.segments[segment]} end"
        self.append(TaskKind.STEP_END, Stream.COMPUTE, name, (), (), segment)
        for stream in (Stream.COLLECTIVE, Stream.COPY):
            if stream in tails:
                self.control(tails[stream], len(self.tasks) - 1)

    def add_control(self) -> None:
        """An edge between tasks that run as often, in one segment or to a later one."""
        first, last = sorted(self.chance.sample(range(len(self.tasks)), 2))
        segments = self.tasks[first].segment, self.tasks[last].segment
        if self.repeated(segments[0]) is self.repeated(segments[1]):
            self.control(first, last)

    def control(self, before: int, after: int) -> None:
        task = self.tasks[before]
        key = pack_register_id(0, before, 0, CONTROL_SLOT)
        self.registers[key] = RegisterDesc(
            key, f"c{before}", (), DType.UINT8, NdSbp(()), task.id, (), -1,
            per_microbatch=self.repeated(task.segment),
        )  # fmt: skip
        self.tasks[before] = replace(task, controls_out=(key,))
        waiting = self.tasks[after]
        if key not in waiting.controls_in:
            self.tasks[after] = replace(waiting, controls_in=(*waiting.controls_in, key))

    def close_registers(self) -> None:
        """Consumers, and as many slots as micro-batches are in flight, or one more."""
        place = {task.id: at for at, task in enumerate(self.tasks)}
        last: dict[int, int] = {}
        for key, register in self.registers.items():
            readers = [task for task in self.tasks if key in (*task.inputs, *task.controls_in)]
            consumers = tuple(task.id for task in readers)
            self.registers[key] = replace(register, consumers=consumers)
            root = self.root.get(key, key)
            latest = max([place[register.producer], *(place[task] for task in consumers)])
            last[root] = max(last.get(root, 0), latest)
        counts: dict[int, int] = {}
        for root, latest in last.items():
            first, end = self.segment_of(self.registers[root]), self.tasks[latest].segment
            counts[root] = 1
            if self.registers[root].per_microbatch:
                counts[root] = in_flight(self.slots, first, end) + (self.chance.random() < 0.2)
        for key, register in self.registers.items():
            root = self.root.get(key, key)
            self.registers[key] = replace(register, register_count=counts[root])

    def place(self) -> None:
        offsets: dict[int, int] = {}
        end = 0
        for root in dict.fromkeys(self.root.values()):
            offsets[root] = end
            end += LINE * self.registers[root].register_count
        for _ in range(self.chance.choice([0, 1, 1, 2])):
            one, two = self.chance.choices(list(offsets), k=2)
            offsets[one] = offsets[two]
        for key, root in self.root.items():
            self.registers[key] = replace(self.registers[key], offset=offsets[root])


class OverwrittenError(Exception):
    """A task found other bytes than it should."""


class PlanRun:
    """Some steps of a plan in one random interleaving. A run of a task is (place, step, m)."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.chance = random.Random(seed)
        self.place = {task.id: at for at, task in enumerate(plan.tasks)}
        self.memory: dict[int, tuple[int, int]] = {}
        """Line → (register, version) that was last written there."""
        self.done: set[tuple[int, int, int]] = set()
        self.value: dict[int, int] = {}
        """Register → the one whose bytes it shows."""
        for task in plan.tasks:
            for key in task.outputs:
                register = plan.register_by_id[key]
                self.value[key] = self.value[register.inplace_of] if register.is_view else key

    def run(self) -> None:
        """Raises OverwrittenError; an assertion fails where the plan gets stuck."""
        queues = {}
        for stream in Stream:
            queue = [
                (at, step, slot.microbatch)
                for step in range(STEPS)
                for slot in self.plan.slots
                for at, task in enumerate(self.plan.tasks)
                if task.segment == slot.segment and task.stream is stream
            ]
            if queue:
                queues[stream] = queue[::-1]
        speed = {stream: self.chance.choice([1, 1, 5, 50]) for stream in queues}
        running: set[Stream] = set()
        while queues:
            ready = [
                stream
                for stream, queue in queues.items()
                if stream in running or self.may_start(*queue[-1])
            ]
            assert ready, "the interleaving got stuck"
            stream = self.chance.choices(ready, [speed[each] for each in ready])[0]
            run = queues[stream][-1]
            if stream in running:
                self.finish(*run)
                running.discard(stream)
                self.done.add(queues[stream].pop())
                if not queues[stream]:
                    del queues[stream]
            else:
                self.start(*run)
                running.add(stream)

    def repeated(self, at: int) -> bool:
        return self.plan.segments[self.plan.tasks[at].segment].kind.per_microbatch

    def may_start(self, at: int, step: int, m: int) -> bool:
        """Whether data of other streams have arrived, and their credits come back."""
        task, registers, count = (
            self.plan.tasks[at],
            self.plan.register_by_id,
            self.plan.microbatches,
        )
        for key in (*task.inputs, *task.controls_in):
            maker = self.place[registers[key].producer]
            final = m if registers[key].per_microbatch else count - 1 if self.repeated(maker) else 0
            other = self.plan.tasks[maker].stream is not task.stream
            if other and (maker, step, final) not in self.done:
                return False
        for key in (*task.outputs, *task.controls_out):
            register = registers[key]
            before = self.before(register, step, m)
            if before is None:
                continue
            last = {
                self.plan.tasks[self.place[reader]].stream: self.place[reader]
                for reader in register.consumers
            }
            for stream, reader in last.items():
                final = before[1]
                if not register.per_microbatch:
                    final = count - 1 if self.repeated(reader) else 0
                if stream is not task.stream and (reader, before[0], final) not in self.done:
                    return False
        return True

    def before(self, register: RegisterDesc, step: int, m: int) -> tuple[int, int] | None:
        """(step, micro-batch) of the version that held the slot before."""
        if not register.per_microbatch:
            old = step - register.register_count
            return (old, 0) if old >= 0 else None
        version = step * self.plan.microbatches + m - register.register_count
        return divmod(version, self.plan.microbatches) if version >= 0 else None

    def line(self, key: int, step: int, m: int) -> tuple[int, tuple[int, int]]:
        """The line of a register's slot, and what should be written there."""
        register = self.plan.register_by_id[key]
        version = step * self.plan.microbatches + m if register.per_microbatch else step
        line = register.offset // LINE + version % register.register_count
        return line, (self.value[key], version)

    def expect(self, key: int, step: int, m: int) -> None:
        line, expected = self.line(key, step, m)
        if self.memory.get(line) != expected:
            raise OverwrittenError(
                f"line {line} should hold {expected} and holds {self.memory.get(line)}"
            )

    def start(self, at: int, step: int, m: int) -> None:
        task = self.plan.tasks[at]
        for key in task.inputs:
            self.expect(key, step, m)
        for key in task.outputs:
            register = self.plan.register_by_id[key]
            if self.repeated(at) and not register.per_microbatch and m:
                self.expect(key, step, m)  # it adds to what it has
            if not register.is_view:
                line, value = self.line(key, step, m)
                self.memory[line] = value

    def finish(self, at: int, step: int, m: int) -> None:
        task = self.plan.tasks[at]
        written = {self.line(key, step, m)[0] for key in task.outputs}
        for key in task.outputs:
            self.expect(key, step, m)
        for key in task.inputs:
            if self.line(key, step, m)[0] not in written:
                self.expect(key, step, m)
