"""A master that serves many clients: throughput, latency, and what the master's process holds.

    python -m benchmarks.service [--clients 1000] [--jobs 10000] [--ranks 2] [--journal]

Starts a master and `--ranks` workers as processes, and connects so many clients. First, jobs of
one rank and one step go through the idle master one after another: the time from `submit()` to the
first output, once with jobs that nobody has compiled before and then with plans from the cache.
Then each client submits its share of the jobs one after another, all clients at the same time;
memory and open descriptors of the master are read from /proc every second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import plancompiler as pc
from plancompiler.running.client import Client
from plancompiler.running.worker_processes import WorkerProcesses

SINGLE_JOBS = 40
QUANTILES = (0.5, 0.99)


def short_job(width: int) -> pc.Job:
    """One rank, one step; jobs of different widths have different plans."""
    mesh = pc.Placement("cpu", [0])
    with pc.job(f"short{width}") as job:
        x = pc.full((width, 8), 0.5, "float32", mesh)
        pc.output("sum", (x * 2.0).sum())
    return job


def first_output(client: Client, job: pc.Job) -> float:
    """Seconds from `submit` to the first step's outputs."""
    begin = time.perf_counter()
    with client.submit(job, 1) as handle:
        next(handle)
        return time.perf_counter() - begin


def milliseconds(seconds: list[float]) -> str:
    """The median and the 99th percentile."""
    ordered = sorted(seconds)
    parts = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES)
    return " / ".join(f"{1e3 * part:,.0f}" for part in parts)


class Held:
    """What a process holds, read every second in a thread."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._stop = threading.Event()
        self.readings: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            status = (self._folder / "status").read_text()
            resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
            self.readings.append((resident, len(list((self._folder / "fd").iterdir()))))
            if self._stop.wait(1.0):
                return

    def stop(self) -> None:
        """Read no more."""
        self._stop.set()
        self._thread.join()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--journal", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--listen", "127.0.0.1:0", "--ranks", str(options.ranks), "--json"]
        if options.journal:
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
            workers = WorkerProcesses(address, options.ranks)
            try:
                measure(address, master.pid, options.clients, options.jobs)
            finally:
                workers.close()
        finally:
            master.terminate()
            master.communicate()


def measure(address: str, pid: int, clients: int, jobs: int) -> None:
    """All figures."""
    with Client(address) as client:
        first_output(client, short_job(7))  # waits for the workers, and imports
        fresh = [first_output(client, short_job(8 + each)) for each in range(SINGLE_JOBS)]
        cached = [first_output(client, short_job(8)) for _ in range(SINGLE_JOBS)]
    print(f"idle master, median / p99 ms to the first output: {milliseconds(fresh)}", flush=True)
    print(f"the same with cached plans: {milliseconds(cached)}", flush=True)
    job = short_job(8)
    opened = [Client(address) for _ in range(clients)]
    share = jobs // clients
    held = Held(pid)
    begin = time.perf_counter()
    try:
        with ThreadPoolExecutor(clients) as pool:
            latencies = list(
                pool.map(lambda each: [first_output(each, job) for _ in range(share)], opened)
            )
        seconds = time.perf_counter() - begin
    finally:
        held.stop()
        for each in opened:
            each.close()
    of_all = [one for row in latencies for one in row]
    print(
        f"{clients:,} clients, {len(of_all):,} jobs: {len(of_all) / seconds:,.0f} jobs per second; "
        f"median / p99 ms from submit to the first output: {milliseconds(of_all)}"
    )
    tenths = [held.readings[len(held.readings) * tenth // 10] for tenth in range(1, 10, 2)]
    print(
        "master's memory in MiB and descriptors, at 10, 30, 50, 70, 90 % of the time: "
        + ", ".join(f"{resident:.0f} / {files}" for resident, files in tenths)
        + f" (median {statistics.median(each[0] for each in held.readings):.0f})"
    )


if __name__ == "__main__":
    main()
