"""`simulate`: all ranks' actors by a virtual clock (discrete-event simulation).

The actors are those that the executor runs, so what a simulation shows of order, credits and
waiting holds for a run; only the times are made up. Every stream runs its own order, so that the
times do not depend on the order in which events of one time are handled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from plancompiler.errors import DeadlockError, UsageError
from plancompiler.executor.actor import ARRIVED, Notice, RankActors
from plancompiler.executor.actor_loader import load_actors
from plancompiler.ir.task import family_of, format_id
from plancompiler.plan.plan import Plan, Task, communicator_of
from plancompiler.simulate.cost import Cost, Latency, no_latency
from plancompiler.simulate.simulation import Action, Simulation

SHOWN = 8
"""Waiting streams that a stall's error names."""


def simulate(
    plans: Mapping[int, Plan], cost: Cost, *, steps: int = 1, latency: Latency = no_latency
) -> Simulation:
    """Run some steps of all ranks' plans by a virtual clock that starts at 0.

    A task takes `cost(rank, task)` seconds, one at a time per stream. A collective begins when all
    its members have got there, and ends for all at once after the greatest of their costs. Notices
    between ranks take `latency(from, to)` seconds; those within a rank are there at once.

    Raises DeadlockError if the ranks come to wait for each other, naming who waits for what,
    ExecutionError for a plan that cannot run, and UsageError for missing ranks or a cost below 0.
    """
    world_size = max((plan.world_size for plan in plans.values()), default=0)
    missing = [rank for rank in range(world_size) if rank not in plans]
    if missing or not plans:
        raise UsageError(
            "a simulation needs the plans of all ranks",
            got=f"none of rank {missing[0]}" if missing else "none",
            expected=f"{world_size} plans" if missing else None,
        )
    if steps < 0:
        raise UsageError("a number of steps is not below 0", got=steps)
    return _EventLoop(plans, cost, steps, latency).run()


class _RankStream(NamedTuple):
    """A stream of a rank."""

    rank: int
    stream: int


class _CollectiveRun(NamedTuple):
    """One run of one collective."""

    family: int
    version: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Ended:
    """Event: the head tasks of these streams have run."""

    places: tuple[_RankStream, ...]


@dataclass(frozen=True, slots=True)
class _Delivered:
    """Event: a notice of another rank is there."""

    place: _RankStream
    token: int


