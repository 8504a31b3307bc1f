"""The actor machine under many seeded interleavings, with invariants after every event."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from plancompiler.errors import ExecutionError
from plancompiler.executor.actor import (
    ARRIVED,
    AT_LIMIT,
    BLOCKED,
    RETURNED,
    Notice,
    StreamActor,
    Turn,
)
from plancompiler.executor.actor_loader import load_actors
from plancompiler.ir import Reduction
from plancompiler.ir.task import Primitive, TaskKind, unpack_id
from plancompiler.plan.plan import CollectiveSpec, Plan, Stream, Task
from tests.executor import plans
from tests.executor.plans import Sketch, chain, data_parallel, pipeline

STEPS = 5


@dataclass
class Slot:
    """One slot of a register: the version it holds, and who has still to read it."""

    version: int = -1
    readers: set[int] = field(default_factory=set)


class World:
    """All ranks' actors with a scheduler that picks every event at random from a seed."""

    def __init__(self, ranks: dict[int, Plan], seed: int, slow: int = -1) -> None:
        """A `slow` rank acts only now and then while the others can."""
        self.plans = ranks
        self.slow = slow
        self.random = random.Random(seed)
        self.ranks = {rank: load_actors(plan) for rank, plan in ranks.items()}
        self.messages: dict[tuple[int, int, int], deque[int]] = {}
        self.running: dict[tuple[int, int], int] = {}
        self.arrivals: dict[tuple[int, int], set[int]] = {}
        self.slots: dict[int, list[Slot]] = {}
        self.consumers: dict[int, set[int]] = {}
        self.per_microbatch: dict[int, bool] = {}
        for plan in ranks.values():
            for register in plan.registers:
                self.slots[register.id] = [Slot() for _ in range(register.register_count)]
                self.per_microbatch[register.id] = register.per_microbatch
            for task in plan.tasks:
                for register_id in (*task.inputs, *task.controls_in):
                    self.consumers.setdefault(register_id, set()).add(task.id)

    def task(self, rank: int, stream: int, position: int) -> Task:
        return self.ranks[rank].tasks[stream][position]

    def run(self, steps: int) -> None:
        for rank in self.ranks.values():
            for actor in rank.actors:
                actor.limit = steps
        total = sum(len(plan.tasks) * plan.microbatches for plan in self.plans.values())
        ceiling = 40 * steps * total + 1000
        for _ in range(ceiling):
            events = self.events()
            if not events:
                break
            quick = [event for rank, event in events if rank != self.slow]
            pool = quick if quick and self.random.random() < 0.98 else [each for _, each in events]
            self.random.choice(pool)()
            self.check()
        for number, rank in self.ranks.items():
            for actor in rank.actors:
                assert actor.step == steps, (
                    f"rank {number} stream {actor.stream} stands at {actor.step_position}, "
                    f"task {actor.position}, waiting for {actor.waiting_for()}"
                )
                assert actor.begin() == AT_LIMIT

    def events(self) -> list:
        """(rank, what can happen next there)."""
        events = []
        for channel, queue in self.messages.items():
            if queue:
                events.append((channel[0], lambda channel=channel: self.deliver(channel)))
        for number, rank in self.ranks.items():
            for stream, actor in enumerate(rank.actors):
                key = number, stream
                if key in self.running:
                    if self.may_finish(key):
                        events.append((number, lambda key=key: self.finish(key)))
                elif actor.step < actor.limit and not actor.waiting_for():
                    events.append((number, lambda key=key: self.begin(key)))
        return events

    def deliver(self, channel: tuple[int, int, int]) -> None:
        rank, stream, _ = channel
        self.ranks[rank].actors[stream].deliver(self.messages[channel].popleft())

    def begin(self, key: tuple[int, int]) -> None:
        rank, stream = key
        actor = self.ranks[rank].actors[stream]
        position = actor.begin()
        assert position == actor.position
        task = self.task(rank, stream, position)
        self.running[key] = actor.version
        for register in (*task.inputs, *task.controls_in):
            slot = self.slot(register, actor)
            assert slot.version == self.version(register, actor), (
                f"{task.name} reads a version that is not there"
            )
            assert task.id in slot.readers
        for register in (*task.outputs, *task.controls_out):
            slot = self.slot(register, actor)
            assert not slot.readers, f"{task.name} writes a slot that {slot.readers} still read"
            if self.is_first(register, actor):
                slot.version = -2
            assert slot.version == -2, f"{task.name} adds to something else"
        if isinstance(task.spec, CollectiveSpec):
            self.arrivals.setdefault((unpack_id(task.id).family, actor.version), set()).add(rank)

    def version(self, register: int, actor: StreamActor) -> int:
        """The version of a register that the head task of a stream has to do with."""
        return actor.version if self.per_microbatch[register] else actor.step

    def is_first(self, register: int, actor: StreamActor) -> bool:
        """Whether the head task begins a version of a register that it makes."""
        return self.per_microbatch[register] or actor.microbatch == 0

    def is_last(self, register: int, rank: int, actor: StreamActor, task: Task) -> bool:
        """Whether the head task is done with a version of a register when it has run."""
        plan = self.plans[rank]
        each = plan.segments[task.segment].kind.per_microbatch
        return (
            self.per_microbatch[register] or not each or actor.microbatch == plan.microbatches - 1
        )

    def may_finish(self, key: tuple[int, int]) -> bool:
        rank, stream = key
        actor = self.ranks[rank].actors[stream]
        task = self.task(rank, stream, actor.position)
        if not isinstance(task.spec, CollectiveSpec):
            return True
        members = self.plans[rank].communicators[task.spec.communicator].ranks
        return self.arrivals[unpack_id(task.id).family, actor.version] >= set(members)

    def finish(self, key: tuple[int, int]) -> None:
        rank, stream = key
        actor = self.ranks[rank].actors[stream]
        assert self.running.pop(key) == actor.version
        task = self.task(rank, stream, actor.position)
        for register in (*task.inputs, *task.controls_in):
            slot = self.slot(register, actor)
            assert slot.version == self.version(register, actor), (
                f"{task.name}: its input was overwritten while it ran"
            )
            if self.is_last(register, rank, actor, task):
                slot.readers.discard(task.id)
        for register in (*task.outputs, *task.controls_out):
            if self.is_last(register, rank, actor, task):
                slot = self.slot(register, actor)
                slot.version = self.version(register, actor)
                slot.readers = set(self.consumers.get(register, ()))
        for notice in actor.finish():
            self.send(rank, stream, notice)

    def send(self, rank: int, stream: int, notice: Notice) -> None:
        if notice.stream >= 0:
            target, to, token = rank, notice.stream, notice.token
        else:
            target = notice.rank
            to, token = self.ranks[target].find_remote(notice.kind, notice.register, notice.task)
        sender = rank * 100 + stream
        self.messages.setdefault((target, to, sender), deque()).append(token)

    def slot(self, register: int, actor: StreamActor) -> Slot:
        slots = self.slots[register]
        return slots[self.version(register, actor) % len(slots)]

    def check(self) -> None:
        for rank in self.ranks.values():
            for actor in rank.actors:
                for count, token in zip(actor.counts(), actor.descriptions, strict=True):
                    assert 0 <= count <= token.maximum


