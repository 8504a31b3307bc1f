"""Where a rank stands, as it tells others, and what follows from what several of them say.

A rank that has waited for too long asks those that it waits for where they stand, and they ask on
(see `watchdog`). The answers are a wait-for graph. A rank at its end is to blame that does not
answer, is in one task for too long, or has nothing more to do; ranks that only wait are not, nor
is one that gets on, however slowly. Nothing here waits, or knows a clock or a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from plancompiler.errors import DeadlineError, WireFormatError

MAX_RANKS = 32
"""Ranks that a stream is said to wait for, at most: the first ones."""
MAX_TEXT = 160
"""Characters of a text about a stream."""
MAX_NUMBER = 1 << 31


class State(StrEnum):
    """What a stream does."""

    RUNNING = "running"
    WAITING = "waiting"
    """For other ranks."""
    LOCAL = "local"
    """Waiting for another stream of its own rank."""
    IDLE = "idle"
    """It has done all steps that it was told to do."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """Where one stream stands."""

    stream: str
    state: State
    seconds: float
    """For how long."""
    op: str
    """The head task's name, and where the user wrote its op."""
    source: str | None
    family: int
    step_position: str
    """`step 3`, or `step 3, micro-batch 2`."""
    waits: str = ""
    """What it waits for, for people: `register 'x' to arrive`."""
    ranks: tuple[int, ...] = ()
    """Whom it waits for."""


RankStatus = tuple[StreamStatus, ...]
"""All streams of a rank."""


def status_fields(status: RankStatus) -> list[list[Any]]:
    """As JSON, cut to a bounded size."""
    return [
        [
            each.stream[:MAX_TEXT],
            each.state.value,
            each.seconds,
            each.op[:MAX_TEXT],
            None if each.source is None else each.source[:MAX_TEXT],
            each.family,
            each.step_position[:MAX_TEXT],
            each.waits[:MAX_TEXT],
            list(each.ranks[:MAX_RANKS]),
        ]
        for each in status
    ]


def status_from_fields(fields: Any) -> RankStatus:
    """The inverse; raises WireFormatError for anything else."""
    try:
        return tuple(
            StreamStatus(
                _text(stream),
                State(state),
                _seconds(seconds),
                _text(op),
                None if source is None else _text(source),
                number_from_field(family),
                _text(step_position),
                _text(waits),
                ranks_from_fields(ranks),
            )
            for stream, state, seconds, op, source, family, step_position, waits, ranks in fields
        )
    except (ValueError, TypeError) as error:
        raise WireFormatError("a rank's status does not parse", got=str(error)) from None


def ranks_from_fields(fields: Any) -> tuple[int, ...]:
    """Ranks out of JSON; ValueError for anything else."""
    return tuple(number_from_field(each) for each in fields)


