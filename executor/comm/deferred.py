"""Operations whose results come later, and the thread that runs those of communicator streams."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from plancompiler.errors import TransportError, UsageError
from plancompiler.executor.comm.flight_recorder import CommRecord
from plancompiler.executor.comm.operations import Operation, Operations
from plancompiler.executor.memory import Array
from plancompiler.ir import Reduction

Found = TypeVar("Found")


class Work(Generic[Found]):
    """An operation that was called for, and its result when it has ended."""

    def __init__(self, record: CommRecord, threaded: bool) -> None:
        self.record = record
        self.started = threading.Event()
        """Set when it begins."""
        self.ended = threading.Event()
        """Set when it is over, well or not."""
        self._threaded = threaded
        self._found: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Found:
        """The result, when the operation is over. Raises the error with which it failed.

        UsageError for an operation of a group that is not closed yet.
        """
        if not self._threaded and not self.ended.is_set():
            raise UsageError(
                "the operations of a group run when its block ends",
                source=self.record.source,
                got=self.record.call,
                hint="call wait() after the `with` block",
            )
        self.ended.wait()
        if self._error is not None:
            raise self._error
        found: Found = self._found
        return found

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.ended.is_set()

    def end(self, found: Found) -> None:
        """Give it its result."""
        self._found = found
        self.started.set()
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        """Give it the error that `wait` raises."""
        self._error = error
        self.ended.set()


class DeferredCalls:
    """The operations of a `CommContext`, each of which returns a `Work` at once.

    Inputs must stay as they are until the work is over; an `out` is written until then.
    """

    def __init__(self, calls: Operations, submit: Callable[[Operation[Any]], Work[Any]]) -> None:
        self._calls = calls
        self._submit = submit

    def all_reduce(self, x: Array, reduction: Reduction | str = Reduction.SUM) -> Work[Array]:
        """See `CommContext.all_reduce`."""
        return self._submit(self._calls.all_reduce(x, reduction))

    def reduce(
        self, x: Array, root: int, reduction: Reduction | str = Reduction.SUM
    ) -> Work[Array | None]:
        """See `CommContext.reduce`."""
        return self._submit(self._calls.reduce(x, root, reduction))

    def reduce_scatter(
        self, x: Array, axis: int = 0, reduction: Reduction | str = Reduction.SUM
    ) -> Work[Array]:
        """See `CommContext.reduce_scatter`."""
        return self._submit(self._calls.reduce_scatter(x, axis, reduction))

    def broadcast(self, x: Array | None, root: int) -> Work[Array]:
        """See `CommContext.broadcast`."""
        return self._submit(self._calls.broadcast(x, root))

    def all_gather(self, x: Array, axis: int = 0) -> Work[Array]:
        """See `CommContext.all_gather`."""
        return self._submit(self._calls.all_gather(x, axis))

    def partial_all_gather(self, x: Array) -> Work[Array]:
        """See `CommContext.partial_all_gather`."""
        return self._submit(self._calls.partial_all_gather(x))

    def gather(self, x: Array, root: int, axis: int = 0) -> Work[Array | None]:
        """See `CommContext.gather`."""
        return self._submit(self._calls.gather(x, root, axis))

    def scatter(self, pieces: Sequence[Array] | None, root: int) -> Work[Array]:
        """See `CommContext.scatter`."""
        return self._submit(self._calls.scatter(pieces, root))

    def all_to_all(self, x: Array, split_axis: int = 0, join_axis: int = 0) -> Work[Array]:
        """See `CommContext.all_to_all`."""
        return self._submit(self._calls.all_to_all(x, split_axis, join_axis))

    def exchange(self, pieces: Sequence[Array]) -> Work[list[Array]]:
        """See `CommContext.exchange`."""
        return self._submit(self._calls.exchange(pieces))

    def send(self, x: Array, to: int) -> Work[None]:
        """See `CommContext.send`."""
        return self._submit(self._calls.send(x, to))

    def recv(self, source: int) -> Work[Array]:
        """See `CommContext.recv`."""
        return self._submit(self._calls.recv(source))

    def partial_send(self, x: Array, to: int, num: int, id: int) -> Work[None]:  # noqa: A002  # as there
        """See `CommContext.partial_send`."""
        return self._submit(self._calls.partial_send(x, to, num, id))

    def partial_recv(
        self,
        out: Array,
        source: int,
        num: int,
        id: int,  # noqa: A002  # as there
    ) -> Work[Array]:
        """See `CommContext.partial_recv`."""
        return self._submit(self._calls.partial_recv(out, source, num, id))

    def barrier(self) -> Work[None]:
        """See `CommContext.barrier`."""
        return self._submit(self._calls.barrier())


def world_closed(what: object) -> TransportError:
    """The error of who exchanges data when this rank's world is closed."""
    return TransportError(
        "the world is closed",
        got=what,
        expected="no operations after world.close(), nor after the function of pc.eager.spawn",
    )


class StreamThread:
    """What a rank's communicator stream runs on: one thread for all its groups, in the order of
    calls. So ranks that call in one order never wait in a circle.
    """

    def __init__(self, rank: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        # It ends with the process, where nobody closes it.
        self._thread = threading.Thread(
            target=self._run, name=f"plancompiler-comm-{rank}", daemon=True
        )
        self._thread.start()

    def submit(self, task: Callable[[], None], record: CommRecord) -> None:
        """Run a task when those before it are over. TransportError when the world is closed."""
        if self._closed:
            raise world_closed(record).at(op=record.op, source=record.source)
        self._queue.put(task)

    def close(self) -> None:
        """End, when all tasks are over."""
        self._closed = True
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
