"""Several hosts: how they meet, restarts with fewer of them, and what contradicts itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from plancompiler.engines.nodes import parse_nodes
from plancompiler.errors import UsageError
from plancompiler.executor.process_status import process_arguments, process_environment
from tests.cli.test_processes import await_end
from tests.engines.installed import WAIT, free_port, local, our_processes

SECRET = {"PLANCOMPILER_WORLD_TOKEN": "a secret of this test's"}

RESTARTED = """
import os, signal, sys
import numpy as np
import plancompiler as pc

world = pc.init()
x = pc.tensor(np.ones((12, 4), np.float32), pc.Placement("cpu", range(world.size)), "S(0)")
total = x.sum().item()
restart = os.environ["PLANCOMPILER_RESTART"]
sys.stdout.write(f"start {restart}: rank {world.rank} of {world.size}: {total}\\n")
sys.stdout.flush()
if restart == "0":
    while True:
        x.sum().item()
"""


SAVING = """
import signal, sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
print("saved", flush=True)
"""


@contextmanager
def nodes(
    count: int, *words: object, ranks: int = 1, endpoint: str | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Hosts of one run, which are told apart by names; they meet on this one."""
    endpoint = endpoint or f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [*local().command("launch")[:4], "--rdzv-endpoint", endpoint, "-n", str(ranks)]
            + [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=local().variables() | SECRET | {"PLANCOMPILER_HOST": f"host {node} of {count}"},
            start_new_session=True,
        )
        for node in range(count)
    ]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


@pytest.mark.processes
@pytest.mark.engines
def test_two_hosts_are_one_world(line: Path) -> None:
    alone = local().run("launch", "-n", 2, line)
    with nodes(2, "--nnodes", 2, line) as started:
        said = [each.communicate(timeout=WAIT) for each in started]
    assert [each.returncode for each in started] == [0, 0], said
    assert "".join(out for out, _ in said) == alone.stdout
    await_end(our_processes())


@pytest.mark.processes
@pytest.mark.engines
def test_a_signal_to_a_host_that_follows_reaches_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "saving.py"
    script.write_text(SAVING)
    with nodes(2, "--nnodes", 2, script) as started:
        leader = lead(started)
        assert leader.stdout is not None
        assert [leader.stdout.readline() for _ in started] == ["ready\n", "ready\n"]
        other = next(each for each in started if each is not leader)
        other.send_signal(signal.SIGUSR1)
        said = [each.communicate(timeout=WAIT) for each in (leader, other)]
    assert [each.returncode for each in started] == [0, 0], said
    assert said[0][0] == "saved\nsaved\n"
    await_end(our_processes())


@pytest.mark.processes
@pytest.mark.engines
def test_a_host_that_is_lost_is_left_out_of_the_next_start(tmp_path: Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    with nodes(3, "--nnodes", "2:3", "--max-restarts", 1, script) as started:
        leader = lead(started)
        assert leader.stdout is not None
        first = [leader.stdout.readline() for _ in range(3)]
        assert all(first), leader.communicate()
        lost = next(each for each in started if each is not leader)
        os.killpg(lost.pid, signal.SIGKILL)
        others = [each for each in started if each is not lost]
        said = [each.communicate(timeout=WAIT) for each in others]
    assert sorted(first) == [f"start 0: rank {rank} of 3: 48.0\n" for rank in range(3)]
    assert [each.returncode for each in others] == [0, 0], said
    lines = sorted("".join(out for out, _ in said).splitlines())
    assert lines == [f"start 1: rank {rank} of 2: 48.0" for rank in range(2)]
    assert re.search(r"restart 1 of 1: .*lost: the agent", "".join(error for _, error in said))
    await_end(our_processes())


@pytest.mark.processes
@pytest.mark.engines
def test_a_host_that_comes_later_is_in_the_next_start(tmp_path: Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    words = ("--nnodes", "2:3", "--max-restarts", 1, script)
    with ExitStack() as stack:
        endpoint = f"127.0.0.1:{free_port()}"
        started = stack.enter_context(nodes(2, *words, endpoint=endpoint))
        leader = lead(started)
        assert leader.stdout is not None
        first = [leader.stdout.readline() for _ in range(2)]
        assert all(first), leader.communicate()
        # It waits: all ranks are told apart by their hosts, and have met without it.
        (late,) = stack.enter_context(nodes(1, *words, endpoint=endpoint))
        (rank,) = (
            pid
            for pid in our_processes()
            if (process_environment(pid) or {}).get("PLANCOMPILER_RANK") == "1"
            and process_arguments(pid)[-1:] == [str(script)]
        )
        os.kill(rank, signal.SIGKILL)
        said = [each.communicate(timeout=WAIT) for each in (*started, late)]
    assert sorted(first) == [f"start 0: rank {rank} of 2: 48.0\n" for rank in range(2)]
    assert [each.returncode for each in (*started, late)] == [0, 0, 0], said
    lines = sorted("".join(out for out, _ in said).splitlines())
    assert lines == [f"start 1: rank {rank} of 3: 48.0" for rank in range(3)]
    await_end(our_processes())


def lead(started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """The one that prints: the one that leads."""
    import select

    ready, _, _ = select.select([each.stdout for each in started], [], [], WAIT)
    return next(each for each in started if each.stdout in ready)


@pytest.mark.processes
@pytest.mark.engines
def test_a_script_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "resuming.py"
    script.write_text(
        "import os, sys\n"
        "restart = os.environ['PLANCOMPILER_RESTART']\n"
        "sys.stdout.write(f'start {restart}\\n')\n"
        "sys.exit(restart != '2')\n"
    )
    done = local().run("launch", "--max-restarts", 2, "-n", 1, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "start 0\nstart 1\nstart 2\n"
    assert "restart 2 of 2" in done.stderr
    assert local().run("launch", "--max-restarts", 1, "-n", 1, script).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("two", "h:1", "s", None), "does not parse"),
        (("3:2", "h:1", "s", None), "1 <= MIN <= MAX"),
        (("2", None, "s", None), "without --rdzv-endpoint"),
        (("2", "h:1", None, None), "secret that all of them know"),
        (("2", "h:1", "s", 2), "host 2 of --nnodes 2"),
    ],
)
def test_what_contradicts_itself(arguments, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_nodes(*arguments)


def test_hosts_are_numbered_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    numbered = parse_nodes("2", "host:1", "secret", None)
    assert numbered is not None
    assert (numbered.rank, numbered.leads()) == (1, False)
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX=1 of at most 1 hosts"):
        parse_nodes("1", "host:1", "secret", None)
