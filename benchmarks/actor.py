"""What one action of the actor runtime costs, with kernels that do nothing.

    python benchmarks/actor.py

Prints one JSON line. `same_stream_us`: a task that follows another on its stream, launch included;
`machine_us`: the state machine alone; `across_streams_us`: an action whose register comes from the
thread of another stream (two streams in turn: a register goes there, its credit comes back);
`hand_over_us`: what the interpreter takes to wake a thread that waits for a lock, and nothing else.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable

from plancompiler.executor.actor_loader import load_actors
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.runtime import Runtime
from plancompiler.ir import DType, NdSbp
from plancompiler.ir.task import TaskKind, pack_register_id, pack_task_id
from plancompiler.ops.registry import OpDef, register
from plancompiler.plan.plan import Block, ComputeSpec, Plan, RegisterDesc, Stream, Task

TASKS = 1000
STEPS = 100
REPEATS = 5
HAND_OVERS = 10_000

register(
    OpDef(
        "benchmark_nothing",
        infer=lambda inputs, attrs: inputs[:1],
        rule="... -> ...",
        kernel=lambda context, inputs, outputs: None,
    )
)


def chain(streams: tuple[Stream, ...], tasks: int) -> Plan:
    """A chain of tasks without work that takes turns between the streams."""
    registers = []
    chained = []
    for family in range(tasks):
        made = pack_register_id(0, family)
        reader = (pack_task_id(0, family + 1),) if family + 1 < tasks else ()
        registers.append(
            RegisterDesc(
                made,
                f"v{family}",
                (1,),
                DType.FLOAT32,
                NdSbp(()),
                pack_task_id(0, family),
                reader,
                0,
                64 * family,
                4,
            )
        )
        inputs = (pack_register_id(0, family - 1),) if family else ()
        region = ((0, 1),)
        spec = ComputeSpec(
            "benchmark_nothing",
            (),
            ((1,),) * len(inputs),
            ((1,),),
            (region,) * len(inputs),
            (region,),
        )
        chained.append(
            Task(
                pack_task_id(0, family),
                TaskKind.COMPUTE,
                streams[family % len(streams)],
                f"task{family}",
                inputs,
                (made,),
                spec,
            )
        )
    block = Block(0, "arena", False, 64 * tasks)
    return Plan("benchmark", 0, 1, 0, tuple(chained), tuple(registers), (), (block,), (), (), ())


def best(measure: Callable[[], float]) -> float:
    """Median of several measurements, in µs."""
    return round(statistics.median(measure() for _ in range(REPEATS)) * 1e6, 3)


def machine() -> float:
    """Seconds per action of the state machine."""
    (actor,) = load_actors(chain((Stream.COMPUTE,), TASKS)).actors
    actor.limit = STEPS
    begin, finish = actor.begin, actor.finish
    start = time.perf_counter()
    while begin() >= 0:
        finish()
    return (time.perf_counter() - start) / (TASKS * STEPS)


def runtime(streams: tuple[Stream, ...], tasks: int, steps: int) -> float:
    """Seconds per action of a real run."""
    with Runtime(chain(streams, tasks), LocalHub().link(0)) as running:
        running.prepare()
        running.run(2)
        start = time.perf_counter()
        running.run(steps)
        return (time.perf_counter() - start) / (tasks * steps)


def hand_over() -> float:
    """Seconds from a thread that releases a lock to another that waits for it."""
    here, there = threading.Lock(), threading.Lock()
    here.acquire()
    there.acquire()

    def answer() -> None:
        for _ in range(HAND_OVERS):
            there.acquire()
            here.release()

    thread = threading.Thread(target=answer)
    thread.start()
    start = time.perf_counter()
    for _ in range(HAND_OVERS):
        there.release()
        here.acquire()
    seconds = time.perf_counter() - start
    thread.join()
    return seconds / (2 * HAND_OVERS)


def main() -> None:
    """Measure and print."""
    result = {
        "benchmark": "actor",
        "machine_us": best(machine),
        "same_stream_us": best(lambda: runtime((Stream.COMPUTE,), TASKS, STEPS)),
        "across_streams_us": best(lambda: runtime((Stream.COMPUTE, Stream.COPY), 2, 2000)),
        "hand_over_us": best(hand_over),
        "goal_same_stream_us": 1.0,
        "goal_across_streams_us": 25.0,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
