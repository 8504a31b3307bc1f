"""`pc.compile` between hosts: ranks that share no memory, with the bits of ranks that do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from plancompiler.eager.transports import ADDRESSES, TRANSPORT
from plancompiler.executor.host_identity import HOST_VARIABLE

WAIT = 100

SCRIPT = f"""
import os
import sys
import numpy as np
import plancompiler as pc
from plancompiler import nn

hosts, broken = sys.argv[1], sys.argv[2:]
world = pc.init(deadline=60.0)
if hosts != "one":
    os.environ["{HOST_VARIABLE}"] = hosts[world.rank]
mesh = pc.Placement("cpu", list(range(world.size)))
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).place(mesh)
optimizer = pc.optim.AdamW(lr=0.05)
# Every rank reads the parts of the others, which are changed between steps, too.
parts = pc.tensor(np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3), mesh, "S(0)")


@pc.compile
def step(x, y):
    loss = pc.cross_entropy(net(x) + parts.redistribute(sbp="B").sum(0), y)
    with pc.no_grad():
        parts.copy_((parts * 0.5).redistribute(sbp="S(0)"))
    optimizer.minimize(loss)
    return loss


rng = np.random.default_rng(0)
losses = []
for turn in range(6):
    x = pc.tensor(rng.normal(size=(9, 5)).astype(np.float32), mesh, "S(0)")
    y = pc.tensor(rng.integers(0, 3, 9), mesh, "S(0)")
    losses.append(step(x, y).item())
    with pc.no_grad():
        parts.copy_(parts + float(turn))
    if broken and turn == 2 and world.rank == 1:
        raise ValueError("broken on purpose")
sys.stdout.write(" ".join(loss.hex() for loss in losses) + "\\n")
sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("hosts") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def wanted(script):
    """What two ranks say that share memory."""
    return losses_of(run(script, 2, "one"), 2)


def run(script, ranks, hosts, *arguments, transport="host", command=()):
    environment = {**os.environ, TRANSPORT: transport, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(ranks)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    environment[ADDRESSES] = ",".join(f"127.0.0.1:{port}" for port in ports)
    command = command or [sys.executable, "-m", "plancompiler", "launch", "-n", str(ranks)]
    return subprocess.run(
        [*command, str(script), hosts, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT,
        env=environment,
    )


def losses_of(done, ranks):
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == ranks
    assert len(set(lines)) == 1
    return lines[0]


@pytest.mark.processes
def test_losses_over_streams_are_those_of_shared_memory(script, wanted):
    assert len(set(wanted.split())) == 6
    assert losses_of(run(script, 2, "ab", transport="grpc"), 2) == wanted


@pytest.mark.processes
def test_some_ranks_share_memory_and_some_do_not(script):
    losses = losses_of(run(script, 3, "aba", transport="grpc"), 3)
    assert losses == losses_of(run(script, 3, "one"), 3)


@pytest.mark.processes
def test_losses_over_mpi_are_those_of_shared_memory(script, wanted):
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if importlib.util.find_spec("mpi4py") is None or mpiexec is None:
        pytest.skip("mpi4py or mpiexec is not installed: the extra `mpi`")
    command = [mpiexec, "-n", "2", sys.executable]
    assert losses_of(run(script, 2, "ab", transport="mpi", command=command), 2) == wanted


@pytest.mark.processes
def test_a_rank_that_fails_ends_the_others(script):
    done = run(script, 2, "ab", "broken", transport="grpc")
    assert done.returncode != 0
    assert "broken on purpose" in done.stderr
    assert not done.stdout


@pytest.mark.processes
def test_a_world_of_one_host_says_so(script):
    done = run(script, 2, "ab")
    assert done.returncode != 0
    assert "start the world with the transport grpc or mpi" in done.stderr
