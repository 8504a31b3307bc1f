"""The plan of one rank's part of the whole graph, for the mode `naive`.

What must have finished when a task starts is a set of tasks, kept as the bits of a number, and each
rule asks these sets what it wants to know. The rules are those of `emit_plan`; none of its code is
used but the search for offsets of intervals, whose result is not a question of right or wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from plancompiler.boxing.graph import BoxingTaskGraph
from plancompiler.errors import VerifyError
from plancompiler.ir import DType, NdSbp
from plancompiler.ir.pipeline import WHOLE_STEP, Segment, SegmentKind, Slot, in_flight
from plancompiler.ir.task import (
    CONTROL_SLOT,
    FAMILY_BITS,
    TaskKind,
    pack_register_id,
    pack_task_id,
    rank_of,
    unpack_id,
)
from plancompiler.lower.memory import place_windows
from plancompiler.ops.registry import op_def
from plancompiler.plan.plan import (
    Block,
    Communicator,
    ComputeSpec,
    OutputDesc,
    Plan,
    RegisterDesc,
    RemoteRegister,
    SliceSpec,
    Stream,
    Task,
    VariableDesc,
    exchanged,
)

HOST = "cpu"


@dataclass(frozen=True)
class RankPart:
    """What one rank has of the whole graph."""

    graph: BoxingTaskGraph
    rank: int
    tasks: list[Task]
    """In global order, with the segments of the pipeline; without control."""
    registers: dict[int, RegisterDesc]
    """Those that the tasks make, in order; without memory."""
    remotes: tuple[RemoteRegister, ...]
    communicators: dict[tuple[tuple[int, ...], Stream], tuple[int, ...]]
    """Ranks and stream → families."""
    variables: list[VariableDesc]
    late: set[int]
    """Tasks that wait for the compute task before them."""
    devices: Mapping[int, str]
    """Register → the device type of its memory."""


def plan_of_part(part: RankPart) -> Plan:
    """The plan, not verified."""
    writer = _Writer(part)
    writer.hold_late()
    writer.share_views()
    writer.guard_updates()
    writer.write_in_place()
    writer.close_segments()
    writer.hold_first_owners()
    return writer.plan()


class _Writer:
    def __init__(self, part: RankPart) -> None:
        self.part = part
        self.registers = part.registers
        self.segments, self.slots, number = _segments(part)
        self.whole = part.graph.pipeline is None
        self.microbatches = 1 if part.graph.pipeline is None else part.graph.pipeline.microbatches
        self.tasks: list[Task] = []
        for place, segment in enumerate(self.segments):
            name = "step_end" if segment == WHOLE_STEP else f"{segment} end"
            self.tasks += [
                replace(one, segment=place) for one in part.tasks if number[one.segment] == place
            ]
            self.tasks.append(_segment_end(part.rank, place, name))
        self.place = {task.id: place for place, task in enumerate(self.tasks)}
        self.computes = [
            place for place, task in enumerate(self.tasks) if task.stream is Stream.COMPUTE
        ]
        self.turn = {place: turn for turn, place in enumerate(self.computes)}
        """Place of a compute task → its place among the compute tasks."""
        self.waits: list[set[int]] = [
            {self.maker(key) for key in task.inputs if key in self.registers} for task in self.tasks
        ]
        """Per task, the places of those it waits for."""
        self.controls: dict[int, set[int]] = {}
        """Per task, the places of those that wait for it by control."""
        self.known = self.closure()
        self.users = {
            key: [self.place[one] for one in (made.producer, *made.consumers) if self.is_here(one)]
            for key, made in self.registers.items()
        }
        """Register → places of the tasks that make and read it."""
        self.groups: dict[int, list[int]] = {}
        """First owner of some bytes → all registers that have them, itself first."""
        self.owner: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        """Register → the one whose bytes it took."""
        self.writes: set[int] = set()
        """Registers that are written over what they took."""

    def is_here(self, task: int) -> bool:
        return rank_of(task) == self.part.rank

    def is_remote(self, register: int) -> bool:
        """Whether another rank reads it."""
        return not all(map(self.is_here, self.registers[register].consumers))

    def maker(self, register: int) -> int:
        return self.place[self.registers[register].producer]

    # --- what has finished ------------------------------------------------------------------------

    def closure(self) -> list[int]:
        """Per task, the set of tasks that have finished whenever it starts."""
        known: list[int] = []
        latest: dict[Stream, int] = {}
        for place, task in enumerate(self.tasks):
            before = {*self.waits[place]}
            if task.stream in latest:
                before.add(latest[task.stream])
            finished = 0
            for one in before:
                finished |= known[one] | 1 << one
            known.append(finished)
            latest[task.stream] = place
        return known

    def knows(self, place: int, others: Iterable[int]) -> bool:
        """Whether others have all finished when a task starts."""
        return all(self.known[place] >> one & 1 for one in others)

    def computed_before(self, place: int) -> int:
        """How many compute tasks have finished whenever a task starts."""
        return (self.known[place] & _bits(self.computes)).bit_count()

    def knows_segment_entered(self, place: int) -> bool:
        """Whether the compute stream has come to the task's segment when it starts."""
        segment = self.tasks[place].segment
        inside = [one for one in self.computes if self.tasks[one].segment == segment]
        return place in inside or bool(self.known[place] & _bits(inside))

    def knows_last_version_done(self, register: int) -> bool:
        """Whether the producer of a register knows that the slot it fills is used no more."""
        maker = self.maker(register)
        if self.registers[register].per_microbatch:
            return self.knows_segment_entered(maker)
        return self.tasks[maker].stream is Stream.COMPUTE or self.computed_before(maker) > 0

    def control(self, before: int, after: int) -> None:
        self.controls.setdefault(before, set()).add(after)
        self.waits[after].add(before)

    def by_segment(self) -> Iterator[list[int]]:
        places = range(len(self.tasks))
        for _, some in groupby(places, key=lambda place: self.tasks[place].segment):
            yield list(some)

    # --- control edges and shared bytes -----------------------------------------------------------

    def hold_late(self) -> None:
        """Late transport waits for the compute task before it, in its segment."""
        for places in self.by_segment():
            computed = None
            for place in places:
                if self.tasks[place].stream is Stream.COMPUTE:
                    computed = place
                elif computed is not None and self.tasks[place].id in self.part.late:
                    self.control(computed, place)
        self.known = self.closure()

    def share_views(self) -> None:
        """Views lie on the bytes that they show, updates on their variable's."""
        updated = {
            task.inputs[source]: place
            for place, task in enumerate(self.tasks)
            for _, source in _mutates(task)
        }
        for task in self.tasks:
            for slot, register in enumerate(task.outputs):
                written = [source for target, source in _mutates(task) if target == slot]
                shown = [
                    source
                    for target, source in self.views(task)
                    if target == register and self.may_show(source, register, updated)
                ]
                if written:
                    self.take(register, task.inputs[written[0]])
                    self.writes.add(register)
                elif shown:
                    self.take(register, shown[0])
                else:
                    self.owner[register] = register
                    self.groups[register] = [register]

    def take(self, register: int, source: int) -> None:
        self.taken[register] = source
        self.owner[register] = self.owner[source]
        self.groups[self.owner[source]].append(register)

    def views(self, task: Task) -> list[tuple[int, int]]:
        """(output, input) registers of a task that have the same bytes in them."""
        spec = task.spec
        if isinstance(spec, ComputeSpec):
            return [
                (task.outputs[target], task.inputs[source])
                for target, source in op_def(spec.kind).view
            ]
        if (
            not isinstance(spec, SliceSpec)
            or spec.reduction is not None
            or len(spec.pieces) != 1
            or task.kind is TaskKind.COPY_HD
        ):
            return []
        (piece,), (target,) = spec.pieces, task.outputs
        source = task.inputs[piece.input]
        all_of_it = tuple((0, extent) for extent in self.registers[source].shape)
        same = self.registers[source].shape == self.registers[target].shape
        return [(target, source)] if same and piece.source == piece.target == all_of_it else []

    def may_show(self, source: int, target: int, updated: Mapping[int, int]) -> bool:
        """Whether a view needs no copy: its bytes stay until it has been read."""
        before, after = self.registers[source], self.registers[target]
        if self.is_remote(target) or before.nbytes != after.nbytes:
            return False
        if self.whole:
            stays = self.slot_count([source]) == 1
        else:
            stays = before.per_microbatch == after.per_microbatch
            stays = stays and self.knows_last_version_done(self.owner[source])
        update = updated.get(self.owner[source])
        return stays and (update is None or self.last_read(target) <= update)

    def last_read(self, register: int) -> int:
        """The last task that reads a register or a view of it; 0 where none does."""
        last = 0
        for reader in self.users[register][1:]:
            last = max(last, reader)
            for target, source in self.views(self.tasks[reader]):
                if source == register:
                    last = max(last, self.last_read(target))
        return last

    def guard_updates(self) -> None:
        """An update waits for those on other streams that read the old value in its segment."""
        for place, task in enumerate(self.tasks):
            for _, source in _mutates(task):
                for user in self.users_of(task.inputs[source]):
                    other = self.tasks[user]
                    if (
                        user < place
                        and other.segment == task.segment
                        and other.stream is not task.stream
                    ):
                        self.control(user, place)
        self.known = self.closure()

    def users_of(self, owner: int) -> list[int]:
        """Places of the tasks that make or read any register of a group."""
        return sorted({user for register in self.groups[owner] for user in self.users[register]})

    def write_in_place(self) -> None:
        """Ops write over an input that nobody else will read, where their kernels can."""
        remote = {self.owner[key] for key in self.registers if self.is_remote(key)}
        for place, task in enumerate(self.tasks):
            if task.stream is not Stream.COMPUTE:
                continue
            for target, source in _inplace(task):
                register, old = task.outputs[target], task.inputs[source]
                owner = self.owner[old]
                alone = self.groups.get(register) == [register]
                if (
                    alone
                    and not self.is_remote(register)
                    and owner not in remote
                    and self.is_rewritable(owner)
                    and _form(self.registers[old]) == _form(self.registers[register])
                    and self.knows(place, (user for user in self.users_of(owner) if user != place))
                ):
                    del self.groups[register]
                    self.take(register, old)
                    self.writes.add(register)
                    break

    def is_rewritable(self, owner: int) -> bool:
        if self.tasks[self.maker(owner)].kind is TaskKind.VARIABLE:
            return False
        if self.whole:
            return self.slot_count([owner]) == 1
        return self.knows_last_version_done(owner)

    def close_segments(self) -> None:
        """A segment's end knows that all streams but those of data have finished it."""
        for places in self.by_segment():
            *inside, end = places
            tails = {self.tasks[place].stream: place for place in inside}
            for stream, tail in tails.items():
                if stream not in (Stream.COMPUTE, Stream.DATA) and not self.knows(end, [tail]):
                    self.control(tail, end)
        self.known = self.closure()

    def hold_first_owners(self) -> None:
        """Bytes that several registers have are filled in the next step only when all of them have
        been read: their first producer knows it, or waits for credits of a control register."""
        if not self.whole:
            return
        last = {task.stream: place for place, task in enumerate(self.tasks)}
        for owner, members in self.groups.items():
            maker = self.maker(owner)
            if len(members) == 1 or self.tasks[maker].kind is TaskKind.VARIABLE:
                continue
            # Of the step before it knows what was known at the end of all streams it has heard of.
            heard = {
                task.stream
                for place, task in enumerate(self.tasks)
                if place == maker or self.knows(maker, [place])
            }
            done = 0
            for stream in heard:
                done |= self.known[last[stream]] | 1 << last[stream]
            users = self.users_of(owner)
            if all(done >> user & 1 for user in users):
                continue
            for user in {self.tasks[user].stream: user for user in users}.values():
                if user != maker:
                    self.control(maker, user)
        self.known = self.closure()

    def slot_count(self, members: list[int]) -> int:
        """How many versions of some registers on the same bytes there are at once."""
        first = self.registers[members[0]]
        stream = self.tasks[self.maker(first.id)].stream
        remote = self.is_remote(first.id)
        if self.whole:
            return 2 if stream is Stream.DATA and not remote else 1  # data are read one step ahead
        if not first.per_microbatch:
            return 1
        last = max(self.tasks[user].segment for key in members for user in self.users[key])
        count = in_flight(self.slots, self.tasks[self.maker(first.id)].segment, last)
        if stream in (Stream.DATA, Stream.COPY):
            count += 1  # these run ahead
        if remote:
            count = max(count, 2)  # one is filled while others read the other
        return min(count, self.microbatches)

    # --- memory -----------------------------------------------------------------------------------

    def plan(self) -> Plan:
        part, graph = self.part, self.part.graph
        placements = (one.op.placement for one in graph.ops if part.rank in one.op.placement)
        device = next((placement.device_type for placement in placements), HOST)
        counts = {owner: self.slot_count(members) for owner, members in self.groups.items()}
        sizes = {
            owner: _aligned(self.registers[owner].nbytes * count) for owner, count in counts.items()
        }
        block_of: dict[int, int] = {}
        for owner in self.groups:
            if self.tasks[self.maker(owner)].kind is TaskKind.VARIABLE:
                block_of[owner] = 1
            elif device != HOST and part.devices[owner] == HOST:
                block_of[owner] = 2
            else:
                block_of[owner] = 0
        offsets, totals = {}, [0, 0, 0]
        for owner, block in block_of.items():
            if block:
                offsets[owner] = totals[block]
                totals[block] += sizes[owner]
        arena = [owner for owner, block in block_of.items() if block == 0]
        totals[0], peak = self.place_arena(arena, counts, sizes, offsets)
        shared = self.shared_blocks(block_of)
        blocks = [
            Block(0, "arena", 0 in shared and device == HOST, totals[0], device),
            Block(1, "variables", 1 in shared and device == HOST, totals[1], device),
            Block(2, "staging", 2 in shared, totals[2]),
        ]
        registers = [
            replace(
                register,
                block=block_of[self.owner[key]],
                offset=offsets[self.owner[key]],
                register_count=counts[self.owner[key]],
                inplace_of=self.taken.get(key, -1),
                is_view=key in self.taken and key not in self.writes,
            )
            for key, register in self.registers.items()
        ]
        registers += [self.control_register(before) for before in self.controls]
        pipeline = graph.pipeline
        return Plan(
            job=graph.job_name,
            rank=part.rank,
            world_size=graph.world_size,
            seed=graph.seed,
            tasks=tuple(self.tasks_with_controls()),
            registers=tuple(sorted(registers, key=lambda register: register.id)),
            remote_registers=part.remotes,
            blocks=tuple(blocks if totals[2] else blocks[:2]),
            communicators=tuple(
                Communicator(ranks, families, stream)
                for (ranks, stream), families in part.communicators.items()
            ),
            variables=tuple(part.variables),
            outputs=tuple(
                OutputDesc(str(dict(task.spec.attrs)["name"]), task.id, task.inputs[0])
                for task in part.tasks
                if task.kind is TaskKind.OUTPUT and isinstance(task.spec, ComputeSpec)
            ),
            peak_live_bytes=peak,
            schedule="" if pipeline is None else pipeline.schedule,
            microbatches=self.microbatches,
            segments=self.segments,
            slots=self.slots,
        )

    def shared_blocks(self, block_of: Mapping[int, int]) -> set[int]:
        """Blocks that hold anything which other ranks read, by copies or in collectives."""
        read = {key for key in self.registers if self.is_remote(key)}
        for task in self.tasks:
            read.update(exchanged(task.spec, task.inputs, task.outputs))
        return {block_of[self.owner[key]] for key in read}

    def place_arena(
        self,
        owners: list[int],
        counts: Mapping[int, int],
        sizes: Mapping[int, int],
        offsets: dict[int, int],
    ) -> tuple[int, int]:
        """Put bytes whose times are known onto each other, all others beside them; gives the size
        of all, and the least that it could be."""
        sharing: dict[int, list[tuple[int, int, int]]] = {}
        alone = []
        for owner in owners:
            offsets[owner] = 0
            window = self.window(owner, counts[owner])
            if sizes[owner] == 0:
                continue
            if window is None:
                alone.append(owner)
            else:
                segment = self.tasks[self.maker(owner)].segment
                sharing.setdefault(segment, []).append((owner, *window))
        top = peak = 0
        for some in sharing.values():
            placed, size, least = place_windows(
                [start for _, start, _ in some],
                [end for _, _, end in some],
                [sizes[owner] for owner, _, _ in some],
            )
            offsets.update(zip((owner for owner, _, _ in some), placed, strict=True))
            top, peak = max(top, size), max(peak, least)
        for owner in alone:
            offsets[owner] = top
            top += sizes[owner]
            peak += sizes[owner]
        return top, peak

    def window(self, owner: int, count: int) -> tuple[int, int] | None:
        """When bytes are in use, on the compute stream's order: compute task i starts at 2i and
        ends at 2i + 1. None where that stream does not know, or where they have several slots, or
        leave their segment."""
        maker, register = self.maker(owner), self.registers[owner]
        segment = self.tasks[maker].segment
        each = self.segments[segment].kind.per_microbatch
        users = self.users_of(owner)
        if (
            count > 1
            or register.per_microbatch is not each
            or any(map(self.is_remote, self.groups[owner]))
            or any(self.tasks[user].segment != segment for user in users)
            or not self.knows_segment_entered(maker)
        ):
            return None
        if maker in self.turn:
            start = 2 * self.turn[maker]
        else:
            start = 2 * self.computed_before(maker) - 1
        end = 0
        for user in users:
            if user in self.turn:
                end = max(end, 2 * self.turn[user] + 1)
                continue
            learners = (turn for one, turn in self.turn.items() if self.known[one] >> user & 1)
            learner = next(learners, None)
            if learner is None:
                return None
            end = max(end, 2 * learner)
        return start, end

    # --- parts of the plan ------------------------------------------------------------------------

    def control_id(self, place: int) -> int:
        return pack_register_id(*unpack_id(self.tasks[place].id)[:3], CONTROL_SLOT)

    def control_register(self, before: int) -> RegisterDesc:
        task = self.tasks[before]
        return RegisterDesc(
            id=self.control_id(before),
            name=f"{task.name}:control",
            shape=(),
            dtype=DType.UINT8,
            sbp=NdSbp(()),
            producer=task.id,
            consumers=tuple(self.tasks[after].id for after in sorted(self.controls[before])),
            block=-1,
            per_microbatch=self.segments[task.segment].kind.per_microbatch,
        )

    def tasks_with_controls(self) -> Iterator[Task]:
        waits: list[list[int]] = [[] for _ in self.tasks]
        for before, waiting in sorted(self.controls.items()):
            for after in waiting:
                waits[after].append(self.control_id(before))
        for place, task in enumerate(self.tasks):
            made = (self.control_id(place),) if place in self.controls else ()
            yield replace(task, controls_in=tuple(waits[place]), controls_out=made)


