"""Variables in memory that is not the plan's: which can be moved, and what has to know of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from plancompiler.executor.comm.link import Publication
from plancompiler.executor.memory import Array, Memory
from plancompiler.ir.shard import element_count
from plancompiler.plan.plan import Plan, RegisterDesc


@dataclass(slots=True)
class _Range:
    """The bytes of a variable within a block, and the registers that lie in them."""

    start: int
    stop: int
    name: str
    registers: list[RegisterDesc] = field(default_factory=list)
    movable: bool = True


class ExternalStorage:
    """Gives variables of one rank other memory.

    A variable can be moved that no peer reads, with all registers that lie in its bytes: values
    that ops make of it in place. Where one of those is wider than the variable, it stays.
    """

    def __init__(self, plan: Plan, memory: Memory, publication: Publication) -> None:
        self._memory = memory
        published = {region.key for region in publication.regions}
        self._ranges = {
            each.name: each for each in _ranges(plan, published) if each.movable and each.registers
        }
        self._tasks: dict[int, set[int]] = {}
        moving = {each.id for span in self._ranges.values() for each in span.registers}
        for task in plan.tasks:
            for register in {*task.inputs, *task.outputs} & moving:
                self._tasks.setdefault(register, set()).add(task.id)

    @property
    def movable(self) -> Collection[str]:
        """Names of the variables that can be moved."""
        return self._ranges.keys()

    def place(self, arrays: Mapping[str, Array | None]) -> set[int]:
        """Let variables lie in these arrays, None for the plan's own memory; gives the ids of the
        tasks that read or write them.
        """
        touched: set[int] = set()
        for name, array in arrays.items():
            registers = self._ranges[name].registers
            self._memory.place(registers, array)
            for register in registers:
                touched |= self._tasks.get(register.id, set())
        return touched


def _ranges(plan: Plan, published: Collection[int]) -> list[_Range]:
    used_ranges: list[_Range] = []
    by_block: dict[int, list[_Range]] = {}
    for variable in plan.variables:
        register = plan.register_by_id[variable.register]
        used = element_count(register.shape) * register.dtype.itemsize
        if used and register.register_count == 1 and not register.is_control:
            used_ranges.append(_Range(register.offset, register.offset + used, variable.name))
            by_block.setdefault(register.block, []).append(used_ranges[-1])
    starts: dict[int, list[int]] = {}
    for block, ranges in by_block.items():
        ranges.sort(key=lambda each: each.start)
        starts[block] = [each.start for each in ranges]
    for register in plan.registers:
        used = element_count(register.shape) * register.dtype.itemsize
        if register.is_control or not used or register.block not in by_block:
            continue
        start = register.offset
        stop = start + register.nbytes * (register.register_count - 1) + used
        ranges = by_block[register.block]
        for each in ranges[max(bisect_right(starts[register.block], start) - 1, 0) :]:
            if each.start >= stop:
                break
            if each.stop <= start:
                continue
            inside = each.start <= start and stop <= each.stop and register.register_count == 1
            each.movable &= inside and register.id not in published
            each.registers.append(register)
    return used_ranges
