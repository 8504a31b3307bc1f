"""Communicators for code that decides at run time what to exchange.

A `CommContext` is one rank's member of a group. Its operations are written once, over a
`Rendezvous`: there the members publish arrays for each other. Each member reads what it needs
straight from what the others publish, and reduces in rank order, so that all get the same bits.

Every call carries its name. Members that make different calls, or the same call with different
reductions or axes, get a TransportError that says what each of them called. With
`PLANCOMPILER_COMM_CHECK=1` they first exchange dtype, shape and source line as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from plancompiler.errors import (
    AttributeValueError,
    DeadlineError,
    PlanCompilerError,
    TransportError,
    UsageError,
)
from plancompiler.executor.comm.deferred import (
    DeferredCalls,
    StreamThread,
    Work,
    world_closed,
)
from plancompiler.executor.comm.flight_recorder import (
    DONE,
    ENTERED,
    FAILED,
    CommRecord,
    FlightRecorder,
    now,
)
from plancompiler.executor.comm.operations import (
    ALL,
    Arrays,
    Operation,
    Operations,
    PublishedArrays,
    Rounds,
    Targets,
)
from plancompiler.executor.comm.rendezvous import Published, Rendezvous
from plancompiler.executor.memory import Array

CHECK = "PLANCOMPILER_COMM_CHECK"
"""The variable that has every operation compare what its members called before it begins."""

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class ContextOwner(Protocol):
    """What a context asks of the manager that made it."""

    recorder: FlightRecorder

    def pair(self, peer: int, like: CommContext) -> CommContext:
        """The context of this rank and another one, on the stream and device type of `like`."""

    def abort(self, error: PlanCompilerError) -> None:
        """Fail every wait of every rank with this cause."""


def _run_now(
    make: Callable[Concatenate[Operations, Arguments], Operation[Result]],
) -> Callable[Concatenate[CommContext, Arguments], Result]:
    """A method that makes an operation and runs it to its end."""

    @wraps(make)
    def call(context: CommContext, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return context.run(make(context.calls, *args, **kwargs))

    return call


class CommContext:
    """One rank's member of a group of ranks; made by `CommContextManager`.

    All members call the same methods in the same order. Arrays may be empty, and of any dtype that
    the system knows. Inputs are left alone; results are new arrays.

    Every wait for other members has a deadline. When it expires all ranks are stopped, and the
    error says group, sequence number, operation, bytes, and which ranks had come and which had not.
    """

    device_type = "cpu"
    """Where the arrays lie that it exchanges."""

    def __init__(self, rendezvous: Rendezvous, owner: ContextOwner, stream: str = "") -> None:
        self.ranks = rendezvous.ranks
        self.member = rendezvous.member
        self.stream = stream
        """The communicator stream that it belongs to; empty for the compute stream."""
        self.sequence = 0
        """How many operations it has begun."""
        self.calls = Operations(rendezvous.ranks, rendezvous.member)
        """Makes its operations."""
        self._rendezvous = rendezvous
        self._owner = owner
        self._check = members_are_compared()

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This member's rank."""
        return self.ranks[self.member]

    @property
    def deadline(self) -> float:
        """Seconds that each wait for other members may take; can be set."""
        return self._rendezvous.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self._rendezvous.deadline = positive_seconds(seconds)

    def close(self) -> None:
        """Refuse operations from now on, as the world is closed."""
        self._rendezvous = _ClosedRendezvous(self._rendezvous)

    def dump(self, path: Path | str) -> None:
        """Write what this rank's communicators did last to a file; see `FlightRecorder.dump`."""
        self._owner.recorder.dump(path)

    # --- operations -----------------------------------------------------------------------------

    all_reduce = _run_now(Operations.all_reduce)
    reduce = _run_now(Operations.reduce)
    reduce_scatter = _run_now(Operations.reduce_scatter)
    broadcast = _run_now(Operations.broadcast)
    all_gather = _run_now(Operations.all_gather)
    partial_all_gather = _run_now(Operations.partial_all_gather)
    gather = _run_now(Operations.gather)
    scatter = _run_now(Operations.scatter)
    all_to_all = _run_now(Operations.all_to_all)
    exchange = _run_now(Operations.exchange)
    send = _run_now(Operations.send)
    recv = _run_now(Operations.recv)
    partial_send = _run_now(Operations.partial_send)
    partial_recv = _run_now(Operations.partial_recv)
    barrier = _run_now(Operations.barrier)

    @contextmanager
    def group(self) -> Iterator[DeferredCalls]:
        """Operations of the block are started as one when it ends; nothing runs before.

            with context.group() as group:
                total = group.all_reduce(x)
                group.send(y, to=left)
                came = group.recv(right)
            print(total.wait(), came.wait())

        Members call the same collectives in the same order. Sends and receives of a block wait for
        each other all at once, so that a ring of them comes to its end. Nothing runs where the
        block raises.
        """
        batch = _Batch(self)
        yield DeferredCalls(self.calls, batch.add)
        batch.run()

    # --- running them ---------------------------------------------------------------------------

    def run(self, operation: Operation[Result]) -> Result:
        """Run one operation to its end."""
        return self.run_recorded(operation, self.recorded(operation))

    def recorded(self, operation: Operation[Any]) -> CommRecord:
        """The record of an operation that is called now."""
        arrays = operation.described()
        record = CommRecord(operation.op, operation.call, arrays, self.ranks, self.stream)
        self._owner.recorder.add(record)
        return record

    def run_recorded(self, operation: Operation[Result], record: CommRecord) -> Result:
        """Run one operation that has a record already."""

        where = self if operation.peer is None else self.pair(operation.peer)

        def take(published: PublishedArrays) -> Result:
            return where.finish(operation, published)

        def work(rounds: Rounds) -> Result:
            if operation.rounds is not None:
                return operation.rounds(rounds)
            return rounds.round(operation.call, operation.given, take, operation.targets)

        return where.meet((record,), operation.call, operation.header, work)

    def pair(self, peer: int) -> CommContext:
        """The context of this rank and another one of the group."""
        return self._owner.pair(peer, self)

    def deferred(self, thread: Callable[[], StreamThread]) -> CommStream:
        """The same operations beside what the rank computes; `thread` gives what they run on."""
        return CommStream(self, thread())

    def index(self, places: Array) -> Array:
        """Places (int64, on the host) as what indexes the arrays that it exchanges."""
        return places

    def finish(self, operation: Operation[Result], published: PublishedArrays) -> Result:
        """An operation's result, from what all members publish."""
        return operation.finish(published)

    def finish_pair(
        self, sent: Sequence[Operation[Any]], received: Sequence[Operation[Any]], came: Arrays
    ) -> list[Any]:
        """Results of what was received from the other member of a pair, which published `came`,
        while something was sent to it.
        """
        return [each.finish([(array,)]) for each, array in zip(received, came, strict=True)]

    def meet(
        self,
        records: Sequence[CommRecord],
        call: str,
        header: Callable[[], str],
        work: Callable[[Rounds], Result],
    ) -> Result:
        """Run what meets the other members on this group's rendezvous, and note how it went."""
        begin = now()
        for record in records:
            record.group, record.sequence = self.ranks, self.sequence
            record.state, record.begin = ENTERED, begin
            self.sequence += 1
        first = records[0]
        label: object = first  # becomes text where an error says it
        if len(records) > 1:
            label = f"{first} and {len(records) - 1} more with it"
        rounds = _Rounds(self._rendezvous, label, first)
        try:
            if self._check:
                rounds.compare(call, header())
            result = work(rounds)
        except PlanCompilerError as error:
            self._note_failure(error, records)
            raise
        end = now()
        for record in records:
            record.state, record.end = DONE, end
        return result

    def _note_failure(self, error: PlanCompilerError, records: Sequence[CommRecord]) -> None:
        """A deadline stops all ranks: who waits for this one would wait in vain."""
        end = now()
        for record in records:
            record.state, record.end, record.error = FAILED, end, str(error)
        error.at(op=records[0].op, source=records[0].source)
        if isinstance(error, DeadlineError):
            self._owner.abort(error)
        else:
            self._owner.recorder.dump_on_failure()


