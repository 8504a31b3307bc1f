"""The engine `dask`: a task per rank, each on a worker of its own, keeps the rank's agent."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from plancompiler.cluster.call_apart import call_apart
from plancompiler.engines.agent_host import run_agent
from plancompiler.engines.hosted import Engine, working_folder
from plancompiler.errors import EngineError, UsageError

ADDRESS = "DASK_SCHEDULER_ADDRESS"
"""Where Dask's own tools look for a scheduler."""


class Dask(Engine):
    """The scheduler that `DASK_SCHEDULER_ADDRESS` names, or a cluster on this host for the run."""

    name = "dask"

    def __init__(self, words: Sequence[str], _say: Callable[[str], None]) -> None:
        if words:
            raise UsageError("the engine dask takes no options", got=" ".join(words))
        try:
            self._distributed: Any = importlib.import_module("distributed")
        except ImportError:
            raise EngineError(
                "the engine dask is not installed",
                got="no module distributed",
                hint='pip install "dask[distributed]", in the environment of plancompiler on all '
                "workers",
            ) from None
        self._cluster: Any = None
        self._client: Any = None
        self._runs: dict[str, Any] = {}

    def start(
        self, ranks: int, command: Sequence[str], variables: Sequence[Mapping[str, str]]
    ) -> None:
        address = os.environ.get(ADDRESS)
        if not address:
            self._cluster = call_apart(partial(self._open_cluster, ranks))
        try:
            self._client = self._distributed.Client(self._cluster or address)
        except OSError as error:
            raise EngineError(
                "no scheduler of Dask answers", got=f"{ADDRESS}={address}: {error}"
            ) from None
        workers = sorted(self._workers())
        if len(workers) < ranks:
            raise EngineError(
                "Dask's cluster can never start so many ranks",
                got=f"{ranks} ranks, {len(workers)} workers",
                expected="a worker for each rank",
                hint="start fewer ranks, or more workers with dask worker",
            )
        for worker, own in zip(workers, variables, strict=False):
            self._runs[worker] = self._client.submit(
                run_agent,
                list(command),
                dict(own),
                working_folder(),
                workers=[worker],
                allow_other_workers=False,
                pure=False,
                retries=0,
            )

    def _open_cluster(self, ranks: int) -> Any:
        # Ctrl-C at a terminal is for all processes there; those of Dask would end by it, each with
        # a traceback. They block what the thread blocks that starts them; multiprocessing, where it
        # starts its tracker there, would allow it again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return self._distributed.LocalCluster(
            n_workers=ranks,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        )

    def _workers(self) -> Sequence[str]:
        # Not by `scheduler_info`: what it returns may be the answer to the client's own regular
        # request for totals, in which no worker is named.
        return list(call_apart(self._client.nthreads))

    def ended(self) -> str | None:
        return next(iter(self.lost().values()), None)

    def lost(self) -> Mapping[int, str]:
        if self._client is None:
            return {}
        here = set(self._workers())
        lost = {}
        for rank, (worker, run) in enumerate(self._runs.items()):
            if run.done():
                error = run.exception() if run.status != "finished" else None
                lost[rank] = f"its agent ended: {run.result() if error is None else error}"
            elif worker not in here:
                lost[rank] = f"its worker {worker} is gone"
        return lost

    def end(self) -> None:
        if self._client is not None:
            self._client.cancel(list(self._runs.values()), force=True)
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()
        self._runs, self._client, self._cluster = {}, None, None
