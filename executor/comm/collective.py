"""Collectives over memory that all members can read.

all_reduce, reduce_scatter, all_gather and all_to_all: each member waits until all inputs are ready,
then takes what it needs straight from the peers' registers, and leaves when all have read. A big
all_reduce is reduce-scatter and all-gather in one: every member reduces its own chunk into its
output and copies the other chunks from the peers' outputs (Rabenseifner's algorithm, without the
messages), piece after piece: a piece is copied while it is in its owner's cache, in the phase in
which the next one is reduced. The choice depends only on what all members see alike.

A peer whose memory cannot be read is read through a receive buffer: before each barrier every
member pushes to every such peer exactly what that peer will read. The array operations are the same
either way, and so are the bits of their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from plancompiler.errors import ExecutionError, TransportError
from plancompiler.executor.comm.link import Group, GroupKey, Link
from plancompiler.executor.comm.program import Program, balanced, part_index, program_of
from plancompiler.executor.comm.publication import communicator_keys
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
PhasedMoves = tuple[tuple[Phase, ...], Moves]
"""Phases; and what is left to do after the last barrier."""
Push = Callable[[int, bool, Region, bool], Moves]
"""Takes (member, whether the output instead of the input, region, whether that is flat)."""


def bind_collective(
    plan: Plan, task: Task, spec: CollectiveSpec, memory: Memory, link: Link
) -> Callable[[int], None]:
    """Resolve one collective to prepared array operations between barriers."""
    ranks, occurrence = communicator_keys(plan)[spec.communicator]
    group = link.group(GroupKey(ranks, occurrence, str(task.stream)))
    pairs = [
        _bind_pair(plan, task, spec, memory, link, group, source, target)
        for source, target in zip(task.inputs, task.outputs, strict=True)
    ]
    period = math.lcm(*map(len, pairs))
    works = tuple(
        _together([pair[version % len(pair)] for pair in pairs]) for version in range(period)
    )
    label = f"{spec.primitive} of {task.name!r} (family {unpack_id(task.id).family})"
    labels = tuple(f"{label}, {phase}" for phase in ("entering", "leaving"))
    return _Collective(group, works, labels)


def _bind_pair(
    plan: Plan,
    task: Task,
    spec: CollectiveSpec,
    memory: Memory,
    link: Link,
    group: Group,
    source: int,
    target: int,
) -> list[PhasedMoves]:
    """The work for one value of the collective, per combination of slots."""
    ranks = group.ranks
    inputs = [_member_slots(plan, task, memory, link, rank, source) for rank in ranks]
    outputs = [
        memory.slots(target) if rank == plan.rank else link.peer_slots(rank, _of(rank, target))
        for rank in ranks
    ]
    own_published = link.peer_slots(plan.rank, target) is not None
    shared = own_published and all(slots is not None for slots in outputs)
    works = []
    own_slots = memory.slots(target)
    for version in range(math.lcm(len(own_slots), *map(len, inputs))):
        sources = [slots[version % len(slots)] for slots in inputs]
        targets = [slots[version % len(slots)] for slots in outputs if slots is not None]
        slot = version % len(own_slots)
        own = own_slots[slot]
        push = _pusher(link, group, source, version % len(memory.slots(source)), target, slot)
        works.append(
            _work(plan, task, spec, group, sources, own, targets if shared else None, push)
        )
    return works


def _pusher(
    link: Link, group: Group, source: int, source_slot: int, target: int, slot: int
) -> Push:
    """Prepares pushes of one combination of slots of a pair."""

    def push(member: int, output: bool, region: Region, flat: bool) -> Moves:
        register, number = (target, slot) if output else (source, source_slot)
        move = link.push(group.ranks[member], register, number, region, flat)
        return () if move is None else (move,)

    return push


def _together(works: Sequence[PhasedMoves]) -> PhasedMoves:
    """Several values' work between the same barriers."""
    depth = max(len(phases) for phases, _ in works)
    phases = tuple(
        _joined([each[number] for each, _ in works if number < len(each)])
        for number in range(depth)
    )
    return phases, tuple(move for _, epilogue in works for move in epilogue)


def _joined(phases: Sequence[Phase]) -> Phase:
    pushes = tuple(move for before, _ in phases for move in before)
    return pushes, tuple(move for _, after in phases for move in after)


class _Collective:
    """A bound collective: phases of array operations between barriers."""

    __slots__ = ("_entering", "_group", "_leaving", "_period", "_works")

    def __init__(
        self, group: Group, works: tuple[PhasedMoves, ...], labels: tuple[str, ...]
    ) -> None:
        self._group = group
        self._works = works
        self._period = len(works)
        self._entering, self._leaving = labels

    def __call__(self, version: int) -> None:
        barrier = self._group.barrier
        phases, epilogue = self._works[version % self._period]
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
    plan: Plan, task: Task, memory: Memory, link: Link, rank: int, register: int
) -> Slots:
    if rank == plan.rank:
        return memory.slots(register)
    slots = link.peer_slots(rank, _of(rank, register))
    if slots is None:
        raise TransportError(
            f"rank {rank} does not publish the input of a collective",
            op=task.name,
            rank=plan.rank,
            got=f"no register {format_id(_of(rank, register))}",
            hint="compile all ranks' plans from one job",
        )
    return slots


