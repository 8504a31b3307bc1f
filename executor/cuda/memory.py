"""A device rank's memory: one allocation per block, registers as views into them.

Nothing is allocated while steps run, except by kernels that need room of their own. Blocks in host
memory (what is copied to and from other ranks) come from the transport, so that peers can read
them.
"""

from __future__ import annotations

import numpy as np

from plancompiler.executor.comm.base import Transport
from plancompiler.executor.cuda.interface import Device, DeviceArray
from plancompiler.executor.memory import Array, Memory
from plancompiler.plan.plan import Block, Plan, RegisterDesc


def pinned_like(device: Device, like: DeviceArray) -> Array:
    """Pinned host memory for copies of a device's array."""
    found: Array = device.pinned(like.nbytes).view(like.dtype).reshape(like.shape)
    return found


class DeviceMemory(Memory):
    """All blocks of one device's rank and the arrays of its registers."""

    def __init__(self, plan: Plan, device: Device, transport: Transport) -> None:
        self._device = device
        self._devices = {block.index: block.device for block in plan.blocks}
        self._stream = device.stream("variables")
        self._event = device.event()

        def allocate(block: Block) -> DeviceArray:
            if block.device == "cpu":
                return transport.allocate(block)
            return device.allocate(block.nbytes)

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
        if target.size:
            pinned = self._pinned(target)
            np.copyto(pinned, value)
            self._device.upload(self._stream, target, pinned)
            self._wait()

    def read(self, register: int) -> Array:
        """A host copy of a register's first slot."""
        source = self.slots(register)[0]
        pinned = self._pinned(source)
        if source.size:
            self._device.download(self._stream, pinned, source)
            self._wait()
        return pinned.copy()

    def _pinned(self, like: DeviceArray) -> Array:
        return pinned_like(self._device, like)

    def _wait(self) -> None:
        self._device.record(self._event, self._stream)
        self._device.synchronize(self._event)
