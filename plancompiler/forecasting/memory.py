"""The memory that a rank holds from its preparation on, by kind, to the byte.

On CPUs that is the blocks of its plan with what aligning them takes, and what binding its transport
takes: results of collectives that wait aside, sums in wider dtypes, and receive buffers for peers
on other nodes. Arrays that kernels make while steps run are told apart (`WorkBuffers`), as far as
dry runs show them (`forecasting.kernel_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from plancompiler.costs import Machine
from plancompiler.executor.comm.collective import PIECE_BYTES
from plancompiler.executor.comm.program import program_of
from plancompiler.executor.comm.reduce import TILE_BYTES, accumulator
from plancompiler.executor.memory import ALIGNMENT
from plancompiler.forecasting.kernel_memory import kernel_arrays
from plancompiler.forecasting.traffic import BETWEEN, is_chunked, link_name
from plancompiler.ir.shard import balanced_range, element_count
from plancompiler.ir.task import TaskKind, unpack_id
from plancompiler.ops.registry import op_def
from plancompiler.ops.ring import Round
from plancompiler.plan.plan import (
    CollectiveSpec,
    ComputeSpec,
    CopySpec,
    Plan,
    RegisterDesc,
    Stream,
    Task,
    exchanged,
)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank holds."""

    parameters: int
    """Variables that are trained."""
    state: int
    """All other variables: those of optimizers above all."""
    activations: int
    """The arena: all that is made in a step."""
    padding: int
    """Between variables, and in front of blocks, so that they are aligned."""
    transport: int
    """Beside the blocks, for what goes between ranks."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class WorkBuffers:
    """Bytes of arrays that the kernels of a rank make on CPUs, from its first step on."""

    kept: int
    """That tasks keep between their runs."""
    passing: int
    """The most that one task of each stream makes beside these, streams added."""
    not_counted: tuple[str, ...]
    """Kinds of ops of the job whose kernels' arrays are not known before they run."""

    @property
    def total(self) -> int:
        return self.kept + self.passing

    def json(self) -> dict[str, object]:
        return {"kept": self.kept, "passing": self.passing, "not_counted": list(self.not_counted)}


def work_buffers(plan: Plan) -> WorkBuffers:
    """What the kernels of a rank make beside what the plan gives them."""
    kept, untold = 0, set()
    shared: dict[tuple[Stream, Hashable], int] = {}
    passing: dict[Stream, int] = {}
    for task in plan.tasks:
        spec = task.spec
        if not isinstance(spec, ComputeSpec) or task.kind is not TaskKind.COMPUTE:
            continue
        known = kernel_arrays(plan, task, spec)
        if known is None:
            untold.add(spec.kind)
            continue
        kept += known.kept
        passing[task.stream] = max(passing.get(task.stream, 0), known.passing)
        for key, nbytes in known.work:
            shared[task.stream, key] = max(shared.get((task.stream, key), 0), nbytes)
    kept += sum(shared.values())
    return WorkBuffers(kept, sum(passing.values()), tuple(sorted(untold)))


Slots = Callable[[int], int]
"""Register id of another rank → how many slots it has there."""


def rank_memory(plan: Plan, machine: Machine, slots_of: Slots) -> RankMemory:
    """What the rank of a plan holds on a machine."""
    registers = plan.register_by_id
    parameters = state = 0
    for variable in plan.variables:
        nbytes = _used(registers[variable.register])
        if dict(variable.attrs).get("trainable"):
            parameters += nbytes
        else:
            state += nbytes
    variables = sum(block.nbytes for block in plan.blocks if block.purpose == "variables")
    on_cpu = machine.device.type == "cpu"
    aligned = ALIGNMENT * len(plan.blocks) if on_cpu else 0
    transport = sum(_beside(plan)) + _receive_buffers(plan, machine, slots_of) if on_cpu else 0
    return RankMemory(
        parameters,
        state,
        plan.arena_bytes,
        variables - parameters - state + aligned,
        transport,
    )


def _used(register: RegisterDesc) -> int:
    return element_count(register.shape) * register.dtype.itemsize


