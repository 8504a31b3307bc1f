"""all_reduce between two processes of one host, float32, through a plan with one collective.

    python benchmarks/allreduce.py

Prints one JSON line: the median time of one step in ms, by size, and the time of a plain copy of as
many bytes for comparison.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from plancompiler.executor.comm.host import HostTransport
from plancompiler.executor.runtime import Runtime
from plancompiler.ir import DType, NdSbp, Placement, Reduction, freeze_attrs
from plancompiler.ir.task import Primitive, TaskKind, pack_register_id, pack_task_id
from plancompiler.plan.plan import (
    Block,
    CollectiveSpec,
    Communicator,
    ComputeSpec,
    Plan,
    RegisterDesc,
    Stream,
    Task,
    VariableDesc,
)

RANKS = 2
SIZES_MIB = (4, 64)
SECONDS = 1.5
BATCH = 10
"""Steps per measurement."""


def all_reduce_plan(rank: int, nbytes: int) -> Plan:
    """A variable and its sum over the ranks, all on one stream."""
    elements = nbytes // 4
    shape, region = (elements,), ((0, elements),)
    variable, total = pack_register_id(rank, 0), pack_register_id(rank, 1)
    tasks = (pack_task_id(rank, 0), pack_task_id(rank, 1))
    attrs = freeze_attrs({"name": "x", "init": "ones", "init_args": ()})
    spec = ComputeSpec("variable", attrs, (), (shape,), (), (region,))
    collective = CollectiveSpec(Primitive.ALL_REDUCE, 0, Reduction.SUM)
    stream = Stream.COLLECTIVE
    return Plan(
        "benchmark",
        rank,
        RANKS,
        0,
        (
            Task(tasks[0], TaskKind.VARIABLE, stream, "x", (), (variable,), spec),
            Task(
                tasks[1],
                TaskKind.COLLECTIVE_BOXING,
                stream,
                "sum",
                (variable,),
                (total,),
                collective,
            ),
        ),
        tuple(
            RegisterDesc(
                register,
                name,
                shape,
                DType.FLOAT32,
                NdSbp(()),
                task,
                readers,
                block,
                0,
                nbytes,
            )
            for register, name, task, readers, block in (
                (variable, "x", tasks[0], (tasks[1],), 0),
                (total, "total", tasks[1], (), 1),
            )
        ),
        (),
        (Block(0, "variables", True, nbytes), Block(1, "arena", True, nbytes)),
        (Communicator(tuple(range(RANKS)), (1,)),),
        (
            VariableDesc(
                "x",
                variable,
                shape,
                DType.FLOAT32,
                Placement("cpu", [rank]),
                NdSbp.of(["B"]),
                region,
                attrs,
            ),
        ),
        (),
    )


def measure(rank: int, token: str, size_mib: int, connection: Connection) -> None:
    """A rank's process: seconds per step of each batch."""
    nbytes = size_mib << 20
    times = []
    with Runtime(all_reduce_plan(rank, nbytes), HostTransport(token, rank)) as runtime:
        runtime.prepare()
        runtime.run(BATCH)
        batches = max(3, int(SECONDS / (0.1e-3 * size_mib * BATCH)))
        for _ in range(batches):
            start = time.perf_counter()
            runtime.run(BATCH)
            times.append((time.perf_counter() - start) / BATCH)
    connection.send(times)
    connection.close()


def all_reduce_ms(size_mib: int) -> float:
    """Median step time of rank 0."""
    context = multiprocessing.get_context("spawn")
    token = secrets.token_hex(16)
    here, there = context.Pipe(duplex=False)
    ignored, elsewhere = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=measure, args=(rank, token, size_mib, end))
        for rank, end in enumerate((there, elsewhere))
    ]
    for process in ranks:
        process.start()
    there.close()
    elsewhere.close()
    times: list[float] = here.recv()
    ignored.recv()
    for process in ranks:
        process.join()
    return statistics.median(times) * 1e3


def copy_ms(size_mib: int) -> float:
    """Median time of copying as many bytes in one thread."""
    source = np.ones(size_mib << 18, np.float32)
    target = np.empty_like(source)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Measure and print."""
    result: dict[str, object] = {"benchmark": "allreduce", "ranks": RANKS, "dtype": "float32"}
    for size in SIZES_MIB:
        result[f"ms_{size}_mib"] = round(all_reduce_ms(size), 3)
        result[f"copy_ms_{size}_mib"] = round(copy_ms(size), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
