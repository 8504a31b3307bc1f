"""The memory report of a plan: how many arena bytes are alive at each task, and whose they are.

Time is plan order. Streams may run apart from it, which is why the arena's own lower bound
(`peak_live_bytes`) can be higher than the peak along this one order. Of several micro-batches the
order is that of one: what segments carry to others counts with all its slots, from the start of the
first segment to the end of the last, for other micro-batches hold them meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from plancompiler.plan.plan import Plan, RegisterDesc


@dataclass(frozen=True, slots=True)
class LiveRegister:
    """Bytes alive at the peak."""

    name: str
    """The value that first had the bytes."""
    op: str
    """The task that made it."""
    source: str
    nbytes: int
    first: int
    """Place of the producer in plan order."""
    last: int
    """Place of the last user."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """One rank's arena over a step."""

    rank: int
    arena_bytes: int
    lower_bound: int
    """The most bytes alive at once under any order that the streams allow."""
    variable_bytes: int
    live: tuple[int, ...]
    """Bytes alive while each task of the plan runs."""
    peak: int
    """Place in plan order with the most bytes alive."""
    at_peak: tuple[LiveRegister, ...]
    """What is alive there, largest first."""

    @property
    def ratio(self) -> float:
        """Arena size over its lower bound; 1.0 where nothing could be saved."""
        return self.arena_bytes / self.lower_bound if self.lower_bound else 1.0


def memory_report(plan: Plan) -> MemoryReport:
    """Who lives when in the plan's arena."""
    position = {task.id: place for place, task in enumerate(plan.tasks)}
    arena = {block.index for block in plan.blocks if block.purpose == "arena"}
    groups: dict[int, list[RegisterDesc]] = {}
    root: dict[int, int] = {}
    for register in sorted(plan.registers, key=lambda each: position[each.producer]):
        if register.is_control or register.block not in arena:
            continue
        root[register.id] = root.get(register.inplace_of, register.id)
        groups.setdefault(root[register.id], []).append(register)
    held: dict[int, tuple[int, int]] = {}
    """Segment → places of its first and last task."""
    for place, task in enumerate(plan.tasks):
        held[task.segment] = held.get(task.segment, (place, place))[0], place
    change = [0] * (len(plan.tasks) + 1)
    spans = []
    for members in groups.values():
        users = [
            position[task]
            for register in members
            for task in (register.producer, *register.consumers)
            if task in position
        ]
        first, last = min(users), max(users)
        nbytes = members[0].nbytes * members[0].register_count
        start, end = held[plan.tasks[first].segment], held[plan.tasks[last].segment]
        begin, stop = first, last
        repeated = plan.segments[plan.tasks[first].segment].kind.per_microbatch
        if start != end or members[0].per_microbatch is not repeated:
            begin, stop = start[0], end[1]
        change[begin] += nbytes
        change[stop + 1] -= nbytes
        spans.append((nbytes, begin, stop, members[0], first, last))
    live = tuple(accumulate(change[:-1]))
    peak = max(range(len(live)), key=live.__getitem__, default=0)
    at_peak = sorted(
        (span for span in spans if span[1] <= peak <= span[2]),
        key=lambda span: (-span[0], span[1]),
    )
    return MemoryReport(
        rank=plan.rank,
        arena_bytes=plan.arena_bytes,
        lower_bound=plan.peak_live_bytes,
        variable_bytes=sum(b.nbytes for b in plan.blocks if b.purpose == "variables"),
        live=live,
        peak=peak,
        at_peak=tuple(
            LiveRegister(
                register.name,
                plan.task_by_id[register.producer].name,
                str(plan.task_by_id[register.producer].source),
                nbytes,
                first,
                last,
            )
            for nbytes, _, _, register, first, last in at_peak
        ),
    )