class _EventLoop:
    """The state of a simulation."""

    def __init__(self, plans: Mapping[int, Plan], cost: Cost, steps: int, latency: Latency) -> None:
        self._plans = plans
        self._cost = cost
        self._latency = latency
        self._ranks: dict[int, RankActors] = {
            rank: load_actors(plan) for rank, plan in plans.items()
        }
        self._now = 0.0
        self._events: list[tuple[float, int, _Ended | _Delivered]] = []
        """A heap by time; the count keeps events of one time in order."""
        self._count = 0
        self._acting: set[_RankStream] = set()
        """Streams whose head task has taken its tokens and not ended."""
        self._arrived: dict[_CollectiveRun, list[_RankStream]] = {}
        """Who has got there, for collectives that have not begun."""
        self._actions: list[Action] = []
        for ready in self._ranks.values():
            for actor in ready.actors:
                actor.limit = steps

    def run(self) -> Simulation:
        for place in self._places():
            self._advance(place)
        while self._events:
            self._now, _, event = heappop(self._events)
            if isinstance(event, _Ended):
                for place in event.places:
                    self._end(place)
            else:
                self._deliver(event.place, event.token)
        stalled = [self._describe(place) for place in self._places() if self._unfinished(place)]
        if stalled:
            more = f"; and {len(stalled) - SHOWN} more" if len(stalled) > SHOWN else ""
            raise DeadlockError(
                f"streams wait for each other at {self._now:g} s of a simulation",
                got="; ".join(stalled[:SHOWN]) + more,
            )
        return Simulation(self._plans, tuple(self._actions))

    def _places(self) -> Iterator[_RankStream]:
        for rank in sorted(self._ranks):
            for stream in range(len(self._ranks[rank].actors)):
                yield _RankStream(rank, stream)

    def _head(self, place: _RankStream) -> Task:
        ready = self._ranks[place.rank]
        return ready.tasks[place.stream][ready.actors[place.stream].position]

    def _advance(self, place: _RankStream) -> None:
        """Begin the head task, if it can."""
        actor = self._ranks[place.rank].actors[place.stream]
        if place in self._acting or actor.begin() < 0:
            return
        self._acting.add(place)
        task = self._head(place)
        used = communicator_of(task.spec)
        if used is None:
            self._begin((place,))
            return
        members = self._plans[place.rank].communicators[used].ranks
        collective = _CollectiveRun(family_of(task.id), actor.version, members)
        arrived = self._arrived.setdefault(collective, [])
        arrived.append(place)
        if len(arrived) == len(members):
            del self._arrived[collective]
            self._begin(tuple(arrived))

    def _begin(self, places: tuple[_RankStream, ...]) -> None:
        """The head tasks of these streams run from now on, and end together."""
        seconds = max(self._seconds(place) for place in places)
        for place in places:
            actor = self._ranks[place.rank].actors[place.stream]
            task = self._head(place)
            self._actions.append(
                Action(
                    place.rank,
                    task,
                    self._plans[place.rank].segments[task.segment],
                    actor.step,
                    actor.microbatch,
                    self._now,
                    self._now + seconds,
                )
            )
        self._schedule(seconds, _Ended(places))

    def _seconds(self, place: _RankStream) -> float:
        task = self._head(place)
        seconds = self._cost(place.rank, task)
        if not seconds >= 0:
            raise UsageError(
                "a task of a simulation takes less than no time",
                op=task.name,
                rank=place.rank,
                got=f"{seconds} s",
            )
        return seconds

    def _schedule(self, seconds: float, event: _Ended | _Delivered) -> None:
        self._count += 1
        heappush(self._events, (self._now + seconds, self._count, event))

    def _end(self, place: _RankStream) -> None:
        self._acting.remove(place)
        for notice in self._ranks[place.rank].actors[place.stream].finish():
            self._carry(place.rank, notice)
        self._advance(place)

    def _carry(self, sender: int, notice: Notice) -> None:
        if notice.stream >= 0:
            self._deliver(_RankStream(sender, notice.stream), notice.token)
            return
        stream, token = self._ranks[notice.rank].find_remote(
            notice.kind, notice.register, notice.task
        )
        self._schedule(
            self._latency(sender, notice.rank), _Delivered(_RankStream(notice.rank, stream), token)
        )

    def _deliver(self, place: _RankStream, token: int) -> None:
        self._ranks[place.rank].actors[place.stream].deliver(token)
        self._advance(place)

    # --- stalls -----------------------------------------------------------------------------------

    def _unfinished(self, place: _RankStream) -> bool:
        actor = self._ranks[place.rank].actors[place.stream]
        return actor.step < actor.limit

    def _describe(self, place: _RankStream) -> str:
        """`rank 1, compute, step 0: task 'a' waits for register 'b' (…) to arrive from rank 0`."""
        actor = self._ranks[place.rank].actors[place.stream]
        task = self._head(place)
        waits = [
            f"register {token.name!r} ({format_id(token.register)}) to "
            f"{'arrive' if token.kind == ARRIVED else 'come back'} from {token.peer}"
            for token in actor.waiting_for()
        ]
        if place in self._acting:
            waits = [
                f"rank {rank} to join"
                for collective, arrived in self._arrived.items()
                if place in arrived
                for rank in collective.members
                if rank not in {other.rank for other in arrived}
            ]
        return (
            f"rank {place.rank}, stream {actor.stream}, {actor.step_position}: "
            f"task {task.name!r} waits for {', '.join(waits)}"
        )
