"""Worker processes of a master on this machine."""

from __future__ import annotations

import os
import subprocess

from plancompiler.engines.local import LocalLauncher, LocalRank
from plancompiler.running.worker_processes import WorkerProcesses


class LocalWorkers(WorkerProcesses):
    """They find the master's secret where all processes of its user do."""

    def __init__(self, address: str, count: int) -> None:
        super().__init__(LocalLauncher(os.environ, subprocess.DEVNULL), address, None, count)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [each.process.pid for each in self.started if isinstance(each, LocalRank)]
