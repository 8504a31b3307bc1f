"""MPI_Allreduce of float32 in place, by mpi4py: `mpiexec -n 2 python` this, MIB SECONDS.

Rank 0 prints the median time of one call in ms.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

BATCH = 10
MIN_BATCHES = 3


def main(size_mib: int, seconds: float) -> None:
    """Measure and print."""
    comm = MPI.COMM_WORLD
    source = np.ones(size_mib << 18, np.float32)
    target = np.empty_like(source)
    comm.Allreduce(source, target)
    times = []
    end = time.perf_counter() + seconds
    while comm.bcast(len(times) < MIN_BATCHES or time.perf_counter() < end):
        start = time.perf_counter()
        for _ in range(BATCH):
            comm.Allreduce(source, target)
        times.append((time.perf_counter() - start) / BATCH)
    if comm.rank == 0:
        print(statistics.median(times) * 1e3)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