def _work(
    plan: Plan,
    task: Task,
    spec: CollectiveSpec,
    group: Group,
    sources: Sequence[Array],
    out: Array,
    outputs: Sequence[Array] | None,
    push: Push,
) -> PhasedMoves:
    """The work for one combination of slots. `outputs` are all members' where they can be read."""
    own = group.member
    program = _checked_program(plan, task, spec, group.ranks, sources, out, own)
    if (
        spec.primitive is Primitive.ALL_REDUCE
        and program.how is not None
        and outputs is not None
        and out.nbytes >= (CHUNKED_BYTES if len(sources) > 2 else CHUNKED_BYTES_OF_TWO)
    ):
        return _chunked_all_reduce(sources, out, outputs, own, program.how, push)
    pushes = _pushes(program, own, sources, push)
    if not np.may_share_memory(out, sources[own]):
        return ((pushes, _moves(program, own, sources, out)),), ()
    # In place: peers read the input until all have left, so the result waits aside until then.
    aside = np.empty_like(out)
    return ((pushes, _moves(program, own, sources, aside)),), (partial(np.copyto, out, aside),)


def _pushes(program: Program, own: int, sources: Sequence[Array], push: Push) -> Moves:
    """What of the own input each other member reads in `_moves`; the next member first."""
    members = len(sources)
    shape = sources[own].shape
    moves: list[Move] = []
    for member in (*range(own + 1, members), *range(own)):
        region = [(0, extent) for extent in shape]
        if program.cut is not None:
            region[program.cut] = balanced_range(shape[program.cut], members, member)
        moves += push(member, False, tuple(region), False)
    return tuple(moves)


def _moves(program: Program, own: int, sources: Sequence[Array], out: Array) -> Moves:
    """All the work of one member in one phase."""
    members = len(sources)
    parts = sources
    if program.cut is not None:
        mine = balanced_range(sources[own].shape[program.cut], members, own)
        parts = [source[part_index(program.cut, mine)] for source in sources]
    if program.how is not None:
        if program.cut is None:
            parts, out = [part.reshape(-1) for part in parts], out.reshape(-1)
        return tuple(plan_reduction(out, parts, program.how))
    join = program.join or 0
    places = balanced(out.shape[join], members)
    moves = tuple(
        partial(np.copyto, out[part_index(join, place)], part)
        for place, part in zip(places, parts, strict=True)
    )
    # Each starts with its own piece and goes round, so that they do not all read one rank at once.
    return moves[own:] + moves[:own]


def _chunked_all_reduce(
    sources: Sequence[Array],
    out: Array,
    outputs: Sequence[Array],
    own: int,
    reduction: Reduction,
    push: Push,
) -> PhasedMoves:
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


def _checked_program(
    plan: Plan,
    task: Task,
    spec: CollectiveSpec,
    ranks: tuple[int, ...],
    sources: Sequence[Array],
    out: Array,
    own: int,
) -> Program:
    """The program of a collective, where every member's input has the shape and dtype that follow
    from the output.
    """
    program = program_of(spec)
    members = len(ranks)
    mine = sources[own].shape
    for axis in (program.join, program.cut):
        if axis is not None and not 0 <= axis < out.ndim == len(mine):
            raise ExecutionError(
                f"a {spec.primitive} names an axis that its tensor does not have",
                op=task.name,
                rank=plan.rank,
                got=f"axis {axis} of {list(mine)} to {list(out.shape)}",
            )
    given = list(out.shape)
    if program.cut is not None:
        part = _extent(mine[program.cut], members, own)
        if part != out.shape[program.cut]:
            raise ExecutionError(
                f"the output of a {spec.primitive} has a wrong shape",
                op=task.name,
                rank=plan.rank,
                got=f"{list(out.shape)} from {list(mine)}",
                expected=f"extent {part} along axis {program.cut}",
            )
        given[program.cut] = mine[program.cut]
    for member, source in enumerate(sources):
        if program.join is not None:
            given[program.join] = _extent(out.shape[program.join], members, member)
        if source.shape != tuple(given) or source.dtype != out.dtype:
            raise ExecutionError(
                f"the pieces of a {spec.primitive} do not fit together",
                op=task.name,
                rank=plan.rank,
                got=f"{source.dtype}{list(source.shape)} on rank {ranks[member]}",
                expected=f"{out.dtype}{given}",
            )
    return program


def _extent(extent: int, members: int, member: int) -> int:
    start, stop = balanced_range(extent, members, member)
    return stop - start
