"""What is left of a world that is closed: contexts say so, and a new world works."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.eager.transports import ADDRESSES
from plancompiler.errors import TransportError

PAIR = pc.Placement("cpu", [0, 1])


@pytest.mark.parametrize("check", ["0", "1"])
def test_contexts_of_a_closed_world_say_so(check, monkeypatch):
    monkeypatch.setenv("PLANCOMPILER_COMM_CHECK", check)

    def rank():
        comm = pc.eager.current_world().comm
        group = comm.context((0, 1))
        stream = comm.context((0, 1), on_compute_stream=False)
        total = stream.all_reduce(np.ones(2))  # the stream ends when this has
        x = pc.tensor(np.arange(4.0), PAIR, "S(0)")
        comm.context((comm.rank,)).barrier()
        x.numpy()
        return comm, group, stream, x, total

    large = np.zeros(1 << 20)
    for comm, group, stream, x, total in spawn(rank, 2):
        assert total.wait().tolist() == [2.0, 2.0]
        for use in (
            lambda group=group: group.all_reduce(np.ones(2)),
            lambda group=group: group.all_reduce(large),
            lambda group=group: group.send(large, 1 - group.rank),
            lambda stream=stream: stream.barrier(),
            lambda comm=comm: comm.context((0, 1)),
            lambda comm=comm: comm.context((0, 1), on_compute_stream=False),
            x.numpy,
            lambda x=x: x.redistribute(sbp="B"),
        ):
            with pytest.raises(TransportError, match="the world is closed") as raised:
                use()
            assert raised.value.report.got is not None
        with pytest.raises(TransportError) as raised:
            group.all_gather(np.ones(2))
        assert (raised.value.report.op, "test_closed.py") == (
            "all_gather",
            Path(str(raised.value.report.source).partition(":")[0]).name,
        )
        comm.close()  # again


SCRIPT = """
import os, sys
import numpy as np
import pytest
import plancompiler as pc
from plancompiler.errors import ShapeError, TransportError, UsageError

def once():
    world = pc.init(deadline=30.0)
    assert pc.init() is world
    group = world.comm.context((0, 1))
    swapped = np.ones(2, np.dtype(np.float32).newbyteorder("S"))
    assert group.all_reduce(swapped).tolist() == [2.0, 2.0]
    x = pc.tensor(np.arange(5.0), pc.Placement("cpu", [0, 1]), "S(0)")
    assert x.sum().item() == 10.0
    return world, group, x

world, group, x = once()
with pytest.raises(TransportError, match="different calls") as raised:
    group.all_gather(np.ones(2)) if world.rank else group.all_reduce(np.ones(2))
assert raised.value.report.op == ("all_gather" if world.rank else "all_reduce")
with pytest.raises(TransportError, match="rank 1: all_reduce max.*script.py:"):
    os.environ["PLANCOMPILER_COMM_CHECK"] = "1"
    checked = world.comm.context((1, 0))
    checked.all_reduce(np.ones(2), "max" if world.rank else "sum")
with pytest.raises(ShapeError, match="one shape"):
    group.all_reduce(np.ones(1 + world.rank))
group.barrier()
world.close()
for use in (group.barrier, x.numpy, lambda: group.send(np.ones(1), 1 - world.rank)):
    with pytest.raises(TransportError, match="the world is closed"):
        use()
with pytest.raises(UsageError, match="has closed its world"):
    pc.init()

def another():
    x = pc.tensor(np.arange(5.0), pc.Placement("cpu", [0, 1, 2]), "S(0)")
    return (x * 2.0).sum().item()

for _ in range(2):
    assert pc.eager.spawn(another, 3) == [20.0] * 3
sys.stdout.write("done\\n")
"""


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["host", "grpc"])
def test_processes_after_mistakes_and_after_their_world(transport, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    environment = {
        **os.environ,
        "PLANCOMPILER_WORLD_TRANSPORT": transport,
        ADDRESSES: ",".join(f"127.0.0.1:{port}" for port in ports),
    }
    command = [sys.executable, "-m", "plancompiler", "launch", "-n", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"] * 2