def _beside(plan: Plan) -> Iterator[int]:
    """Arrays that binding collectives takes beside the blocks, as `bind_collective` does."""
    for task in plan.tasks:
        if isinstance(task.spec, CollectiveSpec):
            for source, target in zip(task.inputs, task.outputs, strict=True):
                given, made = plan.register_by_id[source], plan.register_by_id[target]
                versions = max(given.register_count, made.register_count)
                yield versions * _beside_pair(plan, task.spec, given, made)


def _beside_pair(plan: Plan, spec: CollectiveSpec, given: RegisterDesc, made: RegisterDesc) -> int:
    program = program_of(spec)
    ranks = plan.communicators[spec.communicator].ranks
    members, own = len(ranks), ranks.index(plan.rank)
    chunked = is_chunked(plan, spec, made, members)
    in_place = _overlap(given, made)
    aside = _used(made) if in_place and not chunked else 0
    if program.how is None or not _used(made) or members == 1:
        return aside
    dtype = made.dtype.numpy
    wide = accumulator(program.how, dtype)
    # In place without a chunk the result lies aside, so that it is none of the sources.
    overwrites = in_place and chunked and own >= 2
    if wide == dtype and not overwrites:
        return aside
    if not chunked:
        shape = made.shape if program.cut is not None else (element_count(made.shape),)
        return aside + _tile_elements(shape, made.dtype.itemsize) * wide.itemsize
    # A work array for every piece, all of which are kept.
    start, stop = balanced_range(element_count(made.shape), members, own)
    pieces = max(1, -(-_used(made) // (members * PIECE_BYTES)))
    return aside + sum(
        _tile_elements((last - first,), made.dtype.itemsize) * wide.itemsize
        for first, last in (balanced_range(stop - start, pieces, each) for each in range(pieces))
        if last > first
    )


def _tile_elements(shape: tuple[int, ...], itemsize: int) -> int:
    """Elements of the largest of the tiles in which an array is reduced."""
    nbytes = element_count(shape) * itemsize
    if not shape or not nbytes:
        return 1 if not shape else 0
    rows = max(1, TILE_BYTES * shape[0] // nbytes)
    return min(rows, shape[0]) * element_count(shape[1:])


def _overlap(one: RegisterDesc, other: RegisterDesc) -> bool:
    ends = [each.offset + each.nbytes * each.register_count for each in (one, other)]
    return one.block == other.block and one.offset < ends[1] and other.offset < ends[0]


def _receive_buffers(plan: Plan, machine: Machine, slots_of: Slots) -> int:
    """For what a rank reads of peers whose memory it cannot see."""
    sizes: dict[tuple[int, int], int] = {}

    def add(peer: int, key: int, nbytes: int) -> None:
        if link_name(machine, plan.rank, peer) == BETWEEN:
            sizes[peer, key] = nbytes + ALIGNMENT

    for task in plan.tasks:
        if isinstance(task.spec, CopySpec):
            remote = plan.remote_register_by_id[task.inputs[0]]
            used = element_count(remote.shape) * remote.dtype.itemsize
            add(unpack_id(remote.producer).rank, remote.id, used * slots_of(remote.id))
        elif isinstance(task.spec, ComputeSpec) and task.spec.lanes:
            ranks = plan.communicators[task.spec.communicator].ranks
            for lane in exchanged(task.spec, task.inputs, task.outputs):
                register = plan.register_by_id[lane]
                nbytes = _used(register) * register.register_count
                ring = isinstance(op_def(task.spec.kind).passing, Round)
                for peer in (ranks[ranks.index(plan.rank) - 1],) if ring else ranks:
                    add(peer, lane, nbytes)
        elif isinstance(task.spec, CollectiveSpec):
            for peer in plan.communicators[task.spec.communicator].ranks:
                for register in _read_of_peers(plan, task):
                    add(peer, register.id, _used(register) * register.register_count)
    return sum(sizes.values())


def _read_of_peers(plan: Plan, task: Task) -> Iterator[RegisterDesc]:
    """The own registers that stand for those of peers of a collective."""
    for source, target in zip(task.inputs, task.outputs, strict=True):
        yield plan.register_by_id[source]
        if plan.blocks[plan.register_by_id[target].block].shared:
            yield plan.register_by_id[target]
