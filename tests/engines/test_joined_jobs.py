"""Jobs whose processes somebody else has started: equal bits, restarts, signals, contradictions."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from plancompiler.cli.run import run_command
from plancompiler.cluster.token import RUNTIME_VARIABLE
from plancompiler.engines.joined import JobLeader, place_of
from plancompiler.engines.launcher import Program
from plancompiler.engines.nodes import Nodes, _await_leader, follow
from plancompiler.engines.remote_ranks import AgentServer
from plancompiler.engines.supervise import Signals
from plancompiler.errors import EngineError, SecurityError, TransportError, UsageError
from plancompiler.limits import time_limits
from tests.cli.test_processes import await_end
from tests.engines.installed import WAIT, free_port, local, our_processes
from tests.engines.jobs import MLP, STEPS, await_steps, losses_of, worker_of

TORCHRUN = {"RANK": "{}", "LOCAL_RANK": "{}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "{}", "WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "{}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1"}


@contextmanager
def joined(variables: Mapping[str, str], *words: object) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each of two ranks, each with the variables of its own; the second one first."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [*local().command("run")[:4], *map(str, [*MLP, *words])]
    started = {
        rank: subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=local().variables()
            | rendezvous
            | {name: text.format(rank, rank + 2) for name, text in variables.items()},
            start_new_session=True,
        )
        for rank in (1, 0)
    }
    processes = [started[0], started[1]]
    try:
        yield processes
    finally:
        for each in processes:
            each.kill()
            each.communicate()


def ends_of(processes: list[subprocess.Popen[str]]) -> list[subprocess.CompletedProcess[str]]:
    ends = [each.communicate(timeout=WAIT) for each in processes]
    await_end(our_processes())
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *said)
        for each, said in zip(processes, ends, strict=True)
    ]


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.parametrize(
    "variables", [TORCHRUN, INDEXED_JOB, SLURM], ids=["torchrun", "indexed_job", "slurm"]
)
def test_equal_bits(variables: dict[str, str], losses: list[float]) -> None:
    with joined(variables, "--steps", STEPS) as processes:
        first, second = ends_of(processes)
    assert losses_of(first) == losses
    assert (second.returncode, second.stdout) == (0, ""), second.stderr


@pytest.mark.processes
@pytest.mark.engines
def test_a_restarted_job_goes_on_as_a_quiet_one(tmp_path: Path, losses: list[float]) -> None:
    options = ("--save", tmp_path / "saved", "--save-every", 10, "--max-restarts", 2)
    with joined(TORCHRUN, "--steps", 1000, *options) as processes:
        await_steps(processes[0], 100)
        os.kill(worker_of(1), signal.SIGKILL)
        first, second = ends_of(processes)
    assert re.search(r"restart 1 of 2 after step \d+: .*rank 1", first.stderr)
    assert losses_of(first)[:STEPS] == losses
    assert len(losses_of(first)) == 1000
    assert second.returncode == 0, second.stderr


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_is_killed(rank: int) -> None:
    """The other one ends and says so, and nothing is left."""
    with joined(TORCHRUN, "--steps", 1_000_000) as processes:
        await_steps(processes[0], 1)
        os.kill(processes[rank].pid, signal.SIGKILL)
        ends = ends_of(processes)
    last = ends[1 - rank].stderr.splitlines()[-1]
    assert ends[1 - rank].returncode == 1
    assert ("on rank 1" if rank else "the host that leads the run is gone") in last


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGUSR1), (1, signal.SIGTERM)])
def test_a_signal_to_any_process_means_to_save(tmp_path: Path, rank: int, number: int) -> None:
    folder = tmp_path / "saved"
    with joined(INDEXED_JOB, "--steps", 1_000_000, "--save", folder) as processes:
        await_steps(processes[0], 1)
        processes[rank].send_signal(number)
        first, second = ends_of(processes)
    (done,) = re.findall(r"stopped after step (\d+) of 1000000", first.stderr)
    assert json.loads((folder / "index.json").read_text())["step"] == int(done)
    assert first.returncode == 128 + number
    assert second.returncode == (128 + number if rank else 0), second.stderr


@pytest.mark.processes
@pytest.mark.engines
def test_processes_that_were_told_different_sizes() -> None:
    with joined({"RANK": "{0}", "WORLD_SIZE": "{1}"}) as processes:
        first, second = ends_of(processes)
    assert (first.returncode, second.returncode) == (1, 1)
    for end in (first, second):
        assert "told different numbers" in end.stderr.splitlines()[-1]
    assert re.search("Got: 3 on .*, 2 here", first.stderr)


RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "outside its world.*RANK=2, WORLD_SIZE=2"),
        ({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "2"}, "outside its world"),
        ({"RANK": "1"}, "RANK and not WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "not set where they meet.*MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "not set where they meet.*--engine"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1"},
            "secret that all of them know.*node0:1",
        ),
    ],
)
def test_variables_that_contradict_each_other(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        place_of(environment, None, None)


def test_the_number_of_ranks_is_the_launchers() -> None:
    variables = RENDEZVOUS | {"RANK": "0", "WORLD_SIZE": "2"}
    words = [str(MLP[0]), "--ranks", "3"]
    done = CliRunner(env=variables).invoke(run_command, words)
    assert isinstance(done.exception, UsageError)
    assert re.search("--ranks contradicts.*--ranks 3, 2 processes", str(done.exception))


def test_a_process_alone_runs_its_job_itself() -> None:
    assert place_of({}, None, None) is None
    assert place_of({"RANK": "0", "WORLD_SIZE": "1"}, None, None) is None
    # A script that `plancompiler launch` has started may run jobs of its own.
    told = {"PLANCOMPILER_RANK": "1", "PLANCOMPILER_WORLD_SIZE": "2", "RANK": "1"}
    assert place_of(told | {"WORLD_SIZE": "2"}, None, None) is None


def test_an_option_says_where_they_meet() -> None:
    place = place_of({"RANK": "1", "WORLD_SIZE": "2", **RENDEZVOUS}, "node0:1", "a secret")
    assert place is not None
    assert (place.endpoint, place.rank, place.leads()) == ("node0:1", 1, False)


@pytest.mark.processes
def test_who_was_told_to_save_before_the_first_one_came_says_so_after_its_greeting() -> None:
    """The first process takes nothing from agents that it does not know."""
    numbers: list[int] = []
    ends: list[str | None] = []
    has_number = threading.Event()
    signals = Signals()
    signals.forwarded.append(signal.SIGTERM)

    def save(number: int) -> None:
        numbers.append(number)
        has_number.set()

    server = AgentServer("127.0.0.1:0", "the secret", lambda _rank, _line: None, save)
    place = Nodes(2, 2, server.address, "the secret", 1)

    def run() -> None:
        try:
            ends.append(follow(place, None, 1, signals, print))
        except EngineError as error:
            ends.append(str(error))
            has_number.set()

    other = threading.Thread(target=run)
    other.start()
    try:
        assert has_number.wait(WAIT)
        server.let_go("it was saved", again=False)
    finally:
        server.close()
        other.join(WAIT)
    assert (numbers, ends) == ([signal.SIGTERM], ["it was saved"])
    assert not any(each.name in {"requests", "beats"} for each in threading.enumerate())


@pytest.mark.processes
def test_a_process_that_was_told_to_end_is_not_waited_for() -> None:
    """Also where the first one may start all again; one that is lost may come back. A third one
    never comes, so that the run cannot start before the second has left.
    """
    place = Nodes(3, 3, f"127.0.0.1:{free_port()}", "the secret", 0)
    leader = JobLeader(place, print, 1, None)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(leader.start, Program(("true",)), 3, print, threading.Event())
        other = _await_leader(replace(place, rank=1), None, 1, threading.Event(), WAIT, print)
        assert other is not None
        other.run(lambda: other.leave(for_good=True))
        with pytest.raises(EngineError, match="told to end, and does not come again"):
            started.result()
    leader.finish("it has failed")


def test_who_waits_for_a_first_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "TELL", 0.0)
    stop = threading.Event()
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        stop.set()

    place = Nodes(2, 2, f"127.0.0.1:{free_port()}", "the secret", 1)
    assert _await_leader(place, None, 1, stop, WAIT, note) is None
    (line,) = notes
    assert re.search(rf"leads the run, at {place.endpoint}, for \d+ s at most: .*refused", line)
    with pytest.raises(TransportError, match="cannot be reached"):
        _await_leader(place, None, 1, threading.Event(), 0.0, note)


@pytest.mark.processes
def test_a_first_process_that_cannot_leave_its_secret_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plancompiler").mkdir(mode=0o755)
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path))
    place = Nodes(2, 2, f"127.0.0.1:{free_port()}", None, 0)
    leader = JobLeader(place, print, 0, None)
    with pytest.raises(SecurityError, match="not this user's alone"):
        leader.start(Program(("true",)), 2, print, threading.Event())
    leader.finish("it has failed")
    assert not any(each.name == "agents" for each in threading.enumerate())
