"""Two hosts, and the cable between them cut: who is lost is named, and nothing is left."""

from __future__ import annotations

import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from plancompiler.executor.process_status import process_environment
from tests.cli.test_processes import await_end
from tests.engines.hosts import Hosts, two_hosts
from tests.engines.installed import (
    RAY,
    WAIT,
    Installed,
    local,
    our_processes,
    python_of,
    start_service,
)
from tests.engines.jobs import MLP, STEPS, await_steps, losses_of, worker_of
from tests.engines.slurm_cluster import slurm_cluster
from tests.launched_scripts import await_ranks

pytestmark = [pytest.mark.processes, pytest.mark.engines]
TRUSTED = {"PLANCOMPILER_WORLD_INSECURE": "1", "PLANCOMPILER_WORLD_TOKEN": "a secret of this test"}
ENDLESS = ("--steps", 1_000_000)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def start(
    hosts: Hosts, host: int, command: list[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        hosts.on(host, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=local().variables() | TRUSTED | (variables or {}),
        start_new_session=True,
    )


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """None of these is left after the block."""
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.communicate()


def plancompiler(*words: object) -> list[str]:
    return [local().python, "-m", "plancompiler", *map(str, words)]


def on_both(
    hosts: Hosts, command: str, *words: object
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """The same command started on both hosts: a script with --nnodes, a job by variables."""
    port = 29400
    if command == "launch":
        options = ["--nnodes", 2, "--rdzv-endpoint", f"{hosts.addresses[0]}:{port}", "-n", 1]
        told: list[dict[str, str]] = [{}, {}]
    else:
        options = []
        rendezvous = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": str(port),
        }
        told = [rendezvous | {"RANK": str(rank)} for rank in (0, 1)]
    first, second = (
        start(hosts, host, plancompiler(command, *options, *words), told[host]) for host in (0, 1)
    )
    return first, second


def test_a_script_gives_equal_bits_on_two_hosts(hosts: Hosts, line: Path) -> None:
    nodes = on_both(hosts, "launch", line)
    with ended(*nodes):
        said = [each.communicate(timeout=WAIT) for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0], said
    assert "".join(out for out, _ in said) == local().run("launch", "-n", 2, line).stdout


def test_a_job_gives_equal_bits_on_two_hosts(hosts: Hosts, losses: list[float]) -> None:
    nodes = on_both(hosts, "run", *MLP, "--steps", STEPS)
    with ended(*nodes):
        (said, errors), (_, others) = [each.communicate(timeout=WAIT) for each in nodes]
    done = subprocess.CompletedProcess(nodes[0].args, nodes[0].returncode, said, errors)
    assert losses_of(done) == losses
    assert nodes[1].returncode == 0, others


@pytest.mark.parametrize("command", ["launch", "run"])
def test_a_cut_between_two_hosts(
    hosts: Hosts, troubled: Path, command: str, record_property
) -> None:
    words = [troubled] if command == "launch" else [*MLP, *ENDLESS]
    nodes = on_both(hosts, command, *words)
    with ended(*nodes):
        if command == "launch":
            await_ranks(nodes[0], 2)
        else:
            await_steps(nodes[0], 1)
        hosts.cut()
        begin = time.monotonic()
        errors = [each.communicate(timeout=WAIT)[1] for each in nodes]
        await_end(our_processes())
        record_property(f"seconds_from_a_cut_to_the_end_of_{command}", time.monotonic() - begin)
    assert [each.returncode for each in nodes] == [1, 1], errors
    assert "on rank 1" in errors[0].splitlines()[-1]
    assert "the host that leads the run is gone" in errors[1].splitlines()[-1]


def test_a_cut_between_a_master_and_a_worker(
    hosts: Hosts, losses: list[float], tmp_path: Path, record_property
) -> None:
    """Two workers on two hosts: the same losses, and then the lost one is named to the client."""
    token = tmp_path / "token"
    token.write_text(f"{secrets.token_hex(32)}\n")
    token.chmod(0o600)
    shown = ("--token-file", token)
    listening = ("master", "--listen", f"{hosts.addresses[0]}:0", "--insecure", "--ranks", 2)
    master = start(hosts, 0, plancompiler(*listening, *shown, "--json"))
    with ended(master), ExitStack() as stack:
        assert master.stdout is not None
        address = re.findall(r'"address": "([^"]+)"', master.stdout.readline())[0]
        workers = []
        for host, own in enumerate(hosts.addresses):
            words = ("worker", "--master", address, "--rank", host, *shown)
            workers.append(
                start(hosts, host, plancompiler(*words, "--listen", f"{own}:0", "--insecure"))
            )
            stack.enter_context(ended(workers[-1]))
        submit = ("submit", *MLP, "--master", address, "--ranks", 2, *shown)
        quiet = start(hosts, 0, plancompiler(*submit, "--steps", STEPS))
        with ended(quiet):
            said, errors = quiet.communicate(timeout=WAIT)
        done = subprocess.CompletedProcess(quiet.args, quiet.returncode, said, errors)
        assert losses_of(done) == losses
        client = start(hosts, 0, plancompiler(*submit, *ENDLESS))
        with ended(client):
            await_steps(client, 1)
            hosts.cut()
            begin = time.monotonic()
            _, errors = client.communicate(timeout=WAIT)
            record_property("seconds_from_a_cut_to_its_name_by_a_master", time.monotonic() - begin)
    assert client.returncode == 1
    assert "WorkerLostError" in errors.splitlines()[-1]
    assert "on rank 1" in errors.splitlines()[-1]


@contextmanager
def ray_nodes(hosts: Hosts, _folder: Path) -> Iterator[Installed]:
    """A node on each host, with room for two runs of two ranks, as `slurm_nodes` has."""
    python = python_of("ray")
    ray = str(Path(python).parent / "ray")
    head = f"{hosts.addresses[0]}:6379"
    common = ["--block", "--num-cpus=2", "--object-store-memory=80000000"]
    nodes = (
        ["--head", "--port=6379", "--include-dashboard=false"],
        [f"--address={head}"],
    )
    ends: list[Callable[[], None]] = []
    try:
        for host, address in enumerate(hosts.addresses):
            command = [ray, "start", *common, f"--node-ip-address={address}", *nodes[host]]
            ends.append(start_service(hosts.on(host, command), "Ray runtime started"))
        variables = {**RAY, "RAY_ADDRESS": head}
        options = ("--engine-arg", "STRICT_SPREAD")
        yield Installed("ray", "ray", python, variables, options)
    finally:
        for end in reversed(ends):
            end()


@contextmanager
def slurm_nodes(hosts: Hosts, folder: Path) -> Iterator[Installed]:
    with slurm_cluster(folder, hosts) as variables:
        options = ("--engine-arg", "--nodes=2", "--engine-arg", "--ntasks-per-node=1")
        yield Installed("slurm", "slurm", environment=variables, options=options)
        hosts.mend()  # so that the daemons of both nodes end in order


@pytest.mark.parametrize("nodes", [ray_nodes, slurm_nodes])
def test_a_cut_between_two_nodes_of_a_cluster(
    nodes,
    hosts: Hosts,
    troubled: Path,
    losses: list[float],
    tmp_path: Path,
    record_property,
) -> None:
    """A job gives equal bits on both nodes; then a script and a job run when the cable is cut."""
    reach = ("--address", f"{hosts.addresses[0]}:0")
    with nodes(hosts, tmp_path) as engine:

        def started(*words: object) -> subprocess.Popen[str]:
            name, *rest = words
            return start(hosts, 0, engine.command(name, *reach, *rest), engine.environment)

        quiet = started("run", *MLP, "--ranks", 2, "--steps", STEPS)
        with ended(quiet):
            said, errors = quiet.communicate(timeout=WAIT)
        done = subprocess.CompletedProcess(quiet.args, quiet.returncode, said, errors)
        assert losses_of(done) == losses

        script = started("launch", "-n", 2, troubled)
        with ended(script):
            pids = await_ranks(script, 2)
            job = started("run", *MLP, "--ranks", 2, *ENDLESS)
            with ended(job):
                await_steps(job, 1)
                lost = {"script": rank_on(hosts, pids), "job": rank_on(hosts, workers())}
                hosts.cut()
                begin = time.monotonic()
                last = {}
                for name, each in (("script", script), ("job", job)):
                    last[name] = each.communicate(timeout=WAIT)[1].splitlines()[-1]
                    seconds = time.monotonic() - begin
                    record_property(f"seconds_from_a_cut_to_the_end_{name}_{engine.name}", seconds)
                await_end(our_processes())
    assert (script.returncode, job.returncode) == (1, 1)
    assert re.search(rf"on rank {lost['script']}\. Got: lost: the agent .* is cut", last["script"])
    assert "WorkerLostError" in last["job"]
    assert f"on rank {lost['job']}" in last["job"]


def workers() -> list[int]:
    return [worker_of(rank) for rank in range(2)]


def rank_on(hosts: Hosts, pids: list[int]) -> str:
    """The rank of the process on the second host."""
    (rank,) = (
        (process_environment(pid) or {})["PLANCOMPILER_RANK"]
        for pid in pids
        if hosts.host_of(pid) == 1
    )
    return rank
