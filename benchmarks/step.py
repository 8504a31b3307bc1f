"""A training step on 2 ranks, beside PyTorch DDP and JAX.

    python -m benchmarks.step [--rounds 15] [--job mlp|gpt] [--torch-python PATH]
                              [--jax-python PATH]

Prints one JSON line per job:

    mlp   784-2048-2048-10, global batch 512, SGD, float32
    gpt   examples/gpt.py, preset tiny, 8 sequences a rank, AdamW, float32

All of it is data-parallel. `ours`: a session with 2 worker processes. `torch_ddp`: 2 processes
with gloo, one thread each. `jax_2`: 2 devices of one process; `jax_1`: one device that may use all
cores, with the whole batch. All fetch the loss of every step. All are started before anything is
measured, and then run some steps in turn, in another order each round; the rest of the time they
wait. Times are medians over the rounds; ratios are medians of the ratios within a round, ours over
theirs. `cpu_ms` is what all processes of one of them spent on the CPU per step, waiting not
counted: where the machine has other work it tells more than wall time. `products` are the matrix
products of our step and nothing else, made by 2 processes at once (`benchmarks.products`).
`ours_numpy`, where numba is installed, are we without it.

The peers are needed by this benchmark alone: `torch` and `jax` in environments of their own, whose
interpreters the options or PLANCOMPILER_TORCH_PYTHON and PLANCOMPILER_JAX_PYTHON name. A peer
without an interpreter is left out, which a note on standard error says.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from operator import truediv
from pathlib import Path
from typing import Any

import plancompiler as pc
from benchmarks.products import products_of
from plancompiler.blas.loaded_library import describe
from plancompiler.blas.threads import one_thread_environment
from plancompiler.cli.job_file import load_job

# Later than plancompiler, which chooses the kernels that NumPy loads.
import numpy as np  # isort: skip

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
GPT = ROOT / "examples" / "gpt.py"
RANKS = 2
WARM_UP = 3
STEPS = 3
"""Steps of one of them in one round."""

Report = dict[str, Any]


# --- the jobs -------------------------------------------------------------------------------------


def mlp(folder: Path) -> pc.Job:
    rows = folder / "rows.npz"
    generator = np.random.default_rng(0)
    images = generator.normal(size=(512, 784)).astype(np.float32)
    np.savez(rows, x=images, y=generator.integers(0, 10, 512))
    mesh = pc.Placement("cpu", list(range(RANKS)), ("dp",))
    with pc.job("mlp") as job:
        model = pc.nn.Sequential(
            pc.nn.Linear(784, 2048),
            pc.nn.ReLU(),
            pc.nn.Linear(2048, 2048),
            pc.nn.ReLU(),
            pc.nn.Linear(2048, 10),
        ).place(mesh)
        x, y = pc.data.Arrays(rows, ("x", "y"), batch=512, placement=mesh, sbp=["S(0)"])
        loss = pc.cross_entropy(model(x), y)
        pc.optim.SGD(lr=0.1).minimize(loss)
        pc.output("loss", loss)
    return job


def gpt(_folder: Path) -> pc.Job:
    return load_job(str(GPT), {"preset": "tiny", "dp": RANKS, "batch": 8 * RANKS})


JOBS = {"mlp": mlp, "gpt": gpt}


def parameters_of(job: pc.Job) -> int:
    """Elements of what is trained."""
    return sum(
        int(np.prod(op.outputs[0].shape))
        for op in job.ops
        if op.kind == "variable" and op.attr("trainable")
    )


def serve(name: str) -> None:
    """Our side, with the same manners as the peers: see their docstrings."""
    with tempfile.TemporaryDirectory() as folder:
        job = JOBS[name](Path(folder))
        with pc.run(job, RANKS, backend="processes", cache=False) as session:
            first = [outputs["loss"] for outputs in session.run(1)]
            say({"version": "", "parameters": parameters_of(job), "loss": first[0]})
            for line in sys.stdin:
                steps = int(line)
                begin = time.perf_counter()
                for _ in session.run(steps):
                    pass
                say({"seconds": (time.perf_counter() - begin) / steps})


def serve_products(name: str) -> None:
    """The products of both ranks at once, with the same manners."""
    spawn = multiprocessing.get_context("spawn")
    links, children = [], []
    for rank in range(RANKS):
        ours, theirs = spawn.Pipe()
        children.append(spawn.Process(target=make_products, args=(name, rank, theirs), daemon=True))
        children[-1].start()
        links.append(ours)
    for link in links:
        link.recv()
    say({"version": ""})
    for line in sys.stdin:
        steps = int(line)
        begin = time.perf_counter()
        for link in links:
            link.send(steps)
        for link in links:
            link.recv()
        say({"seconds": (time.perf_counter() - begin) / steps})


def make_products(name: str, rank: int, orders: Connection) -> None:
    """One rank's part of `serve_products`: as many steps as it is told, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        products = products_of(JOBS[name](Path(folder)), RANKS, rank)
    orders.send(None)
    with suppress(EOFError):
        while True:
            for _ in range(orders.recv()):
                for product in products:
                    product()
            orders.send(None)


def say(message: Report) -> None:
    print(json.dumps(message), flush=True)


# --- who runs -------------------------------------------------------------------------------------


