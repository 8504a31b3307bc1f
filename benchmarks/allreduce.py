"""all_reduce between two processes of one host, float32, through a plan with one collective.

    python benchmarks/allreduce.py
    python benchmarks/allreduce.py --mpi-python mpich=PYTHON --torch-python PYTHON --rounds 5

Prints one JSON line: the median time of one step in ms, by size, and the time of a plain copy of as
many bytes for comparison. The options name interpreters with mpi4py (and an mpiexec beside them)
or torch: then MPI_Allreduce and gloo are measured too, in turn with this project, round after
round, so that all of them meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from plancompiler.executor.comm.host import HostLink
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
    with Runtime(all_reduce_plan(rank, nbytes), HostLink(token, rank)) as runtime:
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


PEERS = Path(__file__).resolve().parent / "peers"


def mpi_ms(python: str, size_mib: int) -> float:
    """Median time of MPI_Allreduce in ms, by an interpreter with mpi4py."""
    mpiexec = [str(Path(python).parent / "mpiexec"), "-n", str(RANKS)]
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return _said([*mpiexec, python, str(PEERS / "allreduce_mpi.py"), str(size_mib)], environment)


def gloo_ms(python: str, size_mib: int) -> float:
    """Median time of all_reduce of torch.distributed over gloo in ms."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(PEERS / "allreduce_gloo.py"), str(size_mib), f"{folder}/store"]
        return _said(command, dict(os.environ))


def _said(command: list[str], environment: dict[str, str]) -> float:
    done = subprocess.run(
        [*command, str(SECONDS)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mpi-python", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--torch-python", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MIB, metavar="MIB")
    options = parser.parse_args()
    measures: dict[str, Callable[[int], float]] = {"ms": all_reduce_ms, "copy_ms": copy_ms}
    for named in options.mpi_python:
        name, _, python = named.partition("=")
        measures[f"{name}_ms"] = partial(mpi_ms, python)
    if options.torch_python:
        measures["gloo_ms"] = lambda size: gloo_ms(options.torch_python, size)
    result: dict[str, object] = {"benchmark": "allreduce", "ranks": RANKS, "dtype": "float32"}
    for size in options.sizes:
        rounds = [
            {name: measured(size) for name, measured in measures.items()}
            for _ in range(options.rounds)
        ]
        for name in measures:
            median = statistics.median(each[name] for each in rounds)
            result[f"{name}_{size}_mib"] = round(median, 3)
            if name not in ("ms", "copy_ms"):
                ratio = statistics.median(each["ms"] / each[name] for each in rounds)
                result[f"{name.removesuffix('_ms')}_ratio_{size}_mib"] = round(ratio, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
