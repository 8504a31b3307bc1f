"""The actors of one rank as pure state machines, one per stream.

A stream runs its tasks in plan order, step after step. A task acts when every input register has
arrived and every output register has a free slot; both conditions are counted by *tokens*, as in a
Petri net. For each register and each place that reads it (another stream of this rank, or a task of
another rank) there are two counters:

    arrival   on the reading stream: versions that arrived and were not yet taken (starts at 0)
    credit    on the producing stream: free slots as far as that reader goes (starts with all)

The first reader on a stream takes the arrival, the last one gives the credit back, so that a
register costs one message each way per step and reading place. Versions are first in, first out,
which makes counters enough.

Edges inside one stream need no counter at all: the stream's order already puts every reader between
the version it reads and the next one. `load_actors` checks that order once and drops them, which is
why an action without messages costs two short method calls.

Nothing here waits, locks or does I/O; the caller delivers tokens and carries notices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from plancompiler.errors import ExecutionError
from plancompiler.ir.task import format_id, unpack_id
from plancompiler.plan.plan import Plan, RegisterDesc, RemoteRegister, Stream, Task

ARRIVED = 1
"""Kind of a notice: a version of a register is ready to be read."""
RETURNED = 2
"""Kind of a notice: a reader is done with a version of a register."""

BLOCKED = -1
"""What `begin` says when the head task waits for a token."""
AT_LIMIT = -2
"""What `begin` says when all allowed steps are done."""


class Notice(NamedTuple):
    """An instruction to raise a token elsewhere."""

    stream: int
    """Index of the stream on this rank, or -1 for another rank."""
    token: int
    """The token there; -1 for another rank, which finds it by the fields below."""
    rank: int
    kind: int
    """ARRIVED or RETURNED."""
    register: int
    """The id by which both ranks know the register."""
    task: int
    """The reading task on the other side of the edge."""


class Token(NamedTuple):
    """What one counter stands for."""

    kind: int
    register: int
    """Register id on its own rank."""
    name: str
    peer: str
    """Who raises the token, for people: `rank 3` or `stream compute`."""
    initial: int
    maximum: int


class RemoteKey(NamedTuple):
    """How a message from another rank names a token."""

    kind: int
    register: int
    task: int


def shared_id(register: RegisterDesc | RemoteRegister) -> int:
    """The id by which all ranks know a register that crosses between them."""
    return register.sync_id if register.sync_id >= 0 else register.id


class StreamActor:
    """The state of one stream: where it stands, and its tokens.

    The caller loops: `begin` gives the position of the head task and takes its tokens; after the
    task ran, `finish` moves on and gives the notices to carry. `deliver` raises a token.
    """

    __slots__ = (
        "_count",
        "_maxima",
        "_notices",
        "_tokens",
        "_waits",
        "descriptions",
        "limit",
        "position",
        "step",
        "stream",
    )

    def __init__(
        self,
        stream: Stream,
        waits: Iterable[Iterable[int]],
        notices: Iterable[Iterable[Notice]],
        tokens: Iterable[Token],
        first_step: int = 0,
    ) -> None:
        self.stream = stream
        self.descriptions: tuple[Token, ...] = tuple(tokens)
        self._waits: tuple[tuple[int, ...], ...] = tuple(map(tuple, waits))
        self._notices: tuple[tuple[Notice, ...], ...] = tuple(map(tuple, notices))
        self._tokens: list[int] = [token.initial for token in self.descriptions]
        self._maxima: list[int] = [token.maximum for token in self.descriptions]
        self._count: int = len(self._waits)
        self.position: int = 0
        """Position of the head task in the stream's order."""
        self.step: int = first_step
        """Step of the head task."""
        self.limit: int = first_step
        """The head task may act while its step is below this: raised to run, lowered to stop."""

    def begin(self) -> int:
        """Position of the head task, its tokens taken; or BLOCKED or AT_LIMIT."""
        if self.step >= self.limit:
            return AT_LIMIT
        tokens = self._tokens
        position = self.position
        waits = self._waits[position]
        for token in waits:
            if not tokens[token]:
                return BLOCKED
        for token in waits:
            tokens[token] -= 1
        return position

    def finish(self) -> tuple[Notice, ...]:
        """The head task has run: move on. Gives the notices to carry."""
        position = self.position
        notices = self._notices[position]
        position += 1
        if position == self._count:
            self.position = 0
            self.step += 1
        else:
            self.position = position
        return notices

    def deliver(self, token: int) -> None:
        """A register arrived or came back."""
        tokens = self._tokens
        if not 0 <= token < len(tokens):
            raise ExecutionError(
                "a stream was told of a register that it does not know",
                got=f"token {token}",
                expected=f"0 to {len(tokens) - 1}",
            )
        if tokens[token] >= self._maxima[token]:
            description = self.descriptions[token]
            what = "arrived" if description.kind == ARRIVED else "came back"
            raise ExecutionError(
                f"register {description.name!r} {what} more often than it has slots",
                got=f"register {format_id(description.register)} from {description.peer}",
                expected=f"at most {description.maximum} at a time",
            )
        tokens[token] += 1

    def counts(self) -> tuple[int, ...]:
        """The tokens as they are, aligned with `descriptions`."""
        return tuple(self._tokens)

    def waiting_for(self) -> tuple[Token, ...]:
        """The tokens that the head task still lacks."""
        if self.step >= self.limit:
            return ()
        return tuple(
            self.descriptions[token]
            for token in self._waits[self.position]
            if not self._tokens[token]
        )


