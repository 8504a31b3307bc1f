"""Jobs over several hosts: worker processes of this machine that share no memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from plancompiler.errors import SecurityError, WorkerLostError
from plancompiler.executor.host_identity import HOST_VARIABLE
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import Job
from plancompiler.lower.compile import compile_plans
from plancompiler.master.events import Limits
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from plancompiler.worker.agent import run_worker
from tests.cluster.conftest import Workers
from tests.examples import EXAMPLES, TINY_GPT, gpt, mlp

STEPS = 4
WAIT = 60
LIMITS = Limits(workers=WAIT)
"""A worker that does not start must not hold up a test for long."""
PROGRAM = [sys.executable, "-m", "plancompiler"]


@contextmanager
def worker_processes(
    master: str, hosts: Sequence[str], *options: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A worker process for each rank, on the host of this name."""
    with ExitStack() as stack:
        children = []
        for rank, host in enumerate(hosts):
            command = [*PROGRAM, "worker", "--master", master]
            child = subprocess.Popen(
                [*command, "--rank", str(rank), *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, HOST_VARIABLE: host},
            )
            stack.callback(child.communicate, timeout=WAIT)
            stack.callback(child.terminate)
            children.append(child)
        yield children


@contextmanager
def cluster_on(hosts: str) -> Iterator[Client]:
    """A client of a master with workers on these hosts, one letter for each rank."""
    with (
        MasterServer(ranks=len(hosts), limits=LIMITS) as server,
        worker_processes(server.address, hosts),
        Client(server.address) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Of a cluster on the hosts of the parameter."""
    with cluster_on(request.param) as client:
        yield client


def losses(client: Client, job: Job) -> list[float]:
    return [each["loss"] for each in client.submit(job, STEPS)]


@pytest.fixture(scope="module")
def one_host_losses() -> Iterator[Callable[[Job, int], list[float]]]:
    """Runs jobs in worker processes of one host: this process may use another BLAS kernel."""
    with ExitStack() as stack:
        clients: dict[int, Client] = {}

        def run(job: Job, ranks: int) -> list[float]:
            if ranks not in clients:
                clients[ranks] = stack.enter_context(cluster_on("a" * ranks))
            return losses(clients[ranks], job)

        yield run


def local_losses(job: Job, ranks: int) -> list[float]:
    with LocalWorld(compile_plans(job, ranks).plans) as world:
        return [float(world.step({})["loss"]) for _ in range(STEPS)]


JOBS: list[tuple[str, str, Callable[[], Job]]] = [
    ("ab", "mlp dp=2", lambda: mlp(ranks=2)),
    ("ab", "gpt dp=2", lambda: gpt(dp=2)),
    ("ab", "gpt tp=2", lambda: gpt(tp=2)),
    ("ab", "gpt pp=2", lambda: gpt(pp=2, microbatches=4, schedule="1f1b")),
    ("aabb", "gpt dp=2 tp=2", lambda: gpt(dp=2, tp=2)),
    ("aabb", "gpt dp=2 pp=2", lambda: gpt(dp=2, pp=2, microbatches=2, schedule="zero_bubble")),
    ("aaab", "mlp dp=4", lambda: mlp(ranks=4)),
    ("aaab", "gpt dp=2 tp=2", lambda: gpt(dp=2, tp=2)),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("client", "hosts", "build"),
    [pytest.param(hosts, hosts, build, id=f"{name} on {hosts}") for hosts, name, build in JOBS],
    indirect=["client"],
)
def test_losses_are_those_of_one_host(
    client: Client,
    hosts: str,
    build: Callable[[], Job],
    one_host_losses: Callable[[Job, int], list[float]],
) -> None:
    assert losses(client, build()) == one_host_losses(build(), len(hosts))


@pytest.mark.processes
def test_a_killed_worker_is_named() -> None:
    with (
        MasterServer(ranks=2, limits=LIMITS) as server,
        worker_processes(server.address, "ab") as children,
        Client(server.address) as client,
    ):
        handle = client.submit(mlp(ranks=2), 1_000_000)
        next(handle)
        os.kill(children[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError) as caught:
            handle.result()
        assert caught.value.report.rank == 1
        assert children[0].poll() is None


@pytest.mark.processes
def test_listening_beyond_this_machine_needs_more_care() -> None:
    with pytest.raises(SecurityError, match="--insecure"):
        run_worker("127.0.0.1:1", listen="0.0.0.0:0")


def test_a_wildcard_is_announced_as_the_address_towards_the_master(workers: Workers) -> None:
    with MasterServer(ranks=2) as server:
        workers(server.address, host="a", listen="0.0.0.0:0", insecure=True)
        workers(server.address, host="b")
        with Client(server.address) as client:
            over_network = losses(client, mlp(ranks=2))
        assert over_network == local_losses(mlp(ranks=2), 2)
        for worker in workers.started:
            worker.stop()
            assert worker.error is None


# --- two network namespaces -----------------------------------------------------------------------


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=WAIT)


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Two network namespaces with a cable between them: name -> address."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    number = os.getpid()
    names = [f"plancompiler-{number}-{end}" for end in "ab"]
    ends = [f"pc{number}{end}" for end in "ab"]
    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made: {error.stderr.decode().strip()}")
            stack.callback(ip, "netns", "del", name)
        try:
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no virtual cable can be made: {error.stderr.decode().strip()}")
        addresses = {}
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            address = f"10.213.7.{index + 1}"
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            addresses[name] = address
        yield addresses


@pytest.mark.processes
def test_two_network_namespaces(
    namespaces: dict[str, str], one_host_losses: Callable[[Job, int], list[float]]
) -> None:
    (here, own), (there, other) = namespaces.items()

    def start(stack: ExitStack, namespace: str, *arguments: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(child.communicate, timeout=WAIT)
        stack.callback(child.terminate)
        return child

    with ExitStack() as stack:
        master = start(
            stack, here, "master", "--json", "--insecure", "--listen", f"{own}:0", "--ranks", "2"
        )
        assert master.stdout is not None
        address = json.loads(master.stdout.readline())["address"]
        for namespace, listen in ((here, own), (there, other)):
            worker = ("worker", "--master", address, "--listen", f"{listen}:0", "--insecure")
            start(stack, namespace, *worker)
        settings = [f"-D{key}={value}" for key, value in TINY_GPT.items()]
        job = (str(EXAMPLES / "gpt.py"), "-Ddp=2", *settings)
        client = start(
            stack, there, "submit", *job, "--master", address, "--steps", str(STEPS), "--json"
        )
        output, errors = client.communicate(timeout=2 * WAIT)
    assert client.returncode == 0, errors
    assert json.loads(output)["losses"] == one_host_losses(gpt(dp=2), 2)
