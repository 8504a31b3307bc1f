"""Two hosts, and the cable between them cut: who is lost is named, and nothing is left."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plancompiler.executor.process_status import process_environment
from tests.cli.test_processes import await_end
from tests.engines.hosts import Hosts, two_hosts
from tests.engines.installed import RAY, WAIT, local, our_processes, python_of, start_service

pytestmark = [pytest.mark.processes, pytest.mark.engines]
TRUSTED = {"PLANCOMPILER_WORLD_INSECURE": "1", "PLANCOMPILER_WORLD_TOKEN": "a secret of this test"}
RUNS = re.compile(r"^process (\d+) runs$", re.M)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def start(
    hosts: Hosts, host: int, python: str, words: list[object], variables: dict[str, str]
) -> subprocess.Popen[str]:
    command = [python, "-m", "plancompiler", "launch", *map(str, words)]
    return subprocess.Popen(
        hosts.on(host, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=local().variables() | TRUSTED | variables,
        start_new_session=True,
    )


def await_ranks(started: subprocess.Popen[str], count: int) -> list[int]:
    assert started.stdout is not None
    assert started.stderr is not None
    pids: list[int] = []
    while len(pids) < count:
        line = started.stdout.readline()
        assert line, started.stderr.read()
        pids += map(int, RUNS.findall(line))
    return pids


def test_equal_bits_on_two_hosts(hosts: Hosts, line: Path) -> None:
    words: list[object] = ["--nnodes", 2, "--rdzv-endpoint", f"{hosts.addresses[0]}:29400", "-n", 1]
    nodes = [start(hosts, host, local().python, [*words, line], {}) for host in (0, 1)]
    said = [each.communicate(timeout=WAIT) for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0], said
    assert "".join(out for out, _ in said) == local().run("launch", "-n", 2, line).stdout


def test_a_cut_between_two_nodes(hosts: Hosts, troubled: Path, record_property) -> None:
    words: list[object] = ["--nnodes", 2, "--rdzv-endpoint", f"{hosts.addresses[0]}:29400"]
    nodes = [start(hosts, host, local().python, [*words, "-n", 1, troubled], {}) for host in (0, 1)]
    try:
        pids = await_ranks(nodes[0], 2)
        hosts.cut()
        begin = time.monotonic()
        errors = [each.communicate(timeout=WAIT)[1] for each in nodes]
        await_end(pids + our_processes())
        record_property("seconds_from_a_cut_to_the_end_of_two_nodes", time.monotonic() - begin)
    finally:
        for each in nodes:
            each.kill()
            each.communicate()
    assert [each.returncode for each in nodes] == [1, 1]
    assert re.search("on rank 1. Got: lost: the agent .* is cut", errors[0].splitlines()[-1])
    assert "the host that leads the run is gone" in errors[1].splitlines()[-1]


def test_a_cut_between_two_nodes_of_ray(hosts: Hosts, troubled: Path, record_property) -> None:
    python = python_of("ray")
    ray = str(Path(python).parent / "ray")
    quick = {f"RAY_health_check_{name}_ms": "500" for name in ("period", "timeout")}
    quick |= {"RAY_health_check_initial_delay_ms": "500", "RAY_health_check_failure_threshold": "2"}
    head = f"{hosts.addresses[0]}:6379"
    common = ["--block", "--num-cpus=1", "--object-store-memory=80000000"]
    nodes = (
        ["--head", "--port=6379", "--include-dashboard=false"],
        [f"--address={head}"],
    )
    ends = [
        start_service(
            hosts.on(host, [ray, "start", *common, f"--node-ip-address={address}", *options]),
            "Ray runtime started",
            quick,
        )
        for host, (address, options) in enumerate(zip(hosts.addresses, nodes, strict=True))
    ]
    words: list[object] = ["--engine", "ray", "--engine-arg=STRICT_SPREAD", "-n", 2]
    words += ["--address", f"{hosts.addresses[0]}:0", troubled]
    started = start(hosts, 0, python, words, {**RAY, **quick, "RAY_ADDRESS": head})
    try:
        pids = await_ranks(started, 2)
        (lost,) = (
            (process_environment(pid) or {})["PLANCOMPILER_RANK"]
            for pid in pids
            if hosts.host_of(pid) == 1
        )
        hosts.cut()
        begin = time.monotonic()
        _, errors = started.communicate(timeout=WAIT)
        record_property("seconds_from_a_cut_to_the_end_with_ray", time.monotonic() - begin)
        await_end(pids)
    finally:
        started.kill()
        started.communicate()
        for end in reversed(ends):
            end()
    assert started.returncode == 1
    assert f"on rank {lost}. Got: its actor ended: ActorDiedError" in errors.splitlines()[-1]