def members_are_compared() -> bool:
    """Whether members are to compare what they call before they exchange data."""
    return os.environ.get(CHECK, "0") not in ("", "0")


def positive_seconds(value: float) -> float:
    """A deadline; AttributeValueError for one that is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise AttributeValueError(
            "a deadline is a number of seconds", got=repr(value), expected="more than 0"
        )
    return float(value)


class _ClosedRendezvous:
    """Stands in the place of a rendezvous when the world is closed; see `Rendezvous`."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.ranks = rendezvous.ranks
        self.member = rendezvous.member
        self.deadline = rendezvous.deadline

    def publish(
        self, call: str, arrays: Arrays, label: object, targets: Targets = None
    ) -> Published:
        """Refuse."""
        raise world_closed(label)

    def release(self, label: object) -> None:
        """Nobody reads anything."""


class _Rounds:
    """One operation's way to the other members; see `Rounds`."""

    def __init__(self, rendezvous: Rendezvous, label: object, record: CommRecord) -> None:
        self._rendezvous = rendezvous
        self._label = label
        self._record = record

    def round(
        self,
        call: str,
        arrays: Arrays,
        take: Callable[[PublishedArrays], Result],
        targets: Targets = None,
    ) -> Result:
        """See `Rounds.round`."""
        rendezvous = self._rendezvous
        published = rendezvous.publish(call, arrays, self._label, targets)
        try:
            for name, _ in published:
                if name != call:
                    raise self._different([name for name, _ in published])
            result = take([arrays for _, arrays in published])
        except PlanCompilerError:
            # Others may have found nothing wrong: they wait until this member releases.
            rendezvous.release(self._label)
            raise
        rendezvous.release(self._label)
        return result

    def compare(self, call: str, header: str) -> None:
        """Raise TransportError unless all members call the same on arrays that go together."""
        own = json.dumps([call, header, str(self._record.source)]).encode()

        def read(published: PublishedArrays) -> list[list[str]]:
            return [json.loads(arrays[0].tobytes()) for arrays in published]

        said = self.round("header", (np.frombuffer(own, np.uint8),), read)
        if any(other[:2] != said[0][:2] for other in said):
            raise self._different(
                [f"{call} {header} at {source}".replace("  ", " ") for call, header, source in said]
            )

    def _different(self, calls: Sequence[str]) -> TransportError:
        record, ranks = self._record, self._rendezvous.ranks
        each = "; ".join(f"rank {rank}: {call}" for rank, call in zip(ranks, calls, strict=True))
        return TransportError(
            f"the members of ranks {list(ranks)} made different calls",
            source=record.source,
            got=f"operation {record.sequence}: {each}",
            expected="the same calls in the same order on all ranks",
            hint=None if " at " in each else f"{CHECK}=1 shows the source line of each rank",
        )


