"""The wire `unix` connects the ranks of a world: communicators stand on it as on any other."""

from __future__ import annotations

import os
import threading

from plancompiler.eager.transports import open_world
from plancompiler.engines.launch_variables import Launched
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.ir import DType
from tests.comm import suite


def test_the_suite_of_communicators(monkeypatch) -> None:
    monkeypatch.setattr(suite, "DTYPES", (DType.FLOAT32,))
    proved: list[int] = []

    def rank(number: int) -> None:
        launched = Launched(None, number, suite.RANKS, f"a run of {os.getpid()}")
        comm = CommContextManager(open_world("unix", launched, 60.0, 60.0, {}))
        proved.append(suite.run(comm))
        comm.context(range(suite.RANKS)).barrier()
        comm.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(suite.RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(proved) == suite.RANKS
    assert min(proved) > 50
