"""The actors of one rank as pure state machines, one per stream.

A stream follows the plan's slots, step after step: for each slot it runs its tasks of the slot's
segment in plan order, for the slot's micro-batch. (A step without micro-batches is one slot.) A
task acts when every input register has
arrived and every output register has a free slot; both conditions are counted by *tokens*, as in a
Petri net. For each register and each place that reads it (another stream of this rank, or a task of
another rank) there are two counters:

    arrival   on the reading stream: versions that arrived and were not yet taken (starts at 0)
    credit    on the producing stream: free slots as far as that reader goes (starts with all)

The first reader on a stream takes the arrival, the last one gives the credit back, so that a
register costs one message each way per version and reading place. Versions are first in, first out,
which makes counters enough.

A register has a version per step or per micro-batch. Where a task that runs for every micro-batch
reads or makes a register with one version per step, only its first run of the step takes tokens and
only its last one gives notice.

Edges inside one stream need no counter at all: the stream's order already puts every reader between
the version it reads and the one that takes its place. This is why an action without messages costs
two short method calls.

`actor_loader` makes the actors of a plan. Nothing here waits, locks or does I/O; the caller
delivers tokens and carries notices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from plancompiler.errors import ExecutionError
from plancompiler.ir.task import format_id
from plancompiler.plan.plan import RegisterDesc, RemoteRegister, Stream, Task

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
    rank: int = -1
    """The rank that raises the token; -1 for this one."""


class RemoteKey(NamedTuple):
    """How a message from another rank names a token."""

    kind: int
    register: int
    task: int


def shared_id(register: RegisterDesc | RemoteRegister) -> int:
    """The id by which all ranks know a register that crosses between them."""
    return register.sync_id if register.sync_id >= 0 else register.id


class Turn(NamedTuple):
    """One slot of the plan as one stream sees it."""

    start: int
    """Position of its first task."""
    stop: int
    """Position after its last task, which is greater."""
    microbatch: int
    per_microbatch: bool
    """Whether its segment runs once per micro-batch."""
    waits: tuple[tuple[int, ...], ...]
    """Tokens to take by position."""
    notices: tuple[tuple[Notice, ...], ...]
    """Notices to carry by position."""


class StreamActor:
    """The state of one stream: where it stands, and its tokens.

    The caller loops: `begin` gives the position of the head task and takes its tokens; after the
    task ran, `finish` moves on and gives the notices to carry. `deliver` raises a token.
    """

    __slots__ = (
        "_maxima",
        "_microbatches",
        "_notices",
        "_stop",
        "_tokens",
        "_turn",
        "_turns",
        "_waits",
        "alone",
        "descriptions",
        "limit",
        "microbatch",
        "position",
        "step",
        "stream",
        "version",
    )

    def __init__(
        self,
        stream: Stream,
        turns: Iterable[Turn],
        tokens: Iterable[Token],
        microbatches: int = 1,
        first_step: int = 0,
    ) -> None:
        self.stream = stream
        self.descriptions: tuple[Token, ...] = tuple(tokens)
        self._tokens: list[int] = [token.initial for token in self.descriptions]
        self._maxima: list[int] = [token.maximum for token in self.descriptions]
        self._turns: tuple[Turn, ...] = tuple(turns)
        self.alone = len(self._turns) == 1 and not any(
            map(any, (self._turns[0].waits, self._turns[0].notices))
        )
        """Whether a step is one turn in which no task takes tokens or gives notice."""
        self._microbatches = microbatches
        self.step: int = first_step
        """Step of the head task."""
        self.limit: int = first_step
        """The head task may act while its step is below this: raised to run, lowered to stop."""
        self._take_turn(0)

    def _take_turn(self, number: int) -> None:
        turn = self._turns[number]
        self._turn = number
        self._waits = turn.waits
        self._notices = turn.notices
        self._stop = turn.stop
        self.position: int = turn.start
        """Position of the head task in the stream's order."""
        self.microbatch: int = turn.microbatch
        """Micro-batch of the head task; 0 where it runs once per step."""
        self.version: int = (
            self.step * self._microbatches + turn.microbatch if turn.per_microbatch else self.step
        )
        """Counts the runs of the head task: its step, or where it runs for every micro-batch
        step * microbatches + microbatch."""

    def begin(self, ahead: int = 0) -> int:
        """Position of the head task, its tokens taken; or BLOCKED or AT_LIMIT.

        `ahead` is how many steps past the limit it may act.
        """
        if self.step >= self.limit + ahead:
            return AT_LIMIT
        position = self.position
        waits = self._waits[position]
        if waits:
            tokens = self._tokens
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
        if position == self._stop:
            self.next_turn()
        else:
            self.position = position
        return notices

    @property
    def head_waits(self) -> bool:
        """Whether the head task takes tokens."""
        return bool(self._waits[self.position])

    def next_turn(self) -> None:
        """All tasks of the turn have run: move on."""
        following = self._turn + 1
        if following == len(self._turns):
            following = 0
            self.step += 1
        self._take_turn(following)

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

    def has_all(self, token: int) -> bool:
        """Whether as many are here as may be."""
        return self._tokens[token] >= self._maxima[token]

    @property
    def step_position(self) -> str:
        """When the head task runs, for people: `step 3` or `step 3, micro-batch 2`."""
        if self._microbatches > 1 and self._turns[self._turn].per_microbatch:
            return f"step {self.step}, micro-batch {self.microbatch}"
        return f"step {self.step}"

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
