"""`plancompiler launch`: run a script as several ranks of one SPMD program on this machine."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from plancompiler.blas.threads import one_thread_environment
from plancompiler.cli.options import allow_mixed_kernels_option, json_option
from plancompiler.cli.output import print_json, print_note
from plancompiler.cli.signals import stop_on_signals
from plancompiler.eager.launch_variables import PIPE, RANK, TOKEN, WORLD_SIZE
from plancompiler.errors import ExecutionError
from plancompiler.executor.process_status import CONTINUE_HINT, ProcessStatus, StoppedProcesses
from plancompiler.limits import time_limits
from plancompiler.plan.digest import ALLOW_MIXED_KERNELS

GRACE_SECONDS = time_limits.GRACE
"""How long the other ranks may take to see a failure by themselves, and to end after SIGTERM."""
_LOOK_SECONDS = 0.5
"""Between two looks at whether a rank's process is stopped."""
_TRACEBACK = "Traceback (most recent call last):"
_CONSEQUENCE = "AbortedError"
"""In the traceback of a rank that only ended because another one had failed."""


class _Rank:
    """One process, and what it says on standard error.

    Lines are passed on as they come. From a traceback on they are held back, so that the rank whose
    failure came first can be shown first.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: dict[str, str],
        pipe: int,
        as_json: bool,
    ) -> None:
        self.rank = rank
        self.held: list[str] = []
        self.ended = threading.Event()
        self.end_seconds = 0.0
        self.was_stopped = False
        """Whether it was still running when all had to end."""
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=sys.stderr if as_json else None,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(pipe,),
        )
        self._reader = threading.Thread(target=self._read, name=f"stderr of rank {rank}")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if self.held or line.startswith((_TRACEBACK, "plancompiler.errors.")):
                self.held.append(line)
            else:
                click.echo(line, err=True, nl=False)
        self.process.wait()
        self.end_seconds = time.monotonic()
        self.ended.set()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.returncode if self.ended.is_set() else None

    @property
    def how(self) -> str:
        """How it ended, for people."""
        code = self.code
        if code is None or code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another rank had."""
        return any(line.startswith("plancompiler.") and _CONSEQUENCE in line for line in self.held)

    def send(self, number: int) -> None:
        """Send a signal to it and all that it started."""
        self.was_stopped = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
            os.killpg(self.process.pid, signal.SIGCONT)  # a stopped one would not hear it

    def join(self) -> None:
        """Return when all that it said has been read."""
        self._reader.join()


@click.command("launch", context_settings={"ignore_unknown_options": True})
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), required=True, help="How many ranks to start."
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@allow_mixed_kernels_option
@json_option
@click.pass_context
def launch_command(
    context: click.Context,
    ranks: int,
    script: Path,
    arguments: tuple[str, ...],
    allow_mixed_kernels: bool,
    as_json: bool,
) -> None:
    """Start SCRIPT as several ranks of one SPMD program; it calls pc.init() to join.

    \b
    Example:
      plancompiler launch -n 2 train.py --epochs 3

    What follows SCRIPT is passed to it. Where a rank fails all are ended, and the traceback of the
    first failure is shown first. With --json the ranks' standard output goes to standard error.
    """
    begin = time.monotonic()
    reading, writing = os.pipe()
    started: list[_Rank] = []
    stopped: tuple[int, ProcessStatus] | None = None
    with stop_on_signals() as stop:
        try:
            environment = one_thread_environment()
            environment.update(
                {WORLD_SIZE: str(ranks), TOKEN: secrets.token_hex(16), PIPE: str(reading)}
            )
            if allow_mixed_kernels:
                environment[ALLOW_MIXED_KERNELS] = "1"
            command = [sys.executable, str(script), *arguments]
            for rank in range(ranks):
                own = {**environment, RANK: str(rank)}
                # One by one: where one cannot be started, those before it are known, and ended.
                started += [_Rank(rank, command, own, reading, as_json)]
            stopped = _wait(started, stop.event)
        finally:
            _end(started)
            os.close(reading)
            os.close(writing)
    failed = _show_failures(started, stop.event.is_set())
    codes = [each.code for each in started]
    if as_json:
        seconds = time.monotonic() - begin
        print_json({"ranks": ranks, "exit_codes": codes, "seconds": seconds})
    if stop.event.is_set():
        print_note("plancompiler: interrupted; everything it started has been stopped.")
        context.exit(stop.exit_code)
    if stopped is not None:
        rank, status = stopped
        raise ExecutionError(
            "the process of a rank does not run, and all were ended",
            rank=rank,
            got=status.stopped_text,
            expected="all ranks running",
            hint=CONTINUE_HINT,
        )
    if failed is not None:
        raise ExecutionError(
            "a rank failed, and the others were ended",
            rank=failed.rank,
            got=failed.how,
            expected="exit code 0 of all ranks",
            hint="its output above says why"
            if failed.held or (failed.code or 0) > 0
            else "it said nothing: something else ended it, such as a system short of memory",
        )


def _end(started: Sequence[_Rank]) -> None:
    """End all ranks and what they started, at the same time, so that many take no longer."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, math.inf)):
        running = [each for each in started if not each.ended.is_set()]
        for each in running:
            each.send(number)
        until = time.monotonic() + seconds
        for each in running:
            left = until - time.monotonic()
            each.ended.wait(None if math.isinf(left) else max(0.0, left))
    for each in started:
        each.join()


def _wait(started: Sequence[_Rank], stop: threading.Event) -> tuple[int, ProcessStatus] | None:
    """Return when all have ended, some time after one has failed, or when asked to stop; with its
    rank when a process is stopped by a signal.
    """
    failed_at: float | None = None
    watch = StoppedProcesses()
    look_at = 0.0
    while not stop.is_set() and not all(each.ended.is_set() for each in started):
        if failed_at is None and any(each.code for each in started):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            return None
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + _LOOK_SECONDS
            ranks = {each.process.pid: each.rank for each in started if not each.ended.is_set()}
            status = watch.look(ranks)
            if status is not None:
                print_note(f"rank {ranks[status.pid]}: {status.stopped_text}")
                return ranks[status.pid], status
        waiting = next((each for each in started if not each.ended.is_set()), None)
        if waiting is not None:
            waiting.ended.wait(0.05)
    return None


def _show_failures(started: Sequence[_Rank], interrupted: bool) -> _Rank | None:
    """Show what was held back, the first cause first; returns the rank that failed first.

    Of ranks that ended because the user interrupted nothing is shown.
    """
    failed = sorted(
        (each for each in started if each.code),
        # Those that were ended here did not fail by themselves.
        key=lambda each: (each.was_stopped, each.is_consequence, each.end_seconds),
    )
    for each in [*failed, *(each for each in started if not each.code)]:
        is_wanted = not interrupted or not (each.was_stopped or each.is_consequence)
        if each.held and is_wanted:
            print_note(f"rank {each.rank}:")
            for line in each.held:
                click.echo(line, err=True, nl=False)
    return failed[0] if failed else None
