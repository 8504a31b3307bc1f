"""`simulate`: all ranks' actors by a virtual clock (discrete-event simulation).

The actors are those that the executor runs, so what a simulation shows of order, credits and
waiting holds for a run; only the times are made up. Every stream runs its own order, so that the
times do not depend on the order in which events of one time are handled.

Where ranks do alike, one of them may stand for all (`stands_for`): a notice then goes to, and comes
from, the rank that stands for its peer, and a collective waits for those that stand for its
members. What that takes grows with the kinds of ranks, not with their number. Such a stand-in need
not wait for the very rank that waits for it, and may be ahead of it: then its notice counts when
the other has got that far.

What tasks share (`Uses`) is divided among those that are at work at a time, as in a queue with
processor sharing: where together they would use more than the whole of it, all go on as many times
slower, until one of them ends or another begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from plancompiler.errors import DeadlockError, UsageError
from plancompiler.executor.actor import ARRIVED, RETURNED, Notice, RankActors, shared_id
from plancompiler.executor.actor_loader import load_actors
from plancompiler.ir.task import family_of, format_id, unpack_id
from plancompiler.plan.plan import Plan, Task, communicator_of
from plancompiler.simulate.cost import Cost, Latency, Uses, Wake, no_latency, no_uses, no_wake
from plancompiler.simulate.simulation import Run, Simulation

SHOWN = 8
"""Waiting streams that a stall's error names."""


def simulate(
    plans: Mapping[int, Plan],
    cost: Cost,
    *,
    steps: int = 1,
    latency: Latency = no_latency,
    wake: Wake = no_wake,
    uses: Uses = no_uses,
    stands_for: Callable[[int], int] | None = None,
) -> Simulation:
    """Run some steps of all ranks' plans by a virtual clock that starts at 0.

    A task takes `cost(rank, task)` seconds, one at a time per stream. A collective begins when all
    its members have got there, and ends for all at once after the greatest of their costs. Notices
    between ranks take `latency(from, to)` seconds; those within a rank are there at once. A stream
    that waits for what another does goes on `wake(rank, stream)` seconds after it is told. What
    several tasks use at a time, as `uses(rank, task)` says, they share.

    `stands_for` gives the rank that is simulated for each rank of the world: of these the plans are
    needed, and times are those of all for which they stand. Without it all plans are.

    Raises DeadlockError if the ranks come to wait for each other, naming who waits for what,
    ExecutionError for a plan that cannot run, and UsageError for missing ranks or a cost below 0.
    """
    world_size = max((plan.world_size for plan in plans.values()), default=0)
    missing: list[int] = []
    if stands_for is None:
        missing = [rank for rank in range(world_size) if rank not in plans]
    if missing or not plans:
        raise UsageError(
            "a simulation needs the plans of all ranks",
            got=f"none of rank {missing[0]}" if missing else "none",
            expected=f"{world_size} plans" if missing else None,
        )
    if steps < 0:
        raise UsageError("a number of steps is not below 0", got=steps)
    return _EventLoop(plans, cost, steps, latency, wake, uses, stands_for or _itself).run()


def _itself(rank: int) -> int:
    return rank


class _CollectiveRun(NamedTuple):
    """One run of one collective."""

    family: int
    version: int
    members: tuple[int, ...]
    """The ranks that stand for its members."""


class _Stream:
    """One stream of one rank."""

    __slots__ = ("actor", "busy", "collectives", "number", "rank", "seconds", "tasks", "uses")

    def __init__(self, rank: int, number: int, actors: RankActors) -> None:
        self.rank = rank
        self.number = number
        self.actor = actors.actors[number]
        self.tasks = actors.tasks[number]
        self.seconds: list[float] = []
        """Of each task, once it is known that they are not below 0."""
        self.collectives: list[tuple[int, tuple[int, ...]] | None] = []
        """Family and members of each task that is a collective."""
        self.uses: list[Sequence[tuple[Hashable, float]]] = []
        """What each task shares with others; of tasks that take time."""
        self.busy = False
        """Whether the head task has taken its tokens and not ended."""

    @property
    def head(self) -> Task:
        return self.tasks[self.actor.position]