@dataclass(frozen=True)
class RankActors:
    """All streams of one rank, and how messages of other ranks find their tokens."""

    rank: int
    actors: tuple[StreamActor, ...]
    tasks: tuple[tuple[Task, ...], ...]
    """Tasks by stream and position."""
    remote_tokens: dict[RemoteKey, tuple[int, int]]
    """(stream index, token) of what other ranks may tell."""

    def find_remote(self, kind: int, register: int, task: int) -> tuple[int, int]:
        """(stream index, token) for a message of another rank; an error for an unknown one."""
        try:
            return self.remote_tokens[RemoteKey(kind, register, task)]
        except KeyError:
            raise ExecutionError(
                "a message names a register that this rank does not share",
                rank=self.rank,
                got=f"kind {kind}, register {register}, task {task}",
            ) from None


@dataclass
class _StreamBuilder:
    stream: Stream
    tasks: list[Task] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)
    notices: list[list[Notice]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def add_task(self, task: Task) -> int:
        self.tasks.append(task)
        self.waits.append([])
        self.notices.append([])
        return len(self.tasks) - 1

    def add_token(self, position: int, token: Token) -> int:
        self.tokens.append(token)
        self.waits[position].append(len(self.tokens) - 1)
        return len(self.tokens) - 1


def load_actors(plan: Plan, first_step: int = 0) -> RankActors:
    """Resolve a plan's registers, streams and ids into dense counters, once.

    Raises ExecutionError for a plan that cannot run: a register without a producer, or read on its
    own stream before it is made.
    """
    builders: list[_StreamBuilder] = []
    stream_index: dict[Stream, int] = {}
    place: dict[int, tuple[int, int]] = {}
    for task in plan.tasks:
        if task.stream not in stream_index:
            stream_index[task.stream] = len(builders)
            builders.append(_StreamBuilder(task.stream))
        index = stream_index[task.stream]
        place[task.id] = index, builders[index].add_task(task)
    readers = _readers(plan, place)
    remote_tokens: dict[RemoteKey, tuple[int, int]] = {}
    for register in plan.registers:
        if register.producer not in place:
            raise ExecutionError(
                "a register has no producer on its rank",
                rank=plan.rank,
                got=f"{register.name!r} ({format_id(register.id)})",
            )
        home, made_at = place[register.producer]
        for reader, positions in readers.get(register.id, {}).items():
            if reader == home:
                _check_stream_order(plan, register, builders[home], made_at, min(positions))
            else:
                _connect_streams(register, builders, (home, made_at), (reader, positions))
        for task_id in dict.fromkeys(register.consumers):
            other = unpack_id(task_id).rank
            if other != plan.rank:
                count = register.register_count
                credit = builders[home].add_token(
                    made_at,
                    Token(RETURNED, register.id, register.name, f"rank {other}", count, count),
                )
                known_as = shared_id(register)
                builders[home].notices[made_at].append(
                    Notice(-1, -1, other, ARRIVED, known_as, task_id)
                )
                remote_tokens[RemoteKey(RETURNED, known_as, task_id)] = home, credit
    for remote in plan.remote_registers:
        producer_rank = unpack_id(remote.producer).rank
        known_as = shared_id(remote)
        for task_id in dict.fromkeys(remote.consumers):
            if task_id in place:
                index, position = place[task_id]
                # A remote register's slots are not known here; its producer's credits bound it.
                arrival = builders[index].add_token(
                    position,
                    Token(ARRIVED, remote.id, remote.name, f"rank {producer_rank}", 0, sys.maxsize),
                )
                builders[index].notices[position].append(
                    Notice(-1, -1, producer_rank, RETURNED, known_as, task_id)
                )
                remote_tokens[RemoteKey(ARRIVED, known_as, task_id)] = index, arrival
    return RankActors(
        plan.rank,
        tuple(
            StreamActor(one.stream, one.waits, one.notices, one.tokens, first_step)
            for one in builders
        ),
        tuple(tuple(one.tasks) for one in builders),
        remote_tokens,
    )


def _readers(plan: Plan, place: dict[int, tuple[int, int]]) -> dict[int, dict[int, list[int]]]:
    """Register id → stream index → positions of its readers on this rank."""
    found: dict[int, dict[int, list[int]]] = {}
    known = plan.register_by_id
    remote = plan.remote_register_by_id
    for task in plan.tasks:
        index, position = place[task.id]
        for register in (*task.inputs, *task.controls_in):
            if register in known:
                found.setdefault(register, {}).setdefault(index, []).append(position)
            elif register not in remote or task.id not in remote[register].consumers:
                raise ExecutionError(
                    "a task reads a register that its plan does not have",
                    op=task.name,
                    rank=plan.rank,
                    got=format_id(register),
                )
    return found


def _check_stream_order(
    plan: Plan, register: RegisterDesc, builder: _StreamBuilder, made_at: int, read_at: int
) -> None:
    if read_at <= made_at:
        raise ExecutionError(
            f"register {register.name!r} is read on its own stream before it is made",
            op=builder.tasks[read_at].name,
            rank=plan.rank,
            got=f"reader at position {read_at} of stream {builder.stream}",
            expected=f"a position after its producer's, {made_at}",
        )


def _connect_streams(
    register: RegisterDesc,
    builders: list[_StreamBuilder],
    producer: tuple[int, int],
    consumer: tuple[int, list[int]],
) -> None:
    """Tokens and notices of one register between two streams of this rank."""
    home, made_at = producer
    reader, positions = consumer
    count = register.register_count
    arrival = builders[reader].add_token(
        min(positions),
        Token(ARRIVED, register.id, register.name, f"stream {builders[home].stream}", 0, count),
    )
    credit = builders[home].add_token(
        made_at,
        Token(
            RETURNED,
            register.id,
            register.name,
            f"stream {builders[reader].stream}",
            count,
            count,
        ),
    )
    last = max(positions)
    builders[home].notices[made_at].append(
        Notice(reader, arrival, -1, ARRIVED, register.id, builders[reader].tasks[last].id)
    )
    builders[reader].notices[last].append(
        Notice(home, credit, -1, RETURNED, register.id, builders[reader].tasks[last].id)
    )
