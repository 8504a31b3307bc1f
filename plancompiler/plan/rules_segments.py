"""Rules about the segments of a step, the slots in which they run, and what passes between them."""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.ir.pipeline import WHOLE_STEP, SegmentKind, Slot, in_flight
from plancompiler.ir.task import TaskKind
from plancompiler.plan.index import COMPUTE, DATA, PlanIndex
from plancompiler.plan.plan import ComputeSpec, Plan, RegisterDesc, Task
from plancompiler.plan.text import format_region, format_shape, format_slot


def check_segments(index: PlanIndex) -> None:
    """Segments are named once, and plan order is segment by segment."""
    plan = index.plan
    names = ", ".join(map(str, plan.segments)) or "none"
    if any(segment.kind is SegmentKind.STEP for segment in plan.segments):
        if plan.segments != (WHOLE_STEP,) or plan.schedule or plan.microbatches != 1:
            raise index.broken(
                "a step that is one whole has several parts or micro-batches",
                got=f"segments {names}, schedule {plan.schedule!r}, "
                f"{plan.microbatches} micro-batches",
                expected="one segment, no schedule, 1 micro-batch",
            )
    elif not plan.schedule or plan.microbatches < 1:
        raise index.broken(
            "the parts of a step have no schedule or no micro-batch",
            got=f"schedule {plan.schedule!r}, {plan.microbatches} micro-batches",
            expected="the schedule's name, 1 micro-batch or more",
        )
    if len(set(plan.segments)) != len(plan.segments):
        raise index.broken("a segment is listed twice", got=names, expected="segments that differ")
    for segment in plan.segments:
        if (segment.chunk >= 0) is not segment.kind.per_microbatch:
            raise index.broken(
                f"segment {str(segment)!r} has a chunk of the model though it runs once per step, "
                "or has none",
                got=f"chunk {segment.chunk}",
                expected="a chunk for what runs once per micro-batch",
            )
    latest = 0
    for task in plan.tasks:
        if not latest <= task.segment < len(plan.segments):
            raise index.broken(
                f"{task.name!r} is in a segment that the plan does not have, or has left",
                got=f"segment {task.segment} after segment {latest}",
                expected=f"plan order segment by segment, of {len(plan.segments)}",
            )
        latest = task.segment


def check_slots(index: PlanIndex) -> None:
    """Each segment runs for micro-batches 0, 1, ... or once; those of one micro-batch, with what
    runs once per step before and after them, in plan order."""
    plan = index.plan
    runs = [plan.microbatches if segment.kind.per_microbatch else 1 for segment in plan.segments]
    done = [0] * len(runs)

    def wrong(what: str, slot: Slot, expected: str) -> Exception:
        return index.broken(what, got=f"slot {format_slot(plan.segments, slot)}", expected=expected)

    for slot in plan.slots:
        segment = slot.segment
        if not 0 <= segment < len(runs):
            raise wrong(
                "a slot names a segment that the plan does not have",
                slot,
                f"one of {len(runs)} segments",
            )
        named = plan.segments[segment]
        if slot.microbatch != done[segment] or done[segment] == runs[segment]:
            raise wrong(
                f"segment {str(named)!r} does not run micro-batch after micro-batch",
                slot,
                "no more slots of it"
                if done[segment] == runs[segment]
                else f"slot {format_slot(plan.segments, Slot(segment, done[segment]))}",
            )
        if segment:
            # The segment before has seen to the ones before it.
            both = runs[segment] == runs[segment - 1]
            needed = slot.microbatch + 1 if both else runs[segment - 1]
            if done[segment - 1] < needed:
                before = Slot(segment - 1, needed - 1)
                raise wrong(
                    f"segment {str(named)!r} runs before what it may read",
                    slot,
                    f"slot {format_slot(plan.segments, before)} first",
                )
        done[segment] += 1
    for segment, count in enumerate(done):
        if count < runs[segment]:
            raise wrong(
                f"segment {str(plan.segments[segment])!r} does not run as often as it has to",
                Slot(segment, count - 1) if count else Slot(segment, 0),
                f"{runs[segment]} slots of it in a step, not {count}",
            )


def check_rates(index: PlanIndex) -> None:
    """What is made once per micro-batch is read once per micro-batch; what collects a value over
    the micro-batches is read after the last."""
    plan = index.plan
    if not plan.schedule and not any(one.per_microbatch for one in plan.registers):
        return
    for register in plan.registers:
        maker = plan.task_by_id[register.producer]
        readers = [plan.tasks[place] for place in index.local_consumers[register.id]]
        if register.per_microbatch:
            once = next((task for task in (maker, *readers) if not index.is_repeated(task)), None)
            if once is not None:
                raise _wrong_rate(index, register, once, "once per step", "once per micro-batch")
        elif index.is_repeated(maker):
            again = next((task for task in readers if index.is_repeated(task)), None)
            if again is not None:
                raise _wrong_rate(
                    index, register, again, "once per micro-batch", "once per step, after the last"
                )
        if plan.schedule and not register.per_microbatch and register.register_count != 1:
            raise index.broken(
                f"register {register.name!r} has one version per step and several slots",
                register,
                got=f"{register.register_count} slots",
                expected="1 slot",
            )
    for remote in plan.remote_registers:
        for key in remote.consumers:
            task = plan.task_by_id.get(key)
            if task is not None and remote.per_microbatch and not index.is_repeated(task):
                raise index.broken(
                    f"{task.name!r} reads %{remote.name} of another rank",
                    task,
                    got=f"once per step, in segment {str(plan.segments[task.segment])!r}",
                    expected="once per micro-batch",
                )