class _Batch:
    """Operations that are started as one."""

    def __init__(self, context: CommContext) -> None:
        self._context = context
        self._pending: list[tuple[Operation[Any], CommRecord, Work[Any]]] = []
        self._closed = False

    def add(self, operation: Operation[Any]) -> Work[Any]:
        """Note an operation of the block."""
        if self._closed:
            raise UsageError("a group of operations is over", got=operation.call)
        record = self._context.recorded(operation)
        work: Work[Any] = Work(record, threaded=False)
        self._pending.append((operation, record, work))
        return work

    def run(self) -> None:
        """Run what was noted: collectives in one round, large ones by themselves, then pairs."""
        self._closed = True
        together = [each for each in self._pending if _is_simple(each[0])]
        if together:
            self._run_together(together)
        for operation, record, work in self._pending:
            if operation.peer is None and operation.rounds is not None:
                work.end(self._context.run_recorded(operation, record))
        peers = {each.peer for each, _, _ in self._pending if each.peer is not None}
        # All ranks go through their pairs in one order, so that none wait in a circle.
        own = self._context.rank
        for peer in sorted(peers, key=lambda each: sorted((own, each))):
            self._run_pair(peer, [each for each in self._pending if each[0].peer == peer])

    def _run_together(
        self, pending: Sequence[tuple[Operation[Any], CommRecord, Work[Any]]]
    ) -> None:
        operations = [operation for operation, _, _ in pending]
        counts = [len(operation.given) for operation in operations]
        given: list[Array] = [np.array(counts, np.int64)]
        targets = [ALL]
        for operation in operations:
            given += operation.given
            targets += operation.targets or [ALL] * len(operation.given)

        def take(published: PublishedArrays) -> list[Any]:
            lists = [_parts(arrays) for arrays in published]
            return [
                self._context.finish(operation, [parts[place] for parts in lists])
                for place, operation in enumerate(operations)
            ]

        call = "group of " + "; ".join(operation.call for operation in operations)
        results = self._context.meet(
            [record for _, record, _ in pending],
            call,
            lambda: "; ".join(operation.header() for operation in operations),
            lambda rounds: rounds.round(call, tuple(given), take, tuple(targets)),
        )
        for (_, _, work), result in zip(pending, results, strict=True):
            work.end(result)

    def _run_pair(
        self, peer: int, pending: Sequence[tuple[Operation[Any], CommRecord, Work[Any]]]
    ) -> None:
        """What goes to and comes from one other rank."""
        pair = self._context.pair(peer)
        sent = [operation for operation, _, _ in pending if operation.given]
        received = [operation for operation, _, _ in pending if not operation.given]
        there = pair.ranks.index(peer)
        by_sender = (received, sent) if there == 0 else (sent, received)
        call = "group of " + "; ".join(each.call for side in by_sender for each in side)

        def take(published: PublishedArrays) -> dict[int, Any]:
            results = pair.finish_pair(sent, received, published[there])
            return {id(each): result for each, result in zip(received, results, strict=True)}

        given = tuple(operation.given[0] for operation in sent)
        by_operation = pair.meet(
            [record for _, record, _ in pending],
            call,
            lambda: "",
            lambda rounds: rounds.round(call, given, take),
        )
        for operation, _, work in pending:
            work.end(by_operation.get(id(operation)))