class _Sharing:
    """A task, or a collective, at work with what others use too."""

    __slots__ = ("left", "rows", "since", "streams", "stretch", "uses", "version")

    def __init__(
        self,
        streams: Sequence[_Stream],
        rows: Sequence[int],
        seconds: float,
        uses: Mapping[Hashable, float],
    ) -> None:
        self.streams = streams
        self.rows = rows
        """Its runs' places among all."""
        self.left = seconds
        """That it would take with nobody beside it, at the time `since`."""
        self.since = 0.0
        self.stretch = 0.0
        """Seconds that it takes for each of those; 0 before it begins."""
        self.uses = uses
        self.version = 0
        """Counts how often its end was put off, or brought forward."""


class _Route(NamedTuple):
    """A notice to another rank, as its sender knows it."""

    sender: int
    kind: int
    register: int
    task: int


def _routes(
    plans: Mapping[int, Plan],
    actors: Mapping[int, RankActors],
    streams: Mapping[int, list[_Stream]],
    stands_for: Callable[[int], int],
) -> dict[_Route, list[tuple[_Stream, int]]]:
    """Where each notice between ranks goes: streams and their tokens.

    A token is raised by the rank that stands for the peer that would raise it, with the notice of
    the same family there.
    """
    arrivals: dict[tuple[int, int, int, int], _Route] = {}
    """Rank, family, lane and slot of a register → the notice that a version of it is ready."""
    returns: dict[tuple[int, int, int, int, int], _Route] = {}
    """Rank, family and lane of a reader, family and slot of what it reads → the notice that it is
    done. Lane -1 for any."""
    for rank, plan in plans.items():
        for register in plan.registers:
            others = [task for task in register.consumers if unpack_id(task).rank != rank]
            if others:
                made = unpack_id(register.id)
                key = (rank, made.family, made.lane, made.slot)
                arrivals[key] = _Route(rank, ARRIVED, shared_id(register), min(others))
        for remote in plan.remote_registers:
            made = unpack_id(remote.id)
            for task in sorted(remote.consumers):
                reader = unpack_id(task)
                if reader.rank == rank:
                    route = _Route(rank, RETURNED, shared_id(remote), task)
                    read = (made.family, made.slot)
                    returns[rank, reader.family, reader.lane, *read] = route
                    returns.setdefault((rank, reader.family, -1, *read), route)
    routes: dict[_Route, list[tuple[_Stream, int]]] = {}
    for rank, ready in actors.items():
        for (kind, _, task), (number, token) in ready.remote_tokens.items():
            awaited = ready.actors[number].descriptions[token]
            peer = stands_for(awaited.rank)
            source, reader = unpack_id(awaited.register), unpack_id(task)
            told: _Route | None
            if kind == ARRIVED:
                told = arrivals.get((peer, source.family, source.lane, source.slot))
            else:
                read = (source.family, source.slot)
                told = returns.get(
                    (peer, reader.family, reader.lane, *read),
                    returns.get((peer, reader.family, -1, *read)),
                )
            if told is None:
                raise UsageError(
                    "a rank does not do as the one that stands for it",
                    rank=awaited.rank,
                    got=f"rank {peer} has no register or reader like {awaited.name!r}",
                )
            routes.setdefault(told, []).append((streams[rank][number], token))
    return routes


_Event = tuple[float, int, Callable[..., None], tuple[object, ...]]