def _wrong_rate(
    index: PlanIndex, register: RegisterDesc, task: Task, got: str, expected: str
) -> Exception:
    verb = "makes" if register.producer == task.id else "reads"
    return index.broken(
        f"{task.name!r} {verb} {index.register_name(register.id)}",
        task,
        got=f"{got}, in segment {str(index.plan.segments[task.segment])!r}",
        expected=expected,
    )


def check_pieces(index: PlanIndex) -> None:
    """Ops run on equal pieces of their operands, and their boxes are those of the first."""
    for task, spec in index.tasks_with(ComputeSpec):
        for keys, shapes, regions, pieces in (
            (task.inputs, spec.input_shapes, spec.input_regions, spec.input_pieces),
            (task.outputs, spec.output_shapes, spec.output_regions, spec.output_pieces),
        ):
            if not pieces:
                continue
            if len(pieces) != len(keys) or not index.is_repeated(task):
                raise index.broken(
                    f"{task.name!r} takes pieces of other operands than it has, or runs only once",
                    task,
                    got=f"{len(pieces)} axes for {len(keys)} operands",
                    expected="an axis each, for what runs once per micro-batch",
                )
            for key, shape, region, axis in zip(keys, shapes, regions, pieces, strict=True):
                if axis != -1:
                    _check_piece(index, task, key, shape, region, axis)


def _check_piece(
    index: PlanIndex,
    task: Task,
    key: int,
    shape: tuple[int, ...],
    region: Sequence[tuple[int, int]],
    axis: int,
) -> None:
    count = index.plan.microbatches
    made_once = not index.plan.register_by_id[key].per_microbatch and key in task.outputs
    if not 0 <= axis < len(shape) or shape[axis] % count or made_once:
        raise index.broken(
            f"{task.name!r} takes {index.register_name(key)} in pieces that it does not have",
            task,
            got=f"axis {axis} of {format_shape(shape)}",
            expected=f"an axis of {count} equal pieces, of a register with a version for each",
        )
    if region[axis][1] > shape[axis] // count:
        raise index.broken(
            f"{task.name!r} computes on a box of {index.register_name(key)} that is not in the "
            "first micro-batch",
            task,
            got=format_region(tuple(region)),
            expected=f"at most {shape[axis] // count} along axis {axis}",
        )


def check_segment_ends(index: PlanIndex) -> None:
    """The last task of a segment on the compute stream knows that the collective and copy streams
    have finished the segment; so whatever runs on it later knows all slots before."""
    plan = index.plan
    if not plan.schedule:
        return
    order = index.order
    last: list[dict[int, int]] = [{} for _ in plan.segments]
    for place, task in enumerate(plan.tasks):
        last[task.segment][index.streams[place]] = place
    for segment, tails in enumerate(last):
        end = tails.get(COMPUTE)
        if end is None or plan.tasks[end].kind is not TaskKind.STEP_END:
            raise index.broken(
                f"segment {str(plan.segments[segment])!r} has no end",
                None if end is None else plan.tasks[end],
                got="no task of the compute stream" if end is None else index.place_name(end),
                expected="a StepEnd as the last task of the compute stream",
            )
        for stream, tail in tails.items():
            if stream not in (COMPUTE, DATA) and not order.happens_before(tail, end):
                raise index.broken(
                    f"the end of segment {str(plan.segments[segment])!r} may come before "
                    f"{index.place_name(tail)} is done",
                    plan.tasks[end],
                    got="no order between the two tasks",
                    expected=f"{index.place_name(tail)} done before",
                )


def check_register_counts(index: PlanIndex) -> None:
    """Every register has a slot, and what a segment makes for a later one has a slot for each
    micro-batch in between; else its producer would wait for a slot that becomes free only after
    itself, or never."""
    plan = index.plan
    for register in plan.registers:
        if register.register_count < 1:
            raise index.broken(
                f"register {register.name!r} has no slot: its producer would wait for one for ever",
                register,
                got=f"{register.register_count} slots",
                expected="1 slot or more",
            )
    needed: dict[tuple[int, int], int] = {}
    carried = [
        [one for one in members if one.per_microbatch]
        for members in index.groups.values()
        if members[0].per_microbatch
    ]
    carried += [[one] for one in plan.registers if one.is_control and one.per_microbatch]
    for members in carried:
        first = plan.task_by_id[members[0].producer].segment
        latest = plan.tasks[max(index.users(members))]
        if latest.segment == first:
            continue
        key = first, latest.segment
        if key not in needed:
            needed[key] = in_flight(plan.slots, *key)
        if members[0].register_count < needed[key]:
            start, end = (str(plan.segments[segment]) for segment in key)
            raise index.broken(
                f"register {members[0].name!r} has too few slots: its producer would wait for "
                f"{latest.name!r}, which runs later",
                members[0],
                got=f"{members[0].register_count} slots",
                expected=f"{needed[key]}, the micro-batches between the start of segment "
                f"{start!r} and the end of {end!r}",
            )


def last_done(plan: Plan, segment: int, count: int) -> int:
    """The last segment that has run for micro-batch m, whatever m, when `segment` starts for
    m + count; the plan's last one where that is always in the next step."""
    if count >= plan.microbatches or not plan.segments[segment].kind.per_microbatch:
        return len(plan.segments) - 1
    starts: dict[Slot, int] = {slot: place for place, slot in enumerate(plan.slots)}
    last = segment
    for later in range(segment + 1, len(plan.segments)):
        if not plan.segments[later].kind.per_microbatch or any(
            starts[Slot(later, m)] > starts[Slot(segment, m + count)]
            for m in range(plan.microbatches - count)
        ):
            break
        last = later
    return last
