"""Collectives over memory that all members can read.

all_reduce, reduce_scatter, all_gather and all_to_all: each member waits until all inputs are ready,
then takes what it needs straight from the peers' registers, and leaves when all have read. A big
all_reduce is reduce-scatter and all-gather in one: every member reduces its own chunk into its
output and copies the other chunks from the peers' outputs (Rabenseifner's algorithm, without the
messages), piece after piece: a piece is copied while it is in its owner's cache, in the phase in
which the next one is reduced. The choice depends only on what all members see alike.

A peer whose memory cannot be read is read through a mirror: before each barrier every member pushes
to every such peer exactly what that peer will read. The array operations are the same either way,
and so are the bits of their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from plancompiler.errors import ExecutionError, TransportError
from plancompiler.executor.comm.base import Group, GroupKey, Transport, communicator_keys
from plancompiler.executor.comm.reduce import CHUNKED_BYTES, Move, plan_reduction
from plancompiler.executor.memory import Array, Memory, Slots
from plancompiler.ir import Reduction
from plancompiler.ir.shard import Region, balanced_range
from plancompiler.ir.task import Primitive, format_id, pack_register_id, unpack_id
from plancompiler.plan.plan import CollectiveSpec, Plan, Task

CHUNKED_BYTES_OF_TWO = 8 << 20
"""The same as `CHUNKED_BYTES` for two members, who save little: below, a barrier and the traffic
between two cores' caches cost more than adding everything twice."""
PIECE_BYTES = 1 << 20
"""What a member reduces between two barriers; in its cache when the others copy it."""

Moves = tuple[Move, ...]
Phase = tuple[Moves, Moves]
"""What is pushed to peers before a barrier, and what is done after it."""
Program = tuple[tuple[Phase, ...], Moves]
"""Phases; and what is left to do after the last barrier."""
Push = Callable[[int, bool, Region, bool], Moves]
"""Takes (member, whether the output instead of the input, region, whether that is flat)."""


def bind_collective(
    plan: Plan, task: Task, spec: CollectiveSpec, memory: Memory, transport: Transport
) -> Callable[[int], None]:
    """Resolve one collective to prepared array operations between barriers."""
    ranks, occurrence = communicator_keys(plan)[spec.communicator]
    group = transport.group(GroupKey(ranks, occurrence, str(task.stream)))
    pairs = [
        _bind_pair(plan, task, spec, memory, transport, group, source, target)
        for source, target in zip(task.inputs, task.outputs, strict=True)
    ]
    period = math.lcm(*map(len, pairs))
    programs = tuple(
        _together([pair[version % len(pair)] for pair in pairs]) for version in range(period)
    )
    label = f"{spec.primitive} of {task.name!r} (family {unpack_id(task.id).family})"
    labels = tuple(f"{label}, {phase}" for phase in ("entering", "leaving"))
    return _Collective(group, programs, labels)


def _bind_pair(
    plan: Plan,
    task: Task,
    spec: CollectiveSpec,
    memory: Memory,
    transport: Transport,
    group: Group,
    source: int,
    target: int,
) -> list[Program]:
    """The work for one value of the collective, per combination of slots."""
    ranks = group.ranks
    inputs = [_member_slots(plan, task, memory, transport, rank, source) for rank in ranks]
    outputs = [
        memory.slots(target)
        if rank == plan.rank
        else transport.peer_register(rank, _of(rank, target))
        for rank in ranks
    ]
    own_published = transport.peer_register(plan.rank, target) is not None
    shared = own_published and all(slots is not None for slots in outputs)
    programs = []
    own_slots = memory.slots(target)
    for version in range(math.lcm(len(own_slots), *map(len, inputs))):
        sources = [slots[version % len(slots)] for slots in inputs]
        targets = [slots[version % len(slots)] for slots in outputs if slots is not None]
        slot = version % len(own_slots)
        own = own_slots[slot]
        push = _pusher(transport, group, source, version % len(memory.slots(source)), target, slot)
        programs.append(
            _program(plan, task, spec, group, sources, own, targets if shared else None, push)
        )
    return programs


def _pusher(
    transport: Transport, group: Group, source: int, source_slot: int, target: int, slot: int
) -> Push:
    """Prepares pushes of one combination of slots of a pair."""

    def push(member: int, output: bool, region: Region, flat: bool) -> Moves:
        register, number = (target, slot) if output else (source, source_slot)
        move = transport.push(group.ranks[member], register, number, region, flat)
        return () if move is None else (move,)

    return push