def random_plans(seed: int) -> dict[int, Plan]:
    """A random legal world: computes, copies, collectives, controls and slots in a global order."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 3)
    sketch = Sketch(world_size)
    values: list[list[int]] = []
    families: list[list[int]] = []
    family = 0
    for rank in range(world_size):
        values.append([sketch.input(rank, family, f"x{rank}", (2,), count=rng.randint(1, 3))])
        families.append([family])
        family += 1
    for _ in range(rng.randint(3, 12)):
        kind = rng.choice(["compute", "compute", "copy", "collective", "control"])
        rank = rng.randrange(world_size)
        if kind == "compute":
            inputs = [rng.choice(values[rank]) for _ in range(rng.randint(1, 2))]
            (made,) = sketch.compute(
                rank,
                family,
                "add",
                inputs,
                [((2,), "float32")],
                stream=rng.choice(list(Stream)),
                count=rng.randint(1, 3),
            )
            values[rank].append(made)
            families[rank].append(family)
        elif kind == "copy" and world_size > 1:
            other = rng.choice([one for one in range(world_size) if one != rank])
            values[rank].append(sketch.copy(rank, family, rng.choice(values[other])))
            families[rank].append(family)
        elif kind == "collective" and world_size > 1:
            ranks = sorted(rng.sample(range(world_size), rng.randint(2, world_size)))
            made_by = sketch.collective(
                ranks,
                family,
                Primitive.ALL_REDUCE,
                {one: rng.choice(values[one]) for one in ranks},
                dict.fromkeys(ranks, (2,)),
                reduction=Reduction.SUM,
            )
            for one, register in made_by.items():
                values[one].append(register)
                families[one].append(family)
        elif kind == "control" and len(families[rank]) > 1:
            before, after = sorted(rng.sample(families[rank], 2))
            sketch.control(rank, before, after)
        family += 1
    for rank in range(world_size):
        sketch.step_end(rank, family)
    return sketch.build()


WORLDS = {
    "chain": chain,
    "chain with two slots": lambda: chain(2),
    "data parallel": lambda: data_parallel(2),
    "three ranks": lambda: data_parallel(3),
    "pipeline": lambda: pipeline(3),
    "pipeline with two slots": lambda: pipeline(3, 2),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_interleaving_ends(name):
    ranks = WORLDS[name]()
    for seed in range(40):
        try:
            World(ranks, seed).run(STEPS)
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error


@pytest.mark.slow
def test_random_plans_under_random_interleavings():
    for seed in range(150):
        ranks = random_plans(seed)
        for order in range(3):
            try:
                World(ranks, order).run(3)
            except AssertionError as error:
                raise AssertionError(f"plan seed {seed}, order {order}: {error}") from error


def test_the_limit_can_be_raised():
    world = World(pipeline(2), 0)
    world.run(2)
    world.run(4)


def test_a_producer_runs_ahead_by_its_slots_and_no_more():
    for count in (1, 2, 3):
        actors = load_actors(chain(count)[0]).actors
        data = next(actor for actor in actors if actor.stream is Stream.DATA)
        data.limit = 10
        ahead = 0
        while data.begin() >= 0:
            data.finish()
            ahead += 1
        assert ahead == count
        assert data.begin() == BLOCKED
        assert {token.kind for token in data.waiting_for()} == {RETURNED}


def test_a_deadlock_is_seen_by_the_harness():
    """Two ranks that enter two collectives in opposite order cannot finish."""
    sketch = Sketch(2)
    xs = {rank: sketch.input(rank, rank, f"x{rank}", (2,)) for rank in range(2)}
    shapes = dict.fromkeys(range(2), (2,))
    sketch.collective(range(2), 5, Primitive.ALL_REDUCE, xs, shapes, reduction=Reduction.SUM)
    sketch.collective(range(2), 6, Primitive.ALL_REDUCE, xs, shapes, reduction=Reduction.SUM)
    tasks = sketch.ranks[1].tasks
    tasks[-2:] = reversed(tasks[-2:])
    with pytest.raises(AssertionError, match="stands at step 0"):
        World(sketch.build(), 0).run(1)


def test_edges_inside_one_stream_cost_nothing():
    actors = load_actors(chain()[0]).actors
    compute = next(actor for actor in actors if actor.stream is Stream.COMPUTE)
    # x arrives from the data stream; w, h and y stay on the compute stream.
    assert [token.kind for token in compute.descriptions if token.kind == ARRIVED] == [ARRIVED]


def test_too_many_arrivals_are_refused():
    rank = load_actors(chain()[0])
    index = next(i for i, actor in enumerate(rank.actors) if actor.stream is Stream.COMPUTE)
    compute = rank.actors[index]
    token = next(i for i, one in enumerate(compute.descriptions) if one.kind == ARRIVED)
    compute.deliver(token)
    with pytest.raises(ExecutionError, match="arrived more often than it has slots"):
        compute.deliver(token)


def test_too_many_credits_are_refused():
    data = next(actor for actor in load_actors(chain()[0]).actors if actor.stream is Stream.DATA)
    token = next(i for i, one in enumerate(data.descriptions) if one.kind == RETURNED)
    with pytest.raises(ExecutionError, match="came back more often than it has slots"):
        data.deliver(token)


@pytest.mark.parametrize("token", [-1, 99])
def test_unknown_tokens_are_refused(token):
    actor = StreamActor(Stream.COMPUTE, [Turn(0, 1, 0, False, ((),), ((),))], [])
    with pytest.raises(ExecutionError, match="does not know"):
        actor.deliver(token)


def test_messages_about_unknown_registers_are_refused():
    with pytest.raises(ExecutionError, match="does not share"):
        load_actors(pipeline(2)[1]).find_remote(ARRIVED, 12345, 1)


def test_a_register_read_before_it_is_made_is_refused():
    sketch = Sketch(1)
    x = sketch.input(0, 0, "x", (2,), stream=Stream.COMPUTE)
    (a,) = sketch.compute(0, 1, "relu", [x], [((2,), "float32")])
    sketch.compute(0, 2, "relu", [a], [((2,), "float32")])
    tasks = sketch.ranks[0].tasks
    tasks[1], tasks[2] = tasks[2], tasks[1]
    with pytest.raises(ExecutionError, match="before it is made"):
        load_actors(sketch.build()[0])


def test_a_register_that_the_plan_does_not_have_is_refused():
    sketch = Sketch(1)
    sketch.task(0, 0, TaskKind.COMPUTE, Stream.COMPUTE, None, [plans.pack_register_id(0, 9)])
    with pytest.raises(ExecutionError, match="does not have"):
        load_actors(_without_remote(sketch))


def _without_remote(sketch: Sketch) -> Plan:
    state = sketch.ranks[0]
    return Plan("broken", 0, 1, 0, tuple(state.tasks), (), (), (), (), (), ())