def _mutates(task: Task) -> tuple[tuple[int, int], ...]:
    return op_def(task.spec.kind).mutates if isinstance(task.spec, ComputeSpec) else ()


def _inplace(task: Task) -> tuple[tuple[int, int], ...]:
    return op_def(task.spec.kind).inplace if isinstance(task.spec, ComputeSpec) else ()


def _bits(places: Iterable[int]) -> int:
    """A set of places as the bits of a number."""
    return sum(1 << place for place in places)


def _form(register: RegisterDesc) -> tuple[tuple[int, ...], DType, bool]:
    return register.shape, register.dtype, register.per_microbatch


def _aligned(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


def _segment_end(rank: int, segment: int, name: str) -> Task:
    return Task(
        id=pack_task_id(rank, (1 << FAMILY_BITS) - 1, segment),
        kind=TaskKind.STEP_END,
        stream=Stream.COMPUTE,
        name=name,
        inputs=(),
        outputs=(),
        spec=None,
        segment=segment,
    )


def _segments(part: RankPart) -> tuple[tuple[Segment, ...], tuple[Slot, ...], dict[int, int]]:
    """The rank's segments, its slots, and the number of each segment of the pipeline here.

    Forward and backward are one segment where the one always follows the other at once.
    """
    pipeline = part.graph.pipeline
    if pipeline is None:
        return (WHOLE_STEP,), (Slot(0, 0),), {0: 0}
    present = sorted({task.segment for task in part.tasks}) or [len(pipeline.segments) - 1]
    stages = {
        pipeline.segments[one].chunk % pipeline.stages
        for one in present
        if pipeline.segments[one].kind.per_microbatch
    }
    if len(stages) > 1:
        raise VerifyError(
            "a rank belongs to more than one pipeline stage",
            rank=part.rank,
            got=f"stages {', '.join(map(str, sorted(stages)))}",
            expected="one stage",
        )
    slots = [one for one in pipeline.slots(max(stages, default=-1)) if one.segment in present]
    followers = list(pairwise([*slots, Slot(-1, -1)]))
    segments: list[Segment] = []
    number: dict[int, int] = {}
    for one, before in zip(present, [-1, *present], strict=False):
        named = pipeline.segments[one]
        if (
            before in number
            and pipeline.segments[before].kind is SegmentKind.FORWARD
            and named.kind is SegmentKind.BACKWARD
            and all(
                after == Slot(one, slot.microbatch)
                for slot, after in followers
                if slot.segment == before
            )
        ):
            segments[-1] = Segment(SegmentKind.FORWARD_BACKWARD, segments[-1].chunk)
            number[one] = number[before]
        else:
            number[one] = len(segments)
            segments.append(named)
    kept = [
        Slot(number[slot.segment], slot.microbatch)
        for before, slot in pairwise([Slot(-1, -1), *slots])
        if before.segment < 0
        or number[slot.segment] != number[before.segment]
        or before.microbatch != slot.microbatch
    ]
    return tuple(segments), tuple(kept), number