def _together(programs: Sequence[Program]) -> Program:
    """Several values' work between the same barriers."""
    depth = max(len(phases) for phases, _ in programs)
    phases = tuple(
        _joined([each[number] for each, _ in programs if number < len(each)])
        for number in range(depth)
    )
    return phases, tuple(move for _, epilogue in programs for move in epilogue)


def _joined(phases: Sequence[Phase]) -> Phase:
    pushes = tuple(move for before, _ in phases for move in before)
    return pushes, tuple(move for _, after in phases for move in after)


class _Collective:
    """A bound collective: phases of array operations between barriers."""

    __slots__ = ("_entering", "_group", "_leaving", "_period", "_programs")

    def __init__(
        self, group: Group, programs: tuple[Program, ...], labels: tuple[str, ...]
    ) -> None:
        self._group = group
        self._programs = programs
        self._period = len(programs)
        self._entering, self._leaving = labels

    def __call__(self, version: int) -> None:
        barrier = self._group.barrier
        phases, epilogue = self._programs[version % self._period]
        for pushes, moves in phases:
            for push in pushes:
                push()
            barrier(self._entering)
            for move in moves:
                move()
        barrier(self._leaving)
        for move in epilogue:
            move()


def _of(rank: int, register: int) -> int:
    """The register of the same family on another member."""
    fields = unpack_id(register)
    return pack_register_id(rank, fields.family, fields.lane, fields.slot)


def _member_slots(
    plan: Plan, task: Task, memory: Memory, transport: Transport, rank: int, register: int
) -> Slots:
    if rank == plan.rank:
        return memory.slots(register)
    slots = transport.peer_register(rank, _of(rank, register))
    if slots is None:
        raise TransportError(
            f"rank {rank} does not publish the input of a collective",
            op=task.name,
            rank=plan.rank,
            got=f"no register {format_id(_of(rank, register))}",
            hint="compile all ranks' plans from one job",
        )
    return slots


def _program(
    plan: Plan,
    task: Task,
    spec: CollectiveSpec,
    group: Group,
    sources: Sequence[Array],
    out: Array,
    outputs: Sequence[Array] | None,
    push: Push,
) -> Program:
    """The work for one combination of slots. `outputs` are all members' where they can be read."""
    own = group.member
    _check_shapes(plan, task, spec, group.ranks, sources, out, own)
    reduction = spec.reduction or Reduction.SUM
    if (
        spec.primitive is Primitive.ALL_REDUCE
        and outputs is not None
        and out.nbytes >= (CHUNKED_BYTES if len(sources) > 2 else CHUNKED_BYTES_OF_TWO)
    ):
        return _chunked_all_reduce(sources, out, outputs, own, reduction, push)
    pushes = _pushes(spec, own, sources, push)
    if not np.may_share_memory(out, sources[own]):
        return ((pushes, _moves(spec, own, sources, out, reduction)),), ()
    # In place: peers read the input until all have left, so the result waits aside until then.
    aside = np.empty_like(out)
    moves = _moves(spec, own, sources, aside, reduction)
    return ((pushes, moves),), (partial(np.copyto, out, aside),)


def _pushes(spec: CollectiveSpec, own: int, sources: Sequence[Array], push: Push) -> Moves:
    """What of the own input each other member reads in `_moves`; the next member first."""
    members = len(sources)
    shape = sources[own].shape
    moves: list[Move] = []
    for member in (*range(own + 1, members), *range(own)):
        region = [(0, extent) for extent in shape]
        if spec.primitive in (Primitive.REDUCE_SCATTER, Primitive.ALL_TO_ALL):
            region[spec.dst_axis] = balanced_range(shape[spec.dst_axis], members, member)
        moves += push(member, False, tuple(region), False)
    return tuple(moves)


def _moves(
    spec: CollectiveSpec, own: int, sources: Sequence[Array], out: Array, reduction: Reduction
) -> Moves:
    """All the work of one member in one phase."""
    members = len(sources)
    if spec.primitive is Primitive.ALL_REDUCE:
        flat = [source.reshape(-1) for source in sources]
        return tuple(plan_reduction(out.reshape(-1), flat, reduction))
    if spec.primitive is Primitive.REDUCE_SCATTER:
        cut = _cut(sources[own], spec.dst_axis, members, own)
        return tuple(plan_reduction(out, [source[cut] for source in sources], reduction))
    moves: list[Move] = []
    for member, source in enumerate(sources):
        target = out[_cut(out, spec.src_axis, members, member)]
        if spec.primitive is Primitive.ALL_TO_ALL:
            source = source[_cut(source, spec.dst_axis, members, own)]
        moves.append(partial(np.copyto, target, source))
    # Each starts with its own piece and goes round, so that they do not all read one rank at once.
    return tuple(moves[own:] + moves[:own])


