"""The bytes that ranks receive of each other in a step: payload, without the framing of messages.

Of ranks on CPUs it is what the executor's collectives and copies read of other ranks' registers,
whatever carries it: `executor.comm.collective` says how. Devices of other types have libraries of
their own, taken to move what rings move (`costs.primitive`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from plancompiler.costs import Machine, link_between, primitive_cost
from plancompiler.executor.comm.collective import CHUNKED_BYTES_OF_TWO
from plancompiler.executor.comm.program import program_of
from plancompiler.executor.comm.reduce import CHUNKED_BYTES
from plancompiler.ir import Placement
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


_Numbers = np.ndarray[Any, np.dtype[np.int64]]


class ClassLinks:
    """The links by which ranks of a class receive: which of those that they receive of are on their
    node differs, though they do alike.
    """

    def __init__(self, machine: Machine, placements: Sequence[Placement]) -> None:
        self._machine = machine
        self._placements = placements
        self._within: dict[tuple[int, int, tuple[int, ...]], int] = {}
        """By the first rank of a class, the one of which it receives, and their group."""

    def links(self, plan: Plan, one: Received, ranks: Sequence[int]) -> Iterator[tuple[str, int]]:
        """(link, ranks that receive by it) of what the first of them receives as `one` says."""
        spec = one.task.spec
        members: tuple[int, ...] = ()
        if isinstance(spec, CollectiveSpec) or (isinstance(spec, ComputeSpec) and spec.lanes):
            members = plan.communicators[spec.communicator].ranks
        key = ranks[0], one.peer, members
        if key not in self._within:
            in_ring = isinstance(spec, ComputeSpec) or self._machine.device.type != "cpu"
            self._within[key] = self._count(one, members, in_ring, np.asarray(ranks))
        within = self._within[key]
        if within:
            yield WITHIN, within
        if within < len(ranks):
            yield BETWEEN, len(ranks) - within

    def _count(
        self, one: Received, members: tuple[int, ...], in_ring: bool, ranks: _Numbers
    ) -> int:
        """How many have the one of which they receive on their node."""
        node = self._machine.node.devices
        if self._machine.network is None or node is None:
            return len(ranks)
        if members:
            peers = self._in_group(members, one.peer, in_ring, ranks)
        else:
            peers = self._across(one.peer, ranks)
        if peers is None:  # as the first of them
            return len(ranks) if one.link == WITHIN else 0
        return int((peers // node == ranks // node).sum())

    def _in_group(
        self, members: tuple[int, ...], peer: int, in_ring: bool, ranks: _Numbers
    ) -> _Numbers | None:
        """Of each rank the member of its own group that is to it what `peer` is to the first: as
        far before it in a ring; else at the same place, or at the first one's where the rank itself
        is at that.
        """
        groups = self._groups(members)
        if groups is None:
            return None
        place = _places(groups)[ranks]
        row, own = np.divmod(place, len(members))
        there = members.index(peer)
        shift = there - own[0]
        other = (own + shift) % len(members) if in_ring else np.where(own == there, own[0], there)
        return np.asarray(groups[row, other])

    def _groups(self, members: tuple[int, ...]) -> _Numbers | None:
        """All groups [group, member] of the mesh to which one belongs."""
        for placement in self._placements:
            if any(member not in placement for member in members):
                continue
            places = [placement.coordinates(placement.parallel_id(rank)) for rank in members]
            axes = [axis for axis in range(placement.ndim) if len({at[axis] for at in places}) > 1]
            if placement.group(members[0], axes) != members:
                continue
            last = range(placement.ndim - len(axes), placement.ndim)
            return np.moveaxis(placement.ranks, axes, last).reshape(-1, len(members))
        return None

    def _across(self, peer: int, ranks: _Numbers) -> _Numbers | None:
        """Of each rank the one that is as far from it in meshes of one shape as `peer` is from the
        first: in those meshes in which that is nearest.
        """
        nearest: tuple[int, _Numbers] | None = None
        for own, other in itertools.product(self._placements, repeat=2):
            if other.hierarchy != own.hierarchy or peer not in other:
                continue
            if any(rank not in own for rank in ranks.tolist()):
                continue
            at = np.stack(np.unravel_index(_places(own.ranks)[ranks], own.hierarchy))
            shift = np.array(other.coordinates(other.parallel_id(peer))) - at[:, 0]
            there = at + shift[:, None]
            far = int(np.abs(shift).sum())
            within = (there >= 0) & (there < np.array(own.hierarchy)[:, None])
            if within.all() and (nearest is None or far < nearest[0]):
                nearest = far, np.asarray(other.ranks[tuple(there)])
        return None if nearest is None else nearest[1]


def _places(ranks: _Numbers) -> _Numbers:
    """Rank → its place among all, counted in rows; -1 for others."""
    places = np.full(int(ranks.max()) + 1, -1, np.int64)
    places[ranks.ravel()] = np.arange(ranks.size)
    return places


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
