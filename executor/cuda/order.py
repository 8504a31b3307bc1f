"""The order in which one thread launches a rank's tasks: a pure change of the plan.

All streams of a device are fed by one thread, in plan order. The order is topological, so that the
thread never waits for work of its own rank; and as it is the same global order on all ranks, NCCL
calls of all communicators are launched in one order everywhere, which NCCL asks for. What is left
to wait for are other ranks' host memory and a bounded number of steps that the device may be
behind.

A SendRecv task reads a register of another rank's device. NCCL wants a send for it there, so the
rank that has the register gets one: a reader of the register like any other, with no credit to be
sent back. Each pair of ranks sends and receives on a *channel* of its own. NCCL may hold the host
in the first call on a channel until the other end comes. So where ranks exchange values, all go
through the channels in one order: else each might be held where it receives. With micro-batches two
ranks may send in another order than they receive (each follows its own slots), so that there each
value has a channel of its own, whose calls are in the order of its versions on both sides.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from plancompiler.ir.task import LANE_BITS, TaskKind, pack_task_id, unpack_id
from plancompiler.plan.plan import Plan, RegisterDesc, Stream, Task


class Channel(NamedTuple):
    """What one rank's device sends to another's."""

    source: int
    target: int
    family: int
    """Of the SendRecv tasks; -1 for all of a pair."""

    def __str__(self) -> str:
        value = f", family {self.family}" if self.family >= 0 else ""
        return f"rank {self.source} to {self.target}{value}"


@dataclass(frozen=True, slots=True)
class Send:
    """This rank's half of a SendRecv."""

    channel: Channel
    task: int
    """The id of the SendRecv task on the other rank."""


@dataclass(frozen=True)
class LaunchOrder:
    """A device rank's plan as its launcher runs it."""

    plan: Plan
    """One stream; crossing reads of devices made into local sends."""
    streams: dict[int, Hashable]
    """Task id → the device stream on which it is launched."""
    sends: dict[int, Send]
    """By the id of the local task that sends."""
    receives: dict[int, Channel]
    """By the id of the SendRecv task."""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All channels of the rank, in an order that all ranks share."""
        channels = {*(send.channel for send in self.sends.values()), *self.receives.values()}
        return tuple(sorted(channels))


def launch_order(plan: Plan) -> LaunchOrder:
    """The plan of a device's rank, as one stream with its sends."""
    tasks_by_id = plan.task_by_id
    sends: dict[int, Send] = {}
    inserted: dict[int, list[Task]] = {}
    exchanges = {
        (unpack_id(task.id).family, task.segment): task.id
        for task in reversed(plan.tasks)
        if task.kind is TaskKind.SEND_RECV
    }
    registers: list[RegisterDesc] = []
    for register in plan.registers:
        if plan.blocks[register.block].device == "cpu" or register.is_control:
            registers.append(register)
            continue
        consumers = []
        for consumer in register.consumers:
            fields = unpack_id(consumer)
            if fields.rank == plan.rank:
                consumers.append(consumer)
                continue
            lane = (1 << LANE_BITS) - 1 - len(sends)
            send = pack_task_id(plan.rank, fields.family, lane)
            family = fields.family if plan.microbatches > 1 else -1
            sends[send] = Send(Channel(plan.rank, fields.rank, family), consumer)
            consumers.append(send)
            producer = tasks_by_id[register.producer]
            after = exchanges.get((fields.family, producer.segment), producer.id)
            inserted.setdefault(after if plan.microbatches > 1 else -1, []).append(
                Task(
                    id=send,
                    kind=TaskKind.SEND_RECV,
                    stream=Stream.COPY,
                    name=f"{register.name}:send to rank {fields.rank}",
                    inputs=(register.id,),
                    outputs=(),
                    spec=None,
                    source=producer.source,
                    segment=producer.segment,
                )
            )
        registers.append(replace(register, consumers=tuple(consumers), sync_id=-1))
    receives = {
        task.id: _channel(plan, task) for task in plan.tasks if task.kind is TaskKind.SEND_RECV
    }
    ordered = _with_sends(plan, inserted, sends, receives)
    streams: dict[int, Hashable] = {
        task.id: sends[task.id].channel if task.id in sends else task.stream for task in ordered
    }
    received = {plan.task_by_id[task].inputs[0] for task in receives}
    launched = replace(
        plan,
        tasks=tuple(
            replace(
                task,
                stream=Stream.COMPUTE,
                inputs=() if task.id in receives else task.inputs,
                spec=None if task.id in receives else task.spec,
            )
            for task in ordered
        ),
        registers=tuple(registers),
        remote_registers=tuple(
            remote for remote in plan.remote_registers if remote.id not in received
        ),
    )
    return LaunchOrder(launched, streams, sends, receives)


def _channel(plan: Plan, task: Task) -> Channel:
    source = unpack_id(plan.remote_register_by_id[task.inputs[0]].producer).rank
    return Channel(source, plan.rank, unpack_id(task.id).family if plan.microbatches > 1 else -1)


def _with_sends(
    plan: Plan,
    inserted: dict[int, list[Task]],
    sends: dict[int, Send],
    receives: dict[int, Channel],
) -> list[Task]:
    """Plan order with sends: where the other rank receives. With micro-batches that is known where
    this rank receives in the same exchange; else a send comes right after the task that makes the
    value, as the receiving segment is not one of this rank's.
    """

    def place(task: Task) -> tuple[int, tuple[int, ...]]:
        """A family's place, and in it that of a channel and of what is received there."""
        call: tuple[int, ...] = ()
        if task.id in sends:
            call = *sends[task.id].channel, sends[task.id].task
        elif task.id in receives:
            call = *receives[task.id], task.id
        return unpack_id(task.id).family, call

    ordered: list[Task] = []
    for task in plan.tasks:
        ordered.append(task)
        ordered.extend(inserted.get(task.id, ()))
    if plan.microbatches > 1:
        families = groupby(ordered, lambda task: (unpack_id(task.id).family, task.segment))
        return [task for _, family in families for task in sorted(family, key=place)]
    # One segment: plan order is the order of the families.
    ordered.extend(inserted.get(-1, ()))
    return sorted(ordered, key=place)
