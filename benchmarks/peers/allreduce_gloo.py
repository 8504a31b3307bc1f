"""all_reduce of float32 between two processes with torch.distributed over gloo.

Arguments: MIB STORE SECONDS, with the path of a file that is not there yet. Prints the median time
of one call in ms.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.queues import Queue

import torch
import torch.distributed as dist

RANKS = 2
BATCH = 5
MIN_BATCHES = 3


def measure(rank: int, size_mib: int, store: str, seconds: float, queue: Queue[float]) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    values = torch.zeros(size_mib << 18, dtype=torch.float32)
    dist.all_reduce(values)
    times = []
    end = time.perf_counter() + seconds
    more = torch.ones(1)
    while True:
        # Rank 0 says whether to go on.
        more[0] = float(len(times) < MIN_BATCHES or time.perf_counter() < end)
        dist.broadcast(more, 0)
        if not more[0]:
            break
        start = time.perf_counter()
        for _ in range(BATCH):
            dist.all_reduce(values)
        times.append((time.perf_counter() - start) / BATCH)
    if rank == 0:
        queue.put(statistics.median(times) * 1e3)
    dist.destroy_process_group()


def main(size_mib: int, store: str, seconds: float) -> None:
    """Measure and print."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=measure, args=(rank, size_mib, store, seconds, queue))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    print(queue.get())
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