def _chunked_all_reduce(
    sources: Sequence[Array],
    out: Array,
    outputs: Sequence[Array],
    own: int,
    reduction: Reduction,
    push: Push,
) -> Program:
    """Reduce the own chunk piece by piece, each while the others' pieces before it are copied.

    Works in place too: until a piece is reduced only its owner reads it, of all inputs.
    """
    members = len(sources)
    flat = out.reshape(-1)
    inputs = [source.reshape(-1) for source in sources]
    results = [output.reshape(-1) for output in outputs]
    chunks = [balanced_range(out.size, members, member) for member in range(members)]
    others = [*range(own + 1, members), *range(own)]
    pieces = max(1, -(-out.nbytes // (members * PIECE_BYTES)))
    if any(push(member, False, (chunks[member],), True) for member in others):
        # Some other host takes part, as every member sees: its cache is far, and barriers cost.
        pieces = 1

    def piece(member: int, number: int) -> tuple[int, int]:
        start, stop = chunks[member]
        first, last = balanced_range(stop - start, pieces, number)
        return start + first, start + last

    phases: list[Phase] = []
    for number in range(pieces + 1):
        pushes: list[Move] = []
        moves: list[Move] = []
        if number > 0:
            reduced = number - 1
            for member in others:
                pushes += push(member, True, (piece(own, reduced),), True)
                theirs = slice(*piece(member, reduced))
                moves.append(partial(np.copyto, flat[theirs], results[member][theirs]))
        if number < pieces:
            for member in others:
                pushes += push(member, False, (piece(member, number),), True)
            mine = slice(*piece(own, number))
            moves += plan_reduction(flat[mine], [source[mine] for source in inputs], reduction)
        phases.append((tuple(pushes), tuple(moves)))
    return tuple(phases), ()


def _cut(array: Array, axis: int, members: int, member: int) -> tuple[slice, ...]:
    """Index of a member's balanced piece along an axis."""
    piece = slice(*balanced_range(array.shape[axis], members, member))
    return (*(slice(None),) * axis, piece)


def _piece(extent: int, members: int, member: int) -> int:
    start, stop = balanced_range(extent, members, member)
    return stop - start


def _with_extent(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _check_shapes(
    plan: Plan,
    task: Task,
    spec: CollectiveSpec,
    ranks: tuple[int, ...],
    sources: Sequence[Array],
    out: Array,
    own: int,
) -> None:
    """Every member's input must have the shape and dtype that follow from the output."""
    members = len(ranks)
    mine = sources[own].shape
    primitive, src, dst = spec.primitive, spec.src_axis, spec.dst_axis
    scatters = primitive in (Primitive.REDUCE_SCATTER, Primitive.ALL_TO_ALL)
    gathers = primitive in (Primitive.ALL_GATHER, Primitive.ALL_TO_ALL)
    if primitive is not Primitive.ALL_REDUCE and not (scatters or gathers):
        raise ExecutionError("not a collective", op=task.name, rank=plan.rank, got=str(primitive))
    for axis, used in ((src, gathers), (dst, scatters)):
        if used and not 0 <= axis < out.ndim == len(mine):
            raise ExecutionError(
                f"a {primitive} names an axis that its tensor does not have",
                op=task.name,
                rank=plan.rank,
                got=f"axis {axis} of {list(mine)} to {list(out.shape)}",
            )
    if scatters and out.shape[dst] != _piece(mine[dst], members, own):
        raise ExecutionError(
            f"the output of a {primitive} has a wrong shape",
            op=task.name,
            rank=plan.rank,
            got=f"{list(out.shape)} from {list(mine)}",
            expected=f"extent {_piece(mine[dst], members, own)} along axis {dst}",
        )
    for member, source in enumerate(sources):
        wanted = _with_extent(out.shape, dst, mine[dst]) if scatters else out.shape
        if gathers:
            wanted = _with_extent(wanted, src, _piece(out.shape[src], members, member))
        if source.shape != wanted or source.dtype != out.dtype:
            raise ExecutionError(
                f"the pieces of a {primitive} do not fit together",
                op=task.name,
                rank=plan.rank,
                got=f"{source.dtype}{list(source.shape)} on rank {ranks[member]}",
                expected=f"{out.dtype}{list(wanted)}",
            )