class _EventLoop:
    """The state of a simulation."""

    def __init__(
        self,
        plans: Mapping[int, Plan],
        cost: Cost,
        steps: int,
        latency: Latency,
        wake: Wake,
        uses: Uses,
        stands_for: Callable[[int], int],
    ) -> None:
        self._plans = plans
        self._cost = cost
        self._latency = latency
        self._wake = wake
        self._uses = uses
        self._stands_for = stands_for
        self._now = 0.0
        self._events: list[_Event] = []
        """A heap by time; the count keeps events of one time in order."""
        self._count = 0
        self._arrived: dict[_CollectiveRun, list[_Stream]] = {}
        """Who has got there, for collectives that have not begun."""
        self._early: dict[tuple[_Stream, int], int] = {}
        """Notices of stand-ins that are ahead, by stream and token."""
        self._runs: list[Run] = []
        self._users: dict[Hashable, dict[_Sharing, None]] = {}
        """Who is at work with what is shared, in the order in which they began."""
        self._streams: dict[int, list[_Stream]] = {}
        ranks = {rank: load_actors(plan) for rank, plan in plans.items()}
        for rank, actors in ranks.items():
            self._streams[rank] = [
                _Stream(rank, number, actors) for number in range(len(actors.actors))
            ]
            for stream in self._streams[rank]:
                stream.actor.limit = steps
                self._prepare(plans[rank], stream)
        self._routes = _routes(plans, ranks, self._streams, stands_for)

    def _prepare(self, plan: Plan, stream: _Stream) -> None:
        for task in stream.tasks:
            seconds = self._cost(stream.rank, task)
            if not seconds >= 0:
                raise UsageError(
                    "a task of a simulation takes less than no time",
                    op=task.name,
                    rank=stream.rank,
                    got=f"{seconds} s",
                )
            stream.seconds.append(seconds)
            stream.uses.append(self._uses(stream.rank, task) if seconds else ())
            members: tuple[int, tuple[int, ...]] | None = None
            used = communicator_of(task.spec)
            if used is not None:
                ranks = plan.communicators[used].ranks
                members = family_of(task.id), tuple(sorted({*map(self._stands_for, ranks)}))
            stream.collectives.append(members)

    def run(self) -> Simulation:
        for stream in self._all():
            self._advance(stream)
        events = self._events
        while events:
            self._now, _, handle, arguments = heappop(events)
            handle(*arguments)
        stalled = [
            self._describe(stream)
            for stream in self._all()
            if stream.actor.step < stream.actor.limit
        ]
        if stalled:
            more = f"; and {len(stalled) - SHOWN} more" if len(stalled) > SHOWN else ""
            raise DeadlockError(
                f"streams wait for each other at {self._now:g} s of a simulation",
                got="; ".join(stalled[:SHOWN]) + more,
            )
        return Simulation(self._plans, self._runs)

    def _all(self) -> Iterator[_Stream]:
        for rank in sorted(self._streams):
            yield from self._streams[rank]

    def _schedule(self, at: float, handle: Callable[..., None], *arguments: object) -> None:
        self._count += 1
        heappush(self._events, (at, self._count, handle, arguments))

    def _advance(self, stream: _Stream) -> None:
        """Begin the head task, if it can; and those after it that neither wait nor tell anybody."""
        actor = stream.actor
        if stream.busy:
            return
        position = self._begin(stream)
        if position < 0:
            return
        stream.busy = True
        if stream.collectives[position] is not None:
            self._arrive(stream, position)
            return
        now, runs, seconds, rank = self._now, self._runs, stream.seconds, stream.rank
        while True:
            if stream.uses[position]:
                if now > self._now:
                    self._schedule(now, self._share, [stream])
                else:
                    self._share([stream])
                return
            end = now + seconds[position]
            runs.append(Run(rank, stream.tasks[position], actor.step, actor.microbatch, now, end))
            notices, now = actor.finish(), end
            position = actor.position
            if notices or actor.head_waits or stream.collectives[position] is not None:
                break
            if (self._begin(stream) if self._early else actor.begin()) < 0:  # all steps are done
                break
        self._schedule(now, self._end, stream, notices)

    def _begin(self, stream: _Stream) -> int:
        """See `StreamActor.begin`; what came early has its place once tokens are taken."""
        position = stream.actor.begin()
        if self._early and position >= 0:
            for key in [key for key in self._early if key[0] is stream]:
                while self._early[key] and not stream.actor.has_all(key[1]):
                    stream.actor.deliver(key[1])
                    self._early[key] -= 1
                if not self._early[key]:
                    del self._early[key]
        return position

    def _arrive(self, stream: _Stream, position: int) -> None:
        """A rank has got to a collective, which begins with the last of them."""
        known = stream.collectives[position]
        assert known is not None
        family, members = known
        collective = _CollectiveRun(family, stream.actor.version, members)
        arrived = self._arrived.setdefault(collective, [])
        arrived.append(stream)
        if len(arrived) < len(members):
            return
        del self._arrived[collective]
        if any(each.uses[each.actor.position] for each in arrived):
            self._share(arrived)
            return
        end = self._now + max(each.seconds[each.actor.position] for each in arrived)
        for each in arrived:
            actor = each.actor
            self._runs.append(
                Run(each.rank, each.head, actor.step, actor.microbatch, self._now, end)
            )
        self._schedule(end, self._end_together, arrived)

    def _end_together(self, streams: Iterable[_Stream]) -> None:
        for stream in streams:
            self._end(stream, stream.actor.finish())

    # --- what is shared ---------------------------------------------------------------------------

    def _share(self, streams: Sequence[_Stream]) -> None:
        """The head task of a stream, or a collective of several, begins with what others use."""
        uses: dict[Hashable, float] = {}
        rows, seconds = [], 0.0
        for stream in streams:
            actor = stream.actor
            seconds = max(seconds, stream.seconds[actor.position])
            for resource, part in stream.uses[actor.position]:
                uses[resource] = uses.get(resource, 0.0) + part
            rows.append(len(self._runs))
            now = self._now
            self._runs.append(Run(stream.rank, stream.head, actor.step, actor.microbatch, now, now))
        begun = _Sharing(streams, rows, seconds, uses)
        for resource in uses:
            self._users.setdefault(resource, {})[begun] = None
        self._divide(begun)

    def _divide(self, changed: _Sharing) -> None:
        """Go on with all that share something with one that has begun or ended."""
        users = self._users
        for each in {each: None for resource in changed.uses for each in users[resource]}:
            stretch = 1.0
            for resource in each.uses:
                together = sum([other.uses[resource] for other in users[resource]])
                stretch = max(stretch, together)
            if stretch == each.stretch:
                continue
            if each.stretch:
                each.left -= (self._now - each.since) / each.stretch
            each.since, each.stretch = self._now, stretch
            each.version += 1
            end = self._now + max(0.0, each.left) * stretch
            self._schedule(end, self._end_sharing, each, each.version)

    def _end_sharing(self, ended: _Sharing, version: int) -> None:
        if version != ended.version:
            return  # it has been slowed down since, or others have ended
        for resource in ended.uses:
            del self._users[resource][ended]
        for row in ended.rows:
            self._runs[row] = self._runs[row]._replace(end=self._now)
        self._divide(ended)
        self._end_together(ended.streams)

    def _end(self, stream: _Stream, notices: tuple[Notice, ...]) -> None:
        stream.busy = False
        streams = self._streams[stream.rank]
        for notice in notices:
            if notice.stream >= 0:
                self._deliver(streams[notice.stream], notice.token)
                continue
            route = _Route(stream.rank, notice.kind, notice.register, notice.task)
            for reader, token in self._routes.get(route, ()):
                latency = self._latency(stream.rank, reader.rank)
                self._schedule(self._now + latency, self._deliver, reader, token)
        self._advance(stream)

    def _deliver(self, stream: _Stream, token: int) -> None:
        if self._stands_for is not _itself and stream.actor.has_all(token):
            self._early[stream, token] = self._early.get((stream, token), 0) + 1
            return
        stream.actor.deliver(token)
        if stream.busy:
            return
        wake = self._wake(stream.rank, stream.actor.stream)
        if wake:
            self._schedule(self._now + wake, self._advance, stream)
        else:
            self._advance(stream)

    # --- stalls -----------------------------------------------------------------------------------

    def _describe(self, stream: _Stream) -> str:
        """`rank 1, compute, step 0: task 'a' waits for register 'b' (…) to arrive from rank 0`."""
        actor = stream.actor
        waits = [
            f"register {token.name!r} ({format_id(token.register)}) to "
            f"{'arrive' if token.kind == ARRIVED else 'come back'} from {token.peer}"
            for token in actor.waiting_for()
        ]
        if stream.busy:
            waits = [
                f"rank {rank} to join"
                for collective, arrived in self._arrived.items()
                if stream in arrived
                for rank in collective.members
                if rank not in {other.rank for other in arrived}
            ]
        return (
            f"rank {stream.rank}, stream {actor.stream}, {actor.step_position}: "
            f"task {stream.head.name!r} waits for {', '.join(waits)}"
        )
