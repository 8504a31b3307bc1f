"""What the kernels of a plan's tasks pass between ranks; see `ops.ring` and `ops.exchange`.

In a ring each lane is a register with two pieces, which the next rank reads. What is given goes
into the piece that is not being read, and ranks meet once a turn: then everybody has read what was
given in the turn before. Ranks without shared memory push the piece when it is given, so that it
travels while they compute. In an exchange the only lane holds all rows that a rank sends, sorted by
receiver; each reads its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.errors import TransportError
from plancompiler.executor.comm.link import Group, GroupKey, Link
from plancompiler.executor.comm.publication import communicator_keys
from plancompiler.executor.memory import Array, Memory
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import format_id, pack_register_id, unpack_id
from plancompiler.plan.plan import ComputeSpec, Plan, Task, exchanged


class _Members:
    """The members of a task's communicator, and this rank's lanes."""

    def __init__(
        self, plan: Plan, task: Task, spec: ComputeSpec, memory: Memory, link: Link
    ) -> None:
        ranks, occurrence = communicator_keys(plan)[spec.communicator]
        self._group: Group = link.group(GroupKey(ranks, occurrence, str(task.stream)))
        self._ranks = ranks
        self.member, self.size = self._group.member, len(ranks)
        self._link = link
        self._registers = exchanged(spec, task.inputs, task.outputs)
        self._own = [memory.slots(each) for each in self._registers]
        self._slot = 0
        self._label = f"{spec.kind} of {task.name!r} (family {unpack_id(task.id).family})"

    def begin(self, version: int) -> None:
        """Before a run of the task, of this number."""
        self._slot = version % len(self._own[0])

    def end(self) -> None:
        """After a run: when all have read what they were given, its memory may be used again."""
        self._group.barrier(f"{self._label}, leaving")


class PlanRing(_Members):
    """One rank's place in the ring of a task."""

    def __init__(
        self, plan: Plan, task: Task, spec: ComputeSpec, memory: Memory, link: Link
    ) -> None:
        super().__init__(plan, task, spec, memory, link)
        self._next = self._ranks[(self.member + 1) % self.size]
        before = self._ranks[self.member - 1]
        self._theirs = [_slots_of(plan, task, link, before, each) for each in self._registers]
        self._turns = 0

    def begin(self, version: int) -> None:
        """See `_Members.begin`."""
        super().begin(version)
        self._turns = 0

    def give(self, lane: int, array: Array) -> None:
        """See `Ring.give`."""
        piece, count = self._turns % 2, array.size
        target = self._own[lane][self._slot][piece, :count]
        target.reshape(array.shape)[...] = array
        box = ((piece, piece + 1), (0, count))
        push = self._link.push(self._next, self._registers[lane], self._slot, box)
        if push is not None and count:
            push()

    def turn(self) -> None:
        """See `Ring.turn`."""
        self._group.barrier(f"{self._label}, turn {self._turns + 1}")
        self._turns += 1

    def take(self, lane: int, shape: tuple[int, ...]) -> Array:
        """See `Ring.take`."""
        theirs = self._theirs[lane]
        piece = theirs[self._slot % len(theirs)][(self._turns - 1) % 2]
        taken: Array = piece[: element_count(shape)].reshape(shape)
        return taken


class PlanPeers(_Members):
    """One rank's place among those that exchange rows in a task."""

    def __init__(
        self, plan: Plan, task: Task, spec: ComputeSpec, memory: Memory, link: Link
    ) -> None:
        super().__init__(plan, task, spec, memory, link)
        (register,) = self._registers
        self._theirs = [_slots_of(plan, task, link, rank, register) for rank in self._ranks]

    def exchange(self, rows: Sequence[Array], coming: Sequence[range]) -> Sequence[Array]:
        """See `Peers.exchange`."""
        outbox, start = self._own[0][self._slot], 0
        for rank, each in zip(self._ranks, rows, strict=True):
            stop = start + len(each)
            if stop > start:
                outbox[start:stop] = each.reshape(stop - start, outbox.shape[1])
                box = ((start, stop), (0, outbox.shape[1]))
                push = None
                if rank != self._ranks[self.member]:
                    push = self._link.push(rank, self._registers[0], self._slot, box)
                if push is not None:
                    push()
            start = stop
        self._group.barrier(f"{self._label}, entering")
        rest = rows[0].shape[1:]
        return [
            slots[self._slot % len(slots)][part.start : part.stop].reshape(len(part), *rest)
            for slots, part in zip(self._theirs, coming, strict=True)
        ]


def _slots_of(plan: Plan, task: Task, link: Link, rank: int, register: int) -> tuple[Array, ...]:
    fields = unpack_id(register)
    theirs = pack_register_id(rank, fields.family, fields.lane, fields.slot)
    slots = link.peer_slots(rank, theirs)
    own = plan.register_by_id[register]
    if slots is None or any(each.shape != own.shape for each in slots):
        raise TransportError(
            f"rank {rank} does not pass on what the ring of {task.name!r} does",
            op=task.name,
            rank=plan.rank,
            got=f"no register {format_id(theirs)} of {own.dtype}{list(own.shape)}",
            hint="compile all ranks' plans from one job",
        )
    return tuple(slots)
