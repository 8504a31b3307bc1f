"""A picture of a master at one moment, for its metrics and its page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plancompiler.cluster.messages import ClusterStatus, RankLine
from plancompiler.master.observation import Observation


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is shown."""

    address: str
    now: float
    """Of the clock of the observation."""
    status: ClusterStatus
    observation: Observation
    queue_length: int
    sent_bytes: int
    """To workers, of slices, plans and feeds."""
    held_bytes: Mapping[str, int]
    """What the master keeps in memory for readers, by what it is."""
    refused: Mapping[str, int]
    """Calls that were refused, by status code."""
    errors: tuple[tuple[int, RankLine], ...]
    """The latest lines of jobs' standard error, with their job."""

    @property
    def workers(self) -> Mapping[str, int]:
        """How many ranks have no worker, an idle one and one that works."""
        busy = sum(bool(worker.job_id) for worker in self.status.workers)
        known = len(self.status.workers)
        return {"busy": busy, "idle": known - busy, "missing": self.status.world_size - known}


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_descriptors() -> int:
    """Files, sockets and pipes that this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names alone, many of them