def number_from_field(field: Any) -> int:
    """A rank or count out of JSON; ValueError for anything else."""
    if type(field) is not int or not 0 <= field < MAX_NUMBER:
        raise ValueError(f"not a number: {field!r:.40}")
    return field


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ValueError(f"not a short text: {value!r:.40}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < MAX_NUMBER:
        raise ValueError(f"not a time: {value!r:.40}")
    return float(value)


# --- asking ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """Where do you stand, and those that you wait for?"""

    origin: int
    number: int
    """Counts the questions of the origin."""
    path: tuple[int, ...]
    """From the origin to the sender."""

    def packed(self) -> bytes:
        return _packed(["question", self.origin, self.number, list(self.path)])


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a rank stands, on its way back to the origin of a question."""

    origin: int
    number: int
    back: tuple[int, ...]
    """From the origin to the receiver, without the receiver."""
    rank: int
    status: RankStatus

    def packed(self) -> bytes:
        fields = status_fields(self.status)
        return _packed(["answer", self.origin, self.number, list(self.back), self.rank, fields])


def _packed(fields: list[Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def unpack_note(note: bytes) -> Question | Answer:
    """A question or an answer; raises WireFormatError for anything else."""
    try:
        kind, origin, number, ranks, *rest = json.loads(note)
        origin, number = number_from_field(origin), number_from_field(number)
        path = ranks_from_fields(ranks)
        if kind == "question" and path and not rest:
            return Question(origin, number, path)
        rank, fields = rest
        if kind == "answer":
            return Answer(origin, number, path, number_from_field(rank), status_from_fields(fields))
    except (ValueError, TypeError, RecursionError) as error:
        raise WireFormatError("a note of a rank does not parse", got=str(error)) from None
    raise WireFormatError("a note of a rank does not parse", got=f"{note[:40]!r}")


def awaited(status: RankStatus, deadline: float = 0.0) -> tuple[int, ...]:
    """The ranks that streams wait for, and have for as long as the deadline."""
    ranks = {
        rank: None
        for each in status
        if each.state is State.WAITING and each.seconds >= deadline
        for rank in each.ranks
    }
    return tuple(ranks)


# --- judging --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Edge:
    """Why a rank was looked at: another one waits for it."""

    rank: int
    stream: StreamStatus


@dataclass(frozen=True, slots=True)
class _Suspect:
    rank: int
    stream: StreamStatus | None
    """What it does; None where it does not answer."""
    seconds: float
    """For how long, at least."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of asking: an error, or how long to wait before asking again."""

    error: DeadlineError | None
    again: float = 0.0


def judge(
    own: int, statuses: Mapping[int, RankStatus], deadline: float, asked: float, slack: float
) -> Verdict:
    """Find who holds up rank `own`.

    `statuses` are those of the ranks that answered, with its own. The others were given `asked`
    seconds. `slack` (seconds) is by how much times may be wrong.
    """
    reached = _reached(own, statuses)
    enough = deadline - slack
    suspects = [
        suspect
        for rank, edge in reached.items()
        if (suspect := _suspect_of(rank, statuses.get(rank), edge, asked)) is not None
    ]
    guilty = [each for each in suspects if each.seconds >= enough]
    if guilty:
        return Verdict(_blame(own, guilty, reached, deadline))
    if suspects:
        seconds = max(each.seconds for each in suspects)
    else:  # all only wait, for each other; those that began last decide
        ranks = sorted({own, *reached})
        waits = [
            (rank, stream)
            for rank in ranks
            for stream in statuses[rank]
            if stream.state is State.WAITING
        ]
        seconds = min(stream.seconds for _, stream in waits)
        if seconds >= enough:
            return Verdict(_circle(own, waits, deadline))
    return Verdict(None, max(enough - seconds, slack))


def _reached(own: int, statuses: Mapping[int, RankStatus]) -> dict[int, _Edge]:
    """Whoever is waited for, directly or not, with the first rank that does; nearest first."""
    reached: dict[int, _Edge] = {}
    line = [own]
    for rank in line:
        for stream in statuses.get(rank, ()):
            if stream.state is State.WAITING:
                for other in stream.ranks:
                    if other not in reached:
                        reached[other] = _Edge(rank, stream)
                        if other != own:
                            line.append(other)
    return reached


def _suspect_of(rank: int, status: RankStatus | None, edge: _Edge, asked: float) -> _Suspect | None:
    """What a rank does that keeps others waiting; None where it only waits itself."""
    if status is None:
        return _Suspect(rank, None, edge.stream.seconds + asked)
    running = [each for each in status if each.state is State.RUNNING]
    if running:
        longest = max(running, key=lambda each: each.seconds)
        return _Suspect(rank, longest, longest.seconds)
    if status and all(each.state is State.IDLE for each in status):
        last = min(status, key=lambda each: each.seconds)
        return _Suspect(rank, last, last.seconds)
    return None


def _blame(
    own: int,
    suspects: Sequence[_Suspect],
    reached: Mapping[int, _Edge],
    deadline: float,
) -> DeadlineError:
    silent = [each.rank for each in suspects if each.stream is None]
    stuck = [(each.rank, each.stream) for each in suspects if each.stream is not None]
    parts = []
    if silent:
        parts.append(f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    for rank, stream in stuck:
        if stream.state is State.IDLE:
            parts.append(f"rank {rank} was not told to run {stream.step_position}")
        else:
            parts.append(f"rank {rank} has been in {_task(stream)} for {stream.seconds:.3g} s")
    first = suspects[0]
    place = reached[first.rank].stream
    if first.stream is not None and first.stream.state is State.RUNNING:
        place = first.stream
    if silent:
        hint = (
            f"look at the {'process' if len(silent) == 1 else 'processes'} of {_ranks(silent)}: "
            "stopped, swapped out, or on a host that does not get on"
        )
    elif any(stream.state is State.RUNNING for _, stream in stuck):
        hint = "look at what that op waits for"
    else:
        hint = "run the same number of steps on all ranks"
    return DeadlineError(
        f"{'; '.join(parts)}, and others wait for longer than {deadline:g} s",
        rank=first.rank,
        op=place.op,
        source=place.source,
        got=_chain(own, first.rank, reached),
        expected=f"every rank to get on within {deadline:g} s",
        hint=f"{hint}; or allow more time with a longer deadline",
    )


def _circle(own: int, waits: Sequence[tuple[int, StreamStatus]], deadline: float) -> DeadlineError:
    return DeadlineError(
        f"ranks have waited for each other for longer than {deadline:g} s",
        rank=own,
        got="; ".join(_waits(rank, stream) for rank, stream in waits[:MAX_RANKS]),
        expected=f"every rank to get on within {deadline:g} s",
        hint="what they sent each other may still be on its way: look at the network between them, "
        "or allow more time with a longer deadline",
    )


def _chain(own: int, rank: int, reached: Mapping[int, _Edge]) -> str:
    """Who waits for whom, from the own rank to the one to blame."""
    links: list[str] = []
    at = rank
    while at != own or not links:
        edge = reached[at]
        links.append(_waits(edge.rank, replace(edge.stream, ranks=(at,))))
        at = edge.rank
    return "; ".join(reversed(links))


def _waits(rank: int, stream: StreamStatus) -> str:
    return (
        f"rank {rank} has waited for {_ranks(stream.ranks)} for {stream.seconds:.3g} s: "
        f"{stream.waits} in {_task(stream)}"
    )


def _task(stream: StreamStatus) -> str:
    return f"{stream.op!r} (family {stream.family}, {stream.step_position})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
