"""A rank's memory: blocks, and registers as NumPy views into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import ExecutionError
from plancompiler.ir import DType
from plancompiler.ir.shard import element_count
from plancompiler.ir.task import format_id
from plancompiler.plan.plan import Block, Plan, RegisterDesc

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""Bytes of a block, aligned to `ALIGNMENT`."""
Slots = tuple[Array, ...]
"""One array per slot of a register."""

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


def private_buffer(nbytes: int) -> Buffer:
    """Zeroed memory of this process, aligned."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def slot_arrays(
    buffer: Buffer,
    offset: int,
    nbytes: int,
    register_count: int,
    shape: tuple[int, ...],
    dtype: DType,
) -> Slots:
    """The slots of a register: slot k is at `offset + k * nbytes` of the buffer."""
    used = element_count(shape) * dtype.itemsize
    return tuple(
        buffer[offset + slot * nbytes : offset + slot * nbytes + used]
        .view(dtype.numpy)
        .reshape(shape)
        for slot in range(register_count)
    )


def read_only(array: Array) -> Array:
    """The same memory, through a view that refuses writes."""
    view = array.view()
    view.flags.writeable = False
    return view


def address_of(array: Array) -> int:
    """Where an array begins; arrays on devices say it by `__cuda_array_interface__`."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return int(array.__cuda_array_interface__["data"][0])


def same_memory(left: Array, right: Array) -> bool:
    """Whether two contiguous arrays are the same bytes."""
    return left.nbytes == right.nbytes and (
        left.nbytes == 0 or address_of(left) == address_of(right)
    )


class Memory:
    """All blocks of one rank and the arrays of its registers."""

    def __init__(self, plan: Plan, allocate: Callable[[Block], Buffer]) -> None:
        self._buffers = {block.index: allocate(block) for block in plan.blocks}
        self._slots = {register.id: self._resolve(register) for register in plan.registers}

    def _resolve(self, register: RegisterDesc) -> Slots:
        used = element_count(register.shape) * register.dtype.itemsize
        if register.is_control or used == 0:
            # Control registers carry nothing; empty ones need no place.
            return (self._empty(register),) * register.register_count
        buffer = self._buffers.get(register.block)
        end = register.offset + register.nbytes * register.register_count
        if (
            buffer is None
            or register.offset < 0
            or register.offset % register.dtype.itemsize
            or register.nbytes < used
            or end > buffer.nbytes
        ):
            raise ExecutionError(
                f"register {register.name!r} does not fit its memory block",
                got=f"register {format_id(register.id)}: block {register.block}, offset "
                f"{register.offset}, {register.register_count} slots of {register.nbytes} bytes",
                expected="no such block"
                if buffer is None
                else f"{buffer.nbytes} bytes, {used} used",
            )
        return slot_arrays(
            buffer,
            register.offset,
            register.nbytes,
            register.register_count,
            register.shape,
            register.dtype,
        )

    def _empty(self, register: RegisterDesc) -> Array:
        """An array without bytes."""
        shape = (0,) if register.is_control else register.shape
        return np.empty(shape, register.dtype.numpy)

    def write(self, register: int, value: Array) -> None:
        """Fill a register's first slot from an array of its shape and dtype."""
        np.copyto(self._slots[register][0], value)

    def read(self, register: int) -> Array:
        """A copy of a register's first slot."""
        return self._slots[register][0].copy()

    def slots(self, register: int) -> Slots:
        """Arrays of a register's slots."""
        return self._slots[register]

    def place(self, registers: Sequence[RegisterDesc], array: Array | None) -> None:
        """Let registers that share one range of bytes lie in a contiguous array of the CPU that is
        as large; None for the place that the plan gives them.
        """
        if array is None:
            self._slots.update({register.id: self._resolve(register) for register in registers})
            return
        data = array.reshape(-1).view(np.uint8)
        start = min(register.offset for register in registers)
        for register in registers:
            self._slots[register.id] = slot_arrays(
                data, register.offset - start, 0, 1, register.shape, register.dtype
            )

    def period(self, *registers: int) -> int:
        """After how many runs of a task the slots of these registers repeat together."""
        return math.lcm(*(len(self._slots[register]) for register in registers))

    def close(self) -> None:
        """Let go of all memory; it is freed when the last array into it is gone."""
        self._buffers.clear()
        self._slots.clear()