class Way:
    """One of those who run a job: processes that wait for their turn."""

    def __init__(self, name: str, *processes: subprocess.Popen[str]) -> None:
        """The first of the processes takes orders."""
        self.name = name
        self._process = processes[0]
        self._pids = [process.pid for process in processes]
        self.about = self._hear()
        self.cpu_seconds = 0.0
        """What all its processes spent in `seconds`, altogether."""

    def seconds(self, steps: int) -> float:
        """Run steps; seconds per step."""
        assert self._process.stdin is not None
        before = cpu_seconds(self._pids)
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        seconds = float(self._hear()["seconds"])
        self.cpu_seconds += cpu_seconds(self._pids) - before
        return seconds

    def _hear(self) -> Report:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended without an answer")
        answer: Report = json.loads(line)
        return answer


def cpu_seconds(pids: list[int]) -> float:
    """CPU time so far of processes and all that came from them, as Linux counts it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in parentheses, may hold anything.
            fields = file.read_text().rpartition(")")[2].split()
            pid = int(file.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    ticks_so_far = 0
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        ticks_so_far += ticks.get(pid, 0)
        waiting += [child for child, parent in parents.items() if parent == pid]
    return ticks_so_far / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(command: list[str], **changes: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is asked to end by the end of its stdin."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **changes},
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def ours(name: str, stack: ExitStack) -> list[Way]:
    command = [sys.executable, "-m", "benchmarks.step", "--serve"]
    ways = [Way("ours", stack.enter_context(started([*command, name])))]
    without = {"PLANCOMPILER_JIT": "0"}
    if importlib.util.find_spec("numba") is not None:
        ways.append(Way("ours_numpy", stack.enter_context(started([*command, name], **without))))
    alone = started([*command, f"{name} products"], **one_thread_environment(), **without)
    return [*ways, Way("products", stack.enter_context(alone))]


def torch_ddp(python: str, name: str, stack: ExitStack) -> Way:
    meet = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "ranks"
    command = [python, str(PEERS / "torch_ddp.py"), "--model", name, "--ranks", str(RANKS)]
    command += ["--meet", str(meet), "--rank"]
    one_thread = one_thread_environment()
    # The last to be entered is the first to be asked to end, and takes the other with it.
    processes = [
        stack.enter_context(started([*command, str(rank)], **one_thread))
        for rank in reversed(range(RANKS))
    ]
    return Way("torch_ddp", *reversed(processes))


def jax(python: str, name: str, devices: int, stack: ExitStack) -> Way:
    command = [python, str(PEERS / "jax_step.py"), "--model", name, "--devices", str(devices)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    process = stack.enter_context(started(command, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))
    return Way(f"jax_{devices}", process)


# --- measuring ------------------------------------------------------------------------------------


def measured(name: str, rounds: int, torch_python: str | None, jax_python: str | None) -> Report:
    """One row."""
    with ExitStack() as stack:
        ways = ours(name, stack)
        if torch_python is not None:
            ways.append(torch_ddp(torch_python, name, stack))
        if jax_python is not None:
            ways += [jax(jax_python, name, devices, stack) for devices in (RANKS, 1)]
        peers = [way for way in ways if way.name.startswith(("torch", "jax"))]
        check([ways[0], *peers])
        for way in ways:
            way.seconds(WARM_UP)
            way.cpu_seconds = 0.0
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        for number in range(rounds):
            for way in random.Random(number).sample(ways, len(ways)):
                seconds[way.name].append(way.seconds(STEPS))
    row: Report = {"benchmark": "step", "job": f"{name}, dp {RANKS}", "rounds": rounds}
    for way in ways:
        row[f"{way.name}_ms"] = round(statistics.median(seconds[way.name]) * 1e3, 1)
    for way in peers:
        ratios = map(truediv, seconds["ours"], seconds[way.name])
        row[f"ours_over_{way.name}"] = round(statistics.median(ratios), 3)
    for way in ways:
        row[f"{way.name}_cpu_ms"] = round(way.cpu_seconds / (rounds * STEPS) * 1e3, 1)
    products = next(way for way in ways if way.name == "products")
    for way in ways:
        if way.name.startswith("ours"):
            shares = map(truediv, seconds[way.name], seconds["products"])
            row[f"{way.name}_over_products"] = round(statistics.median(shares), 3)
            row[f"{way.name}_over_products_cpu"] = round(way.cpu_seconds / products.cpu_seconds, 3)
    row["blas"] = describe()
    row |= {f"{way.name}_version": way.about["version"] for way in peers}
    row["load_average"] = round(os.getloadavg()[0], 1)
    return row


def check(ways: list[Way]) -> None:
    """All must train the same model: as many parameters, and the loss of an untrained one."""
    expected = ways[0].about
    for way in ways[1:]:
        if way.about["parameters"] != expected["parameters"]:
            sys.exit(f"{way.name} trains another model: {way.about}, ours {expected}")
        if abs(way.about["loss"] - expected["loss"]) > 0.1:
            sys.exit(f"{way.name} starts with another loss: {way.about}, ours {expected}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--job", action="append", choices=JOBS, help="only this job; repeatable")
    for name in ("torch", "jax"):
        parser.add_argument(
            f"--{name}-python",
            default=os.environ.get(f"PLANCOMPILER_{name.upper()}_PYTHON"),
            help=f"the interpreter of an environment with {name}",
        )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        name, _, products = options.serve.partition(" ")
        (serve_products if products else serve)(name)
        return
    for name in ("torch", "jax"):
        if getattr(options, f"{name}_python") is None:
            print(f"without --{name}-python: no figures of {name}", file=sys.stderr)
    for name in options.job or JOBS:
        print(
            json.dumps(measured(name, options.rounds, options.torch_python, options.jax_python)),
            flush=True,
        )


if __name__ == "__main__":
    main()