def _is_simple(operation: Operation[Any]) -> bool:
    return operation.peer is None and operation.rounds is None


def _parts(arrays: Arrays) -> list[Arrays]:
    """What a member publishes for each operation of a group; first, how much that is."""
    parts, start = [], 1
    for count in arrays[0].tolist():
        parts.append(arrays[start : start + count])
        start += count
    return parts


class CommStream(DeferredCalls):
    """One rank's member of a group on the communicator stream.

    Its operations run beside what the rank computes. All members must take the same stream: its
    operations do not meet those of the compute stream. Results are the same bits.
    """

    def __init__(self, context: CommContext, thread: StreamThread) -> None:
        self.ranks = context.ranks
        self.member = context.member
        self._context = context
        self._thread = thread
        super().__init__(context.calls, self._enqueue)

    @property
    def deadline(self) -> float:
        """Seconds that each wait for other members may take; can be set."""
        return self._context.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self._context.deadline = seconds

    def _enqueue(self, operation: Operation[Any]) -> Work[Any]:
        context = self._context
        work: Work[Any] = Work(context.recorded(operation), threaded=True)

        def run() -> None:
            work.started.set()
            try:
                work.end(context.run_recorded(operation, work.record))
            except BaseException as error:  # it is raised where somebody waits for the work
                work.fail(error)

        self._thread.submit(run, work.record)
        return work
