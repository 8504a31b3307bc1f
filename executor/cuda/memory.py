"""A device rank's memory: one allocation per block, registers as views into them.

Nothing is allocated while steps run, except by kernels that need room of their own. Blocks in host
memory (what is copied to and from other ranks) come from the transport, so that peers can read
them, and are pinned while the rank is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.publication import allocated
from plancompiler.executor.cuda.interface import Device, DeviceArray
from plancompiler.executor.memory import Array, Buffer, Memory
from plancompiler.plan.plan import Block, Plan, RegisterDesc

PASSAGE_BYTES = 16 << 20
"""Pinned memory through which variables go to the device and back, piece by piece."""


def pinned_like(device: Device, like: DeviceArray) -> Array:
    """Pinned host memory for copies of a device's array."""
    pinned: Array = device.pinned(like.nbytes).view(like.dtype).reshape(like.shape)
    return pinned


class DeviceMemory(Memory):
    """All blocks of one device's rank and the arrays of its registers."""

    def __init__(self, plan: Plan, device: Device, link: Link) -> None:
        self._device = device
        self._devices = {block.index: block.device for block in plan.blocks}
        self._stream = device.stream("variables")
        self._event = device.event()
        self._passage: Buffer | None = None
        self._pinned: list[Callable[[], None]] = []

        def allocate(block: Block) -> DeviceArray:
            if block.device != "cpu":
                return device.allocate(block.nbytes)
            buffer = allocated(link, block)
            if buffer.nbytes:
                self._pinned.append(device.pin(buffer))
            return buffer

        super().__init__(plan, allocate)

    def on_device(self, register: RegisterDesc) -> bool:
        """Whether a register lies in the device's memory."""
        return self._devices.get(register.block, "cpu") != "cpu"

    def _empty(self, register: RegisterDesc) -> DeviceArray:
        if self.on_device(register):
            return self._device.arrays.empty(register.shape, register.dtype.numpy)
        return super()._empty(register)

    def write(self, register: int, value: Array) -> None:
        """Fill a register's first slot from a host array of its shape and dtype."""
        target = self.slots(register)[0]
        given = np.ascontiguousarray(value, target.dtype).reshape(-1)
        for part, passage in self._parts(target):
            np.copyto(passage, given[part])
            self._device.upload(self._stream, target.reshape(-1)[part], passage)
            self._wait()

    def read(self, register: int) -> Array:
        """A host copy of a register's first slot."""
        source = self.slots(register)[0]
        copy: Array = np.empty(source.shape, source.dtype)
        flat = copy.reshape(-1)
        for part, passage in self._parts(source):
            self._device.download(self._stream, passage, source.reshape(-1)[part])
            self._wait()
            np.copyto(flat[part], passage)
        return copy

    def unpin(self) -> None:
        """Let go of host memory, before the transport frees it."""
        while self._pinned:
            self._pinned.pop()()
        self._passage = None

    def _parts(self, array: DeviceArray) -> Iterator[tuple[slice, Array]]:
        """Elements of an array that go through pinned memory together, and that memory."""
        if self._passage is None:
            self._passage = self._device.pinned(PASSAGE_BYTES)
        step = PASSAGE_BYTES // array.dtype.itemsize
        for start in range(0, array.size, step):
            stop = min(start + step, array.size)
            nbytes = (stop - start) * array.dtype.itemsize
            yield slice(start, stop), self._passage[:nbytes].view(array.dtype)

    def _wait(self) -> None:
        self._device.record(self._event, self._stream)
        self._device.synchronize(self._event)
