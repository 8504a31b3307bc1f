"""`CommContextManager`: communicators by ranks, stream and device type, made when first asked for.

Members find each other by the group's name at its first operation, so that they may make their
groups in any order. What must have one order is the operations of a group, and that is checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, overload

from plancompiler.errors import AttributeValueError, PlanCompilerError
from plancompiler.executor.comm.context import CommContext, CommStream, positive_seconds
from plancompiler.executor.comm.deferred import StreamThread, world_closed
from plancompiler.executor.comm.flight_recorder import CommRecord, FlightRecorder
from plancompiler.executor.comm.link import Link
from plancompiler.executor.comm.rendezvous import WorldLink
from plancompiler.executor.space import Spaces

STREAM = "communicator"


class CommContextManager:
    """Communicators of one rank. A group is named by its ranks in order, and made once."""

    def __init__(self, world: WorldLink) -> None:
        self.rank = world.rank
        self.recorder = FlightRecorder(world.rank)
        """The latest operations of this rank."""
        self.aborters: list[Callable[[PlanCompilerError], None]] = []
        """Called, from any thread, when a rank of the world has failed: what else this rank runs
        with others stops too."""
        self.spaces = Spaces(world.rank)
        """Where arrays of this rank lie."""
        self._world = world
        world.failed = self._failed
        self._lock = threading.Lock()
        self._contexts: dict[tuple[tuple[int, ...], str, str], CommContext] = {}
        self._streams: dict[tuple[tuple[int, ...], str], CommStream] = {}
        self._thread: StreamThread | None = None
        self.closed = False
        """Whether it has let go of everything."""

    @property
    def observers(self) -> list[Callable[[CommRecord], None]]:
        """Called with each operation when it is called for."""
        return self.recorder.observers

    @property
    def deadline(self) -> float:
        """Seconds that every wait for other ranks may take; can be set."""
        return self._world.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        with self._lock:
            self._world.deadline = positive_seconds(seconds)
            for context in self._contexts.values():
                context.deadline = seconds

    @overload
    def context(
        self,
        ranks: Sequence[int],
        on_compute_stream: Literal[True] = True,
        device_type: str = "cpu",
    ) -> CommContext: ...

    @overload
    def context(
        self, ranks: Sequence[int], on_compute_stream: Literal[False], device_type: str = "cpu"
    ) -> CommStream: ...

    def context(
        self, ranks: Sequence[int], on_compute_stream: bool = True, device_type: str = "cpu"
    ) -> CommContext | CommStream:
        """The communicator of these distinct ranks. AttributeValueError unless this rank is one.

        Its operations run at once, in the calling thread; or, off the compute stream, on the
        rank's communicator stream beside what the rank computes, and return `Work`s to wait for: a
        thread for arrays of the host, a CUDA stream for those of devices. With `device_type`
        "cuda" arrays lie on the ranks' devices. DeviceError where this rank has none.
        """
        key = tuple(ranks)
        if on_compute_stream:
            return self._contexts.get((key, "", device_type)) or self._made(key, "", device_type)
        deferred = self._streams.get((key, device_type))
        if deferred is None:
            made = self._made(key, STREAM, device_type)
            deferred = self._streams[key, device_type] = made.deferred(self._stream_thread)
        return deferred

    def pair(self, peer: int, like: CommContext) -> CommContext:
        """The context of this rank and another one, on the stream and device type of `like`."""
        first, second = sorted((self.rank, peer))
        return self._made((first, second), like.stream, like.device_type)

    def _stream_thread(self) -> StreamThread:
        if self._thread is None:
            self._thread = StreamThread(self.rank)
        return self._thread

    def _made(self, key: tuple[int, ...], stream: str, device_type: str) -> CommContext:
        with self._lock:
            context = self._contexts.get((key, stream, device_type))
            if context is None:
                if self.rank not in key or len(set(key)) != len(key):
                    raise AttributeValueError(
                        "a communicator has distinct ranks, this one among them",
                        rank=self.rank,
                        got=str(list(key)),
                    )
                if self.closed:
                    raise world_closed(f"a communicator of ranks {list(key)}")
                space = self.spaces.of(device_type)
                name = stream if device_type == "cpu" else f"{device_type} {stream}"
                context = space.context(self._world.rendezvous(key, name), self, stream)
                self._contexts[key, stream, device_type] = context
        return context

    @property
    def remote(self) -> Callable[[str], Link] | None:
        """Makes this rank's link of a run to ranks of other hosts, by the run's secret; None where
        the world is on one host.
        """
        return self._world.far

    def dump(self, path: Path | str) -> None:
        """Write what this rank did last to a file; see `FlightRecorder.dump`."""
        self.recorder.dump(path)

    def abort(self, error: PlanCompilerError) -> None:
        """Fail every wait of every rank with this cause."""
        if self.closed:
            return
        self.recorder.dump_on_failure()
        self._world.abort(error)

    def _failed(self, error: PlanCompilerError) -> None:
        self.spaces.abort(error)
        for aborter in tuple(self.aborters):
            aborter(error)

    def close(self) -> None:
        """Let go of everything, when the communicator stream has done what it was given. Contexts
        that somebody has kept raise TransportError from then on. May be called again.
        """
        if self._thread is not None:
            self._thread.close()
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for context in self._contexts.values():
                context.close()
            self._streams.clear()
            self._contexts.clear()
        self.spaces.close()
        self._world.close()
