"""Rules about memory: sizes, registers that take others' bytes over, variables."""

from __future__ import annotations

from collections.abc import Iterable

from plancompiler.ir.shard import element_count, rank_region, region_shape
from plancompiler.ir.task import TaskKind
from plancompiler.plan.index import PlanIndex, format_ids
from plancompiler.plan.order import Clock, covers
from plancompiler.plan.plan import RegisterDesc, VariableDesc
from plancompiler.plan.rules_segments import last_done
from plancompiler.plan.text import format_region, format_shape

ALIGNMENT = 64
"""Bytes that every register's offset is a multiple of."""


def check_sizes(index: PlanIndex) -> None:
    """Registers have the bytes of their shape and lie, aligned, inside their block."""
    blocks = index.plan.blocks
    for register in index.plan.registers:
        if register.is_control:
            continue
        needed = element_count(register.shape) * register.dtype.itemsize
        aligned = -(-needed // ALIGNMENT) * ALIGNMENT
        if min(register.shape, default=0) < 0 or register.nbytes not in (needed, aligned):
            raise index.broken(
                f"register {register.name!r} has other bytes than its shape needs",
                register,
                got=f"{register.nbytes} bytes",
                expected=f"{needed} bytes for {register.dtype}{format_shape(register.shape)}",
            )
        block = blocks[register.block]
        end = register.offset + register.nbytes * register.register_count
        if register.offset < 0 or register.offset % ALIGNMENT or end > block.nbytes:
            raise index.broken(
                f"register {register.name!r} does not lie inside its block, aligned",
                register,
                got=f"bytes {register.offset} to {end} of block {register.block}",
                expected=f"a multiple of {ALIGNMENT} and at most {block.nbytes} bytes",
            )
    if not 0 <= index.plan.peak_live_bytes <= index.plan.arena_bytes:
        raise index.broken(
            "the lower bound of the arenas is more than the arenas",
            got=f"{index.plan.peak_live_bytes} bytes alive at once",
            expected=f"at most {index.plan.arena_bytes} bytes",
        )


def check_aliased_inputs(index: PlanIndex) -> None:
    """A register that aliases an input has exactly the bytes of an input of its producer, slot by
    slot; what lasts for a step is not aliased once per micro-batch."""
    plan = index.plan
    for register in plan.registers:
        if register.inplace_of == -1:
            if register.is_view:
                raise index.broken(
                    f"register {register.name!r} is a view of no register",
                    register,
                    got="inplace_of -1",
                    expected="the register whose bytes it shows",
                )
            continue
        old = plan.register_by_id.get(register.inplace_of)
        task = plan.task_by_id[register.producer]
        if old is None or old.id not in task.inputs:
            raise index.broken(
                f"register {register.name!r} takes the memory of a register that its producer "
                "does not read",
                register,
                got=index.register_name(register.inplace_of),
                expected=f"one of the inputs {format_ids(task.inputs)}",
            )
        if _extent(register) != _extent(old):
            raise index.broken(
                f"register {register.name!r} has other bytes than {old.name!r}, whose memory it "
                "takes",
                register,
                got=f"{extent_text(register)}, {register.register_count} slots",
                expected=f"{extent_text(old)}, {old.register_count} slots",
            )
        if register.per_microbatch is not old.per_microbatch or (
            index.is_repeated(task) and not register.per_microbatch
        ):
            raise index.broken(
                f"register {register.name!r} takes the memory of {old.name!r}, which has versions "
                "at other times",
                register,
                got=f"{_rate(register)} on {_rate(old)}, made once per "
                f"{'micro-batch' if index.is_repeated(task) else 'step'}",
                expected="as many versions of both as the task makes",
            )


def _rate(register: RegisterDesc) -> str:
    return f"one version per {'micro-batch' if register.per_microbatch else 'step'}"


def _extent(register: RegisterDesc) -> tuple[int, int, int, int]:
    return register.block, register.offset, register.nbytes, register.register_count


def extent_text(register: RegisterDesc) -> str:
    start, end = register.offset, register.offset + register.nbytes * register.register_count
    return f"bytes {start} to {end} of block {register.block}"


def check_overwriting(index: PlanIndex) -> None:
    """A value is overwritten only when no task can still read it.

    Among the values of one version this is the order of one micro-batch. The next version in the
    same slot may come in the same step or the next.
    """
    for root, members in index.groups.items():
        if len(members) > 1:
            _check_versions(index, index.plan.register_by_id[root], members)


def _check_versions(index: PlanIndex, root: RegisterDesc, members: list[RegisterDesc]) -> None:
    """Follow the values that the same bytes hold one after another."""
    order, position = index.order, index.position
    version_of: dict[int, int] = {}
    versions: list[list[RegisterDesc]] = [[]]
    writers: list[tuple[int, RegisterDesc]] = []
    for register in members:
        version = version_of.get(register.inplace_of, 0)
        if register.inplace_of != -1 and not register.is_view:
            if version != len(versions) - 1:
                raise index.broken(
                    f"register {register.name!r} overwrites a value that "
                    f"{versions[version + 1][0].name!r} has overwritten before",
                    register,
                    got=index.register_name(register.inplace_of),
                    expected=index.register_name(versions[-1][0].id),
                )
            versions.append([])
            version += 1
            writers.append((position[register.producer], register))
        version_of[register.id] = version
        versions[version].append(register)
    for (writer, register), old in zip(writers, versions, strict=False):
        users = [user for user in index.users(old) if user != writer]
        if not covers(order.clocks[writer], order.clock_of(users)):
            late = next(user for user in users if not order.happens_before(user, writer))
            raise index.broken(
                f"{index.place_name(writer)} overwrites {old[0].name!r} while "
                f"{index.place_name(late)} may still use it",
                register,
                got="no order between the two tasks",
                expected=f"{index.place_name(late)} done before",
            )
    _check_next_version(index, root, members, versions, writers)


def _check_next_version(
    index: PlanIndex,
    root: RegisterDesc,
    members: list[RegisterDesc],
    versions: list[list[RegisterDesc]],
    writers: list[tuple[int, RegisterDesc]],
) -> None:
    """The next version's first writer must find the last value's users done.

    A variable's task writes nothing, but it must find the updates done.
    """
    first = index.position[root.producer]
    kept = index.plan.task_by_id[root.producer].kind is TaskKind.VARIABLE
    if kept and not writers:
        return
    last_users = index.users(versions[-1])
    checks = [(first, last_users)]
    if kept:
        updates = [writer for writer, _ in writers]
        checks = [(first, updates), (updates[0], last_users)]
    for task, users in checks:
        late = _late_user(index, root, members, task, users)
        if late is not None:
            when = "for a later micro-batch" if root.per_microbatch else "of the next step"
            raise index.broken(
                f"{index.place_name(task)} {when} may start while "
                f"{index.place_name(late)} still uses the bytes of {root.name!r}",
                root,
                got="no order between the two tasks across the step's end"
                if not root.per_microbatch
                else "no order between the two tasks across micro-batches",
                expected=f"{index.place_name(late)} done before",
            )
    # Credits make the producer of a register wait for its readers on other ranks.
    protected = versions[-1][0] if len(writers) == (1 if kept else 0) else None
    for register in versions[-1]:
        if register is not protected and (away := index.remote_consumers(register)):
            raise index.broken(
                f"another rank may still read {register.name!r} when the next step writes there",
                register,
                got=f"read by {format_ids(away)}",
                expected="bytes of its own for a register that other ranks read",
            )


def _late_user(
    index: PlanIndex,
    root: RegisterDesc,
    members: list[RegisterDesc],
    task: int,
    users: Iterable[int],
) -> int | None:
    """A user of one version that may not be done when `task` writes the next one in its slot."""
    segment = index.home_segment(members)
    if segment is not None and not index.plan.segments[segment].kind.per_microbatch:
        segment = None  # It runs once per step, so all that the step knows counts.
    if root.register_count == 1 and (segment is not None or not root.per_microbatch):
        # The next version is that of the next run: of the segment, else of the step.
        order = index.order if segment is None else index.segment_orders[segment]
        start = 0 if segment is None else index.segment_starts[segment]
        for user in users:
            if not order.previous_step_done(user - start, task - start):
                return user
        return None
    known = _known_of_slot(index, root, task)
    order = index.order
    for user in users:
        if known[order.streams[user]] <= order.positions[user]:
            return user
    return None


def _known_of_slot(index: PlanIndex, root: RegisterDesc, writer: int) -> Clock:
    """What the writer of a new version in a slot knows, when it starts, to be done for the version
    that the slot held before, which is `root.register_count` versions older.

    Its own stream and the streams that it waited for in this run of its segment have come through
    all slots before (`last_done`), and their last tasks there knew more. Its own credits add the
    readers of its registers on other streams.
    """
    order, plan = index.order, index.plan
    task = plan.tasks[writer]
    local = index.segment_orders[task.segment].clocks[writer - index.segment_starts[task.segment]]
    done = [
        tail
        for stream, tail in index.tails(last_done(plan, task.segment, root.register_count)).items()
        if stream == order.streams[writer] or (stream < len(local) and local[stream])
    ]
    for key in (*task.outputs, *task.controls_out):
        register = plan.register_by_id[key]
        if (
            register.register_count <= root.register_count
            and register.per_microbatch is root.per_microbatch
        ):
            done += [
                place
                for place in index.local_consumers[key]
                if order.streams[place] != order.streams[writer]
            ]
    known = order.clock_of(done)
    for place in done:
        known = tuple(map(max, known, order.clocks[place]))
    return known


def check_variables(index: PlanIndex) -> None:
    """Variables have their task, their shard's box, and memory that is kept between steps."""
    plan = index.plan
    listed = {variable.register for variable in plan.variables}
    names: set[str] = set()
    for variable in plan.variables:
        register = plan.register_by_id.get(variable.register)
        if register is None or variable.name in names:
            raise index.broken(
                f"variable {variable.name!r} "
                + ("is listed twice" if variable.name in names else "has no register"),
                register,
                got=index.register_name(variable.register),
                expected="one register of this rank per variable",
            )
        names.add(variable.name)
        if (
            plan.task_by_id[register.producer].kind is not TaskKind.VARIABLE
            or plan.blocks[register.block].purpose != "variables"
        ):
            raise index.broken(
                f"variable {variable.name!r} is not kept from step to step",
                register,
                got=f"made by {index.task_name(register.producer)}, in a block for "
                f"{plan.blocks[register.block].purpose}",
                expected="a task of kind Variable, in a block for variables",
            )
        _check_shard(index, variable, register)
    for task in plan.tasks:
        if task.kind is TaskKind.VARIABLE and not listed.issuperset(task.outputs):
            raise index.broken(
                f"{task.name!r} is a variable that the plan does not list",
                task,
                got=format_ids(task.outputs),
                expected="an entry in the plan's variables",
            )


def _check_shard(index: PlanIndex, variable: VariableDesc, register: RegisterDesc) -> None:
    rank = index.plan.rank
    if rank not in variable.placement or len(variable.sbp) != variable.placement.ndim:
        raise index.broken(
            f"variable {variable.name!r} does not live on this rank",
            register,
            got=f"{variable.placement} {variable.sbp}",
            expected=f"a placement with rank {rank} and one SBP per mesh axis",
        )
    region = rank_region(variable.shape, variable.placement, variable.sbp, rank)
    if (
        variable.region != region
        or register.shape != region_shape(region)
        or register.dtype is not variable.dtype
    ):
        raise index.broken(
            f"variable {variable.name!r} is another box than its layout gives this rank",
            register,
            got=f"{register.dtype}{format_shape(register.shape)}, "
            f"box {format_region(variable.region)}",
            expected=f"{variable.dtype}{format_shape(region_shape(region))}, "
            f"box {format_region(region)}",
        )
