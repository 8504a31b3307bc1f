"""Every engine: the first cause is named with its rank, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.test_processes import await_end
from tests.engines.installed import WAIT, Engine, both, mpich, our_processes
from tests.launched_scripts import await_ranks

pytestmark = [pytest.mark.processes, pytest.mark.engines]


def start(engine: Engine, ranks: int, troubled: Path, *words: str) -> subprocess.Popen[str]:
    return engine().start("launch", "-n", ranks, troubled, *words)


@pytest.mark.parametrize("engine", both())
@pytest.mark.parametrize(
    ("what", "complaint"),
    [("SIGKILL", "killed by SIGKILL"), ("SIGSTOP", "is in state T, stopped by a signal")],
)
def test_a_rank_in_trouble(
    engine: Engine, troubled: Path, what: str, complaint: str, record_property
) -> None:
    started = start(engine, 3, troubled, what)
    try:
        pids = await_ranks(started, 3)
        begin = time.monotonic()
        _, errors = started.communicate(timeout=WAIT)
        record_property(
            f"seconds_from_{what}_to_the_end_{engine.__name__}", time.monotonic() - begin
        )
    finally:
        started.kill()
    last = errors.splitlines()[-1]
    assert started.returncode == 1
    assert complaint in last
    assert "on rank 1" in last
    await_end(pids + our_processes())


@pytest.mark.parametrize("engine", both())
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_launcher_ends(
    engine: Engine, troubled: Path, interruptible: None, number: signal.Signals, record_property
) -> None:
    """Ctrl-C, and an end of the launcher of which it does not know; one of its ranks is stopped."""
    started = start(engine, 2, troubled)
    pids: list[int] = []
    try:
        pids = await_ranks(started, 2)
        if number == signal.SIGKILL:
            os.kill(pids[0], signal.SIGSTOP)
        begin = time.monotonic()
        os.killpg(started.pid, number)
        started.communicate(timeout=WAIT)
        await_end(pids + our_processes())
        name = f"seconds_from_{number.name}_of_the_launcher_{engine.__name__}"
        record_property(name, time.monotonic() - begin)
    finally:
        started.kill()
    assert started.returncode == (130 if number == signal.SIGINT else -9)


@pytest.mark.parametrize("engine", both())
def test_a_signal_to_save_reaches_all_ranks(engine: Engine, troubled: Path) -> None:
    started = start(engine, 2, troubled)
    try:
        await_ranks(started, 2)
        os.kill(started.pid, signal.SIGUSR1)
        said, errors = started.communicate(timeout=WAIT)
    finally:
        started.kill()
    assert started.returncode == 0, errors
    assert sorted(said.splitlines()) == ["rank 0 has saved", "rank 1 has saved"]


@pytest.mark.parametrize("engine", both(mpich))
def test_the_first_traceback_is_shown_first(engine: Engine, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import plancompiler as pc\n"
        "world = pc.init()\n"
        "if world.rank == 1:\n"
        "    raise ValueError('broken on purpose')\n"
        "world.comm.context(range(world.size)).barrier()\n"
    )
    done = engine().run("launch", "-n", 2, script)
    assert done.returncode == 1
    held = done.stderr[done.stderr.index("Traceback") :]
    assert held.index("ValueError: broken on purpose") < held.index("AbortedError")
    assert "on rank 1" in done.stderr.splitlines()[-1]
