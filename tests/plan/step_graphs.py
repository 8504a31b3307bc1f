"""Random step graphs, and an oracle that runs them: streams as threads, any legal interleaving."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from plancompiler.lower.memory import ALIGNMENT, StorageRequest
from plancompiler.plan.order import StepOrder

STEPS = 4


@dataclass(frozen=True)
class StepGraph:
    """Tasks in plan order: stream, earlier tasks each waits for, and storages by their users."""

    streams: list[int]
    predecessors: list[list[int]]
    storages: list[tuple[int, list[int], int]] = field(default_factory=list)
    """(first writer, all users, bytes); every user but the first waits for another user."""

    def order(self, *, credits_count: bool = False) -> StepOrder:
        """With credits, readers of a storage hold its writer back in the next step."""
        readers: list[list[int]] = [[] for _ in self.streams]
        for writer, users, _ in self.storages:
            readers[writer] += [user for user in users if user != writer]
        return StepOrder(self.streams, self.predecessors, readers if credits_count else ())

    def requests(self) -> list[StorageRequest]:
        return [
            StorageRequest(key, nbytes, tuple(users), (writer,))
            for key, (writer, users, nbytes) in enumerate(self.storages)
        ]


@st.composite
def step_graphs(draw: st.DrawFn, most: int = 24) -> StepGraph:
    """Graphs of a few streams; most edges carry data, some storages pass through several tasks."""
    count = draw(st.integers(1, most))
    streams = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=count, max_size=count))
    predecessors = [
        sorted(
            draw(
                st.sets(st.integers(max(0, task - 6), task - 1), max_size=3)
                if task
                else st.just(set())
            )
        )
        for task in range(count)
    ]
    followers: list[list[int]] = [[] for _ in range(count)]
    for task, before in enumerate(predecessors):
        for other in before:
            followers[other].append(task)
    storages = []
    for writer in range(count):
        if not draw(st.booleans()):
            continue
        users = {writer}
        for _ in range(draw(st.integers(0, 3))):
            reachable = sorted({after for user in users for after in followers[user]} - users)
            if reachable:
                users.add(draw(st.sampled_from(reachable)))
        nbytes = draw(st.sampled_from([1, 64, 100, 128, 300, 640]))
        storages.append((writer, sorted(users), nbytes))
    return StepGraph(streams, predecessors, storages)


class OverwrittenError(Exception):
    """A task found other bytes than those written for it."""


def run(graph: StepGraph, places: dict[int, tuple[int, int]], seed: int) -> None:
    """Run some steps in a random interleaving; `places` gives (arena, offset) per storage.

    A stream starts its next task when that task's predecessors of the step have finished and, for
    the first writer of a storage, when all users of the storage in the step before have. Bytes
    carry the storage and step they were written for; each user looks at them when it starts and
    when it ends.
    """
    chance = random.Random(seed)
    width = max(graph.streams) + 1
    queues = [[task for task, on in enumerate(graph.streams) if on == s] for s in range(width)]
    writes: dict[int, list[int]] = {}
    uses: dict[int, list[int]] = {}
    for key, (writer, users, _) in enumerate(graph.storages):
        writes.setdefault(writer, []).append(key)
        for user in users:
            uses.setdefault(user, []).append(key)
    lines: dict[tuple[int, int], tuple[int, int]] = {}
    finished: set[tuple[int, int]] = set()
    at = [0] * width
    running = [False] * width
    # Streams of different speeds: some interleavings let one stream run far ahead of the others.
    speed = [chance.choice([1, 1, 5, 50]) for _ in range(width)]

    def lines_of(key: int) -> list[tuple[int, int]]:
        arena, offset = places[key]
        nbytes = graph.storages[key][2]
        return [
            (arena, line)
            for line in range(offset // ALIGNMENT, (offset + nbytes - 1) // ALIGNMENT + 1)
        ]

    def head(stream: int) -> tuple[int, int] | None:
        step, position = divmod(at[stream], len(queues[stream]) or 1)
        return (step, queues[stream][position]) if queues[stream] and step < STEPS else None

    def may_start(step: int, task: int) -> bool:
        if any((step, other) not in finished for other in graph.predecessors[task]):
            return False
        return step == 0 or all(
            (step - 1, user) in finished
            for key in writes.get(task, ())
            for user in graph.storages[key][1]
        )

    def look(step: int, task: int) -> None:
        for key in uses.get(task, ()):
            for line in lines_of(key):
                if lines.get(line) != (step, key):
                    raise OverwrittenError(
                        f"task {task} of step {step}, storage {key}: {lines.get(line)}"
                    )

    while True:
        choices = []
        for stream in range(width):
            now = head(stream)
            if now is not None and (running[stream] or may_start(*now)):
                choices.append(stream)
        if not choices:
            break
        stream = chance.choices(choices, [speed[choice] for choice in choices])[0]
        now = head(stream)
        assert now is not None
        step, task = now
        if running[stream]:
            look(step, task)
            finished.add(now)
            at[stream] += 1
        else:
            for key in writes.get(task, ()):
                for line in lines_of(key):
                    lines[line] = (step, key)
            look(step, task)
        running[stream] = not running[stream]
    assert len(finished) == STEPS * len(graph.streams), "the interleaving got stuck"
