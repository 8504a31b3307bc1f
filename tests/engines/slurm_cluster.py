"""A cluster of Slurm in a folder of the test's: two nodes, on one host or two, with munge."""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from plancompiler.engines.guard import Guard
from plancompiler.executor.process_status import own_processes, process_environment
from tests.engines.hosts import Hosts

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}({addresses[0]})
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr={addresses[0]} Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr={addresses[1]} Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
WAIT = 60


@functools.cache
def guard() -> Guard:
    """Ends what the tests of this process serve, however the process ends."""
    return Guard(5.0)


@contextmanager
def slurm_cluster(folder: Path, hosts: Hosts | None = None) -> Iterator[dict[str, str]]:
    """The variables with which its commands find it. With hosts, a node is on each."""
    missing = [each for each in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(each)]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    if os.getuid() != 0:
        pytest.skip("only root starts the daemons of Slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in free]
    configuration = folder / "slurm.conf"
    host = socket.gethostname()
    addresses = ("127.0.0.1", "127.0.0.1") if hosts is None else hosts.addresses
    configuration.write_text(
        CONFIGURATION.format(folder=folder, host=host, addresses=addresses, ports=ports)
    )
    environment = {"SLURM_CONF": str(configuration)}
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{name}={folder / file}" for name, file in files.items()]
    daemons = [
        (0, ["munged", "-F", "--force", *options]),
        (0, ["slurmctld", "-D"]),
        (0, ["slurmd", "-D", "-N", "n1"]),
        (1, ["slurmd", "-D", "-N", "n2"]),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, (node, command) in enumerate(daemons):
            with (folder / f"{number}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command if hosts is None else hosts.on(node, command),
                        env={**os.environ, **environment},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
                guard().add(started[-1].pid)
            if command[0] == "munged":
                until = time.monotonic() + WAIT
                while not (folder / "munge.socket").exists() and time.monotonic() < until:
                    assert started[0].poll() is None, (folder / "0.log").read_text()
                    time.sleep(0.02)
        _await_nodes(environment, folder, hosts)
        yield environment
    finally:
        for each in reversed(started):
            each.terminate()
        for each in started:
            each.wait(WAIT)
        for pid in own_processes():  # those that slurmd starts beside a step's ranks outlive it
            if environment.items() <= (process_environment(pid) or {}).items():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@functools.cache
def slurm_variables() -> dict[str, str]:
    """Those of a cluster that ends with this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return stack.enter_context(slurm_cluster(Path(folder)))


def _await_nodes(environment: dict[str, str], folder: Path, hosts: Hosts | None) -> None:
    """Return when both nodes take jobs."""
    until = time.monotonic() + WAIT
    said = ""
    while time.monotonic() < until:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        if hosts is not None:
            command = hosts.on(0, command)
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        if said.split() == ["idle", "idle"]:
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    raise AssertionError(f"the nodes of Slurm do not take jobs: {said}\n{logs}")
