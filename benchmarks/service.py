"""A master that serves many clients: throughput, latency, and what the master's process holds.

    python -m benchmarks.service [--clients 1000] [--jobs 10000] [--ranks 2] [--journal] [--write]

Starts a master and `--ranks` workers as processes. First, jobs of one rank and one step go through
the idle master one after another: the time from `submit()` to the first output, with jobs that
nobody has compiled before and then with plans from the cache. Then so many clients connect, each
over a connection of its own, and all at the same time submit their share of the jobs, one job after
another, and read each to its end; memory and open descriptors of the master are read from /proc
every second. `--write` puts the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import plancompiler as pc
from benchmarks.light_client import LightClient
from plancompiler.cluster.token import find_credential
from plancompiler.engines.local import LocalLauncher, LocalRank
from plancompiler.plan.job_serde import job_to_bytes
from plancompiler.running.client import Client
from plancompiler.running.worker_processes import WorkerProcesses

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
SINGLE_JOBS = 100
CONNECTING = 50
"""Clients that sign in at the same time."""
MOMENTS = (10, 30, 50, 70, 90)
"""Per cent of the time at which the master is looked at."""


def short_job(width: int) -> pc.Job:
    """One rank, one step; jobs of different widths have different plans."""
    mesh = pc.Placement("cpu", [0])
    with pc.job(f"short{width}") as job:
        x = pc.full((width, 8), 0.5, "float32", mesh)
        pc.output("sum", (x * 2.0).sum())
    return job


def first_output(client: Client, job: pc.Job) -> float:
    """Seconds from `submit` to the first step's outputs; waits for the job's end."""
    begin = time.perf_counter()
    with client.submit(job, 1) as handle:
        next(handle)
        seconds = time.perf_counter() - begin
        handle.result()
    return seconds


def quantile(seconds: list[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def latencies(seconds: list[float]) -> str:
    """The median and the 99th percentile."""
    return f"{quantile(seconds, 0.5):,.0f} ms | {quantile(seconds, 0.99):,.0f} ms"


class Held:
    """What a process holds, read every second in a thread."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._stop = threading.Event()
        self.readings: list[tuple[float, int]] = []
        """MiB of memory, descriptors."""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            status = (self._folder / "status").read_text()
            resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
            self.readings.append((resident, len(list((self._folder / "fd").iterdir()))))
            if self._stop.wait(1.0):
                return

    def stop(self) -> list[tuple[float, int]]:
        """Read no more; what was read at `MOMENTS`."""
        self._stop.set()
        self._thread.join()
        return [self.readings[len(self.readings) * moment // 100] for moment in MOMENTS]


def processor_seconds(pid: int) -> float:
    """That a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Crowd:
    """What many clients saw."""

    seconds: float
    """Of all jobs together."""
    to_first: list[float]
    """Seconds from each job's submission to its first output,"""
    from_turn: list[float]
    """and from the job's turn to that."""
    held: list[tuple[float, int]]
    """The master's memory and descriptors, at `MOMENTS`,"""
    after: tuple[float, int]
    """and when the clients had gone."""
    processor: tuple[float, float]
    """Seconds that the master and all workers used."""


async def run_crowd(
    address: str, master: int, workers: list[int], clients: int, jobs: int
) -> Crowd:
    """Let so many clients share the jobs."""
    credential, data = find_credential(address), job_to_bytes(short_job(8))
    few = asyncio.Semaphore(CONNECTING)

    async def connect() -> LightClient:
        async with few:
            return await LightClient.connect(address, credential)

    opened = await asyncio.gather(*(connect() for _ in range(clients)))

    async def share(client: LightClient, count: int) -> list[tuple[float, float]]:
        return [await client.run(data) for _ in range(count)]

    counts = [jobs // clients + (each < jobs % clients) for each in range(clients)]
    used = [processor_seconds(pid) for pid in (master, *workers)]
    held = Held(master)
    begin = time.perf_counter()
    try:
        rows = await asyncio.gather(*map(share, opened, counts))
        seconds = time.perf_counter() - begin
    finally:
        readings = held.stop()
        await asyncio.gather(*(client.close() for client in opened))
    used = [
        processor_seconds(pid) - before
        for pid, before in zip((master, *workers), used, strict=True)
    ]
    to_first, from_turn = zip(*(pair for row in rows for pair in row), strict=True)
    await asyncio.sleep(1.0)
    last = Held(master)
    last.stop()
    return Crowd(
        *(seconds, list(to_first), list(from_turn)),
        *(readings, last.readings[-1], (used[0], sum(used[1:]))),
    )


@contextmanager
def cluster(ranks: int, with_journal: bool) -> Iterator[tuple[str, int, list[int]]]:
    """The address of a master, its process and those of its workers."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--listen", "127.0.0.1:0", "--ranks", str(ranks), "--json"]
        if with_journal:
            words += ["--journal", f"{folder}/journal"]
        master = subprocess.Popen(
            [sys.executable, "-m", "plancompiler", "master", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert master.stdout is not None
            address = json.loads(master.stdout.readline())["address"]
            launcher = LocalLauncher(os.environ, subprocess.DEVNULL)
            workers = WorkerProcesses(launcher, address, None, ranks)
            try:
                ranks_here = [each for each in workers.started if isinstance(each, LocalRank)]
                yield address, master.pid, [each.process.pid for each in ranks_here]
            finally:
                workers.close()
        finally:
            master.terminate()
            master.communicate()


def measure(ranks: int, with_journal: bool, clients: int, jobs: int) -> str:
    """All figures, as a table."""
    with cluster(ranks, with_journal) as (address, master, workers):
        with Client(address) as client:
            first_output(client, short_job(7))  # waits for the workers, and imports
            fresh = [first_output(client, short_job(8 + each)) for each in range(SINGLE_JOBS)]
            cached = [first_output(client, short_job(8)) for _ in range(SINGLE_JOBS)]
        crowd = asyncio.run(run_crowd(address, master, workers, clients, jobs))
    many = f"{clients:,} clients, {jobs:,} jobs"
    rows = [
        "| what | median | 99 % within |",
        "|---|---|---|",
        f"| idle master, a new job: `submit()` to its first output | {latencies(fresh)} |",
        f"| idle master, cached plan: the same | {latencies(cached)} |",
        f"| {many}: submission to the first output | {latencies(crowd.to_first)} |",
        f"| {many}: the job's turn to its first output | {latencies(crowd.from_turn)} |",
        "",
        f"| the master at | {' | '.join(f'{each} %' for each in MOMENTS)} | the end |",
        f"|---|{'---|' * (len(MOMENTS) + 1)}",
        "| memory, MiB | "
        + " | ".join(f"{resident:.0f}" for resident, _ in (*crowd.held, crowd.after))
        + " |",
        "| open descriptors | "
        + " | ".join(f"{count:,}" for _, count in (*crowd.held, crowd.after))
        + " |",
    ]
    per_job = [1e3 * each / jobs for each in crowd.processor]
    note = (
        f"{jobs:,} jobs of {clients:,} clients on {ranks} ranks"
        f"{', with a journal' if with_journal else ''}: {jobs / crowd.seconds:,.0f} jobs per "
        f"second in {crowd.seconds:,.0f} s; a job takes {per_job[0]:.1f} ms of the master's "
        f"processor time and {per_job[1]:.1f} ms of its worker's. Load average of the machine, "
        f"{os.cpu_count()} cores, at the end: {os.getloadavg()[0]:.0f}."
    )
    return "\n".join((*rows, "", note))


def write(table: str) -> None:
    """Put the table between its marks on the page."""
    text = PAGE.read_text()
    marked = re.search(r"<!-- service -->.*?<!-- end -->", text, flags=re.S)
    if marked is None:
        sys.exit(f"{PAGE} has no place for it")
    inside = f"<!-- service -->\n{table}\n<!-- end -->"
    PAGE.write_text(text[: marked.start()] + inside + text[marked.end() :])


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--journal", action="store_true")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    table = measure(options.ranks, options.journal, options.clients, options.jobs)
    print(table)
    if options.write:
        write(table)


if __name__ == "__main__":
    main()
