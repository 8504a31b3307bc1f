"""Operations whose results come later, and the thread that runs those of communicator streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from plancompiler.errors import TransportError, UsageError
from plancompiler.executor.comm.flight_recorder import CommRecord
from plancompiler.executor.comm.operations import Operation, Operations
from plancompiler.executor.threads import WorkThread

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Work(Generic[Result]):
    """An operation that was called for, and its result when it has ended."""

    def __init__(self, record: CommRecord, threaded: bool) -> None:
        self.record = record
        self.started = threading.Event()
        """Set when it begins."""
        self.ended = threading.Event()
        """Set when it is over, well or not."""
        self._threaded = threaded
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Result:
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
        result: Result = self._result
        return result

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.ended.is_set()

    def end(self, result: Result) -> None:
        """Give it its result."""
        self._result = result
        self.started.set()
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        """Give it the error that `wait` raises."""
        self._error = error
        self.ended.set()


def _submitted(
    make: Callable[Concatenate[Operations, Arguments], Operation[Result]],
) -> Callable[Concatenate[DeferredCalls, Arguments], Work[Result]]:
    """A method that makes an operation and gives the work that it becomes."""

    @wraps(make)
    def call(
        calls: DeferredCalls, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Work[Result]:
        return calls.submit(make(calls.calls, *args, **kwargs))

    return call


class DeferredCalls:
    """The operations of a `CommContext`, each of which returns a `Work` at once.

    Inputs must stay as they are until the work is over; an `out` is written until then.
    """

    def __init__(self, calls: Operations, submit: Callable[[Operation[Any]], Work[Any]]) -> None:
        self.calls = calls
        self.submit = submit

    all_reduce = _submitted(Operations.all_reduce)
    reduce = _submitted(Operations.reduce)
    reduce_scatter = _submitted(Operations.reduce_scatter)
    broadcast = _submitted(Operations.broadcast)
    all_gather = _submitted(Operations.all_gather)
    partial_all_gather = _submitted(Operations.partial_all_gather)
    gather = _submitted(Operations.gather)
    scatter = _submitted(Operations.scatter)
    all_to_all = _submitted(Operations.all_to_all)
    exchange = _submitted(Operations.exchange)
    send = _submitted(Operations.send)
    recv = _submitted(Operations.recv)
    partial_send = _submitted(Operations.partial_send)
    partial_recv = _submitted(Operations.partial_recv)
    barrier = _submitted(Operations.barrier)


def world_closed(what: object) -> TransportError:
    """The error of who exchanges data when this rank's world is closed."""
    return TransportError(
        "the world is closed",
        got=what,
        expected="no operations after world.close(), nor after the function of pc.eager.spawn",
    )


class StreamThread(WorkThread):
    """What a rank's communicator stream runs on: one thread for all its groups, in the order of
    calls. So ranks that call in one order never wait in a circle.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"plancompiler-comm-{rank}")
        self._closed = False

    def submit(self, task: Callable[[], None], record: CommRecord) -> None:
        """Run a task when those before it are over. TransportError when the world is closed."""
        if self._closed:
            raise world_closed(record).at(op=record.op, source=record.source)
        self.put(task)

    def close(self, seconds: float | None = None) -> None:
        """End, when all tasks are over."""
        self._closed = True
        super().close(seconds)
