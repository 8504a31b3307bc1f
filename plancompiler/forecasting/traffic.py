"""The bytes that ranks receive of each other in a step: payload, without the framing of messages.

Of ranks on CPUs it is what the executor's collectives and copies read of other ranks' registers,
whatever carries it: `executor.comm.collective` says how. Devices of other types have libraries of
their own, taken to move what rings move (`costs.primitive`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from plancompiler.costs import Machine, link_between, primitive_cost
from plancompiler.executor.comm.collective import CHUNKED_BYTES_OF_TWO
from plancompiler.executor.comm.program import program_of
from plancompiler.executor.comm.reduce import CHUNKED_BYTES
from plancompiler.ir.shard import balanced_range, element_count, region_shape
from plancompiler.ir.task import Primitive, unpack_id
from plancompiler.ops.registry import op_def
from plancompiler.ops.ring import Round, sum_dtype
from plancompiler.plan.plan import CollectiveSpec, ComputeSpec, CopySpec, Plan, RegisterDesc, Task

WITHIN, BETWEEN = "within nodes", "between nodes"
"""The links of a machine."""


@dataclass(frozen=True, slots=True)
class Received:
    """What one task of one rank receives of one peer in a step."""

    task: Task
    peer: int
    nbytes: float
    link: str


def received_in_step(plan: Plan, machine: Machine) -> Iterator[Received]:
    """What a rank receives in a step, task by task and peer by peer."""
    for task in plan.tasks:
        each = plan.segments[task.segment].kind.per_microbatch
        times = plan.microbatches if each else 1
        for peer, nbytes in received_of_task(plan, task, machine):
            if nbytes:
                yield Received(task, peer, nbytes * times, link_name(machine, plan.rank, peer))


def link_name(machine: Machine, rank: int, peer: int) -> str:
    """The kind of link between two ranks."""
    node = machine.node.devices
    if machine.network is None or node is None or rank // node == peer // node:
        return WITHIN
    return BETWEEN


def received_of_task(plan: Plan, task: Task, machine: Machine) -> Iterator[tuple[int, float]]:
    """(peer, bytes) that come to a rank in one run of a task."""
    spec = task.spec
    if isinstance(spec, CopySpec):
        remote = plan.remote_register_by_id[task.inputs[0]]
        nbytes = element_count(region_shape(spec.region)) * remote.dtype.itemsize
        yield unpack_id(remote.producer).rank, nbytes
    elif isinstance(spec, ComputeSpec) and spec.lanes:
        passing = op_def(spec.kind).passing
        if isinstance(passing, Round):
            ranks = plan.communicators[spec.communicator].ranks
            yield ranks[ranks.index(plan.rank) - 1], passed_bytes(plan, task, spec, passing)
    elif isinstance(spec, CollectiveSpec):
        ranks = plan.communicators[spec.communicator].ranks
        if machine.device.type == "cpu":
            yield from _read_of_members(plan, task, spec, ranks)
        else:
            # A ring: what comes, comes of the member before.
            before = ranks[ranks.index(plan.rank) - 1]
            yield before, ring_bytes(plan, task, spec, machine)


def depends_on_data(task: Task) -> bool:
    """Whether only the data of a step tell how much a task moves."""
    spec = task.spec
    return (
        isinstance(spec, ComputeSpec)
        and spec.lanes > 0
        and not isinstance(op_def(spec.kind).passing, Round)
    )


def passed_bytes(plan: Plan, task: Task, spec: ComputeSpec, passing: Round) -> int:
    """What comes round to a rank in one run of an op whose inputs go round (`ops.ring`): all pieces
    but its own, and their sums, but for those of the piece of the rank before.
    """
    ranks = plan.communicators[spec.communicator].ranks
    size, own = len(ranks), ranks.index(plan.rank)
    nbytes = 0
    for number in passing.inputs:
        register = plan.register_by_id[task.inputs[number]]
        extent = spec.input_shapes[number][passing.axis]
        across = element_count(
            [each for axis, each in enumerate(register.shape) if axis != passing.axis]
        )
        first, last = balanced_range(extent, size, own)
        nbytes += (extent - (last - first)) * across * register.dtype.itemsize
        if passing.sums:
            first, last = balanced_range(extent, size, (own - 1) % size)
            nbytes += (extent - (last - first)) * across * sum_dtype(register.dtype).itemsize
    return nbytes


def ring_bytes(plan: Plan, task: Task, spec: CollectiveSpec, machine: Machine) -> float:
    """What a member of a ring receives."""
    ranks = plan.communicators[spec.communicator].ranks
    cost = primitive_cost(spec.primitive, len(ranks), link_between(machine, ranks))
    return cost.share * whole_bytes(plan, task, spec)


def whole_bytes(plan: Plan, task: Task, spec: CollectiveSpec) -> float:
    """Bytes of the values that members of a collective work on together."""
    members = len(plan.communicators[spec.communicator].ranks)
    nbytes = 0.0
    for source, target in zip(task.inputs, task.outputs, strict=True):
        if spec.primitive is Primitive.ALL_GATHER:
            nbytes += _nbytes(plan.register_by_id[target])
        elif spec.primitive is Primitive.ALL_TO_ALL:
            nbytes += _nbytes(plan.register_by_id[source]) * members
        else:
            nbytes += _nbytes(plan.register_by_id[source])
    return nbytes


def _nbytes(register: RegisterDesc) -> int:
    return element_count(register.shape) * register.dtype.itemsize


def _read_of_members(
    plan: Plan, task: Task, spec: CollectiveSpec, ranks: tuple[int, ...]
) -> Iterator[tuple[int, float]]:
    """What a member reads of each other, as `bind_collective` has it."""
    program = program_of(spec)
    members, own = len(ranks), ranks.index(plan.rank)
    for source, target in zip(task.inputs, task.outputs, strict=True):
        given, made = plan.register_by_id[source], plan.register_by_id[target]
        for member, rank in enumerate(ranks):
            if member == own:
                continue
            if is_chunked(plan, spec, made, members):
                # The own chunk of the peer's input, and the peer's chunk of the result.
                chunks = (balanced_range(prod(made.shape), members, one) for one in (own, member))
                elements = sum(stop - start for start, stop in chunks)
            else:
                shape = list(given.shape)
                if program.join is not None:
                    start, stop = balanced_range(made.shape[program.join], members, member)
                    shape[program.join] = stop - start
                if program.cut is not None:
                    start, stop = balanced_range(given.shape[program.cut], members, own)
                    shape[program.cut] = stop - start
                elements = element_count(shape)
            yield rank, elements * made.dtype.itemsize


def is_chunked(plan: Plan, spec: CollectiveSpec, made: RegisterDesc, members: int) -> bool:
    """Whether the members of a reduction on CPUs share the work, instead of each doing all."""
    least = CHUNKED_BYTES if members > 2 else CHUNKED_BYTES_OF_TWO
    return (
        spec.primitive is Primitive.ALL_REDUCE
        and plan.blocks[made.block].shared
        and _nbytes(made) >= least
    )
