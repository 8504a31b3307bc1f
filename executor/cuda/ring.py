"""The ring of a device's task in which inputs of an op go round; see `ops.ring`.

Of each lane the first piece is what this device sends, the second what it receives. All of it is
launched on the task's stream, so that nothing is overwritten before it has been read. Pieces travel
with room for the largest, as both ends of a call must name one size.
"""

from __future__ import annotations

import numpy as np

from plancompiler.executor.cuda.interface import (
    CallKind,
    DeviceArray,
    DeviceCommunicator,
    DeviceStream,
    grouped,
)
from plancompiler.executor.memory import Slots
from plancompiler.ir.shard import element_count


class DeviceRing:
    """One device's place in the ring of a task."""

    def __init__(
        self,
        communicator: DeviceCommunicator,
        stream: DeviceStream,
        member: int,
        size: int,
        lanes: list[Slots],
    ) -> None:
        self.member, self.size = member, size
        self._communicator, self._stream, self._lanes = communicator, stream, lanes
        self._slot = 0
        self._given: list[int] = []

    def begin(self, version: int) -> None:
        """Before a run of the task, of this number."""
        self._slot = version % len(self._lanes[0])
        self._given.clear()

    def give(self, lane: int, array: DeviceArray) -> None:
        """See `Ring.give`."""
        target = self._lanes[lane][self._slot][0][: array.size]
        np.copyto(target.reshape(array.shape), array, casting="unsafe")
        self._given.append(lane)

    def turn(self) -> None:
        """See `Ring.turn`."""
        after, before = (self.member + 1) % self.size, (self.member - 1) % self.size
        call, stream = self._communicator.call, self._stream
        with grouped(self._communicator):
            for lane in sorted(self._given):
                pieces = self._lanes[lane][self._slot]
                call(CallKind.SEND, stream, pieces[0], None, peer=after)
                call(CallKind.RECEIVE, stream, None, pieces[1], peer=before)
        self._given.clear()

    def take(self, lane: int, shape: tuple[int, ...]) -> DeviceArray:
        """See `Ring.take`."""
        return self._lanes[lane][self._slot][1][: element_count(shape)].reshape(shape)

    def end(self) -> None:
        """After a run: the stream's order says when the memory may be used again."""
