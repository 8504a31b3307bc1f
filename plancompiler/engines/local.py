"""The engine `local`: ranks as processes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from plancompiler.engines.guard import Guard
from plancompiler.engines.launch_variables import PIPE, world_variables
from plancompiler.engines.launcher import SECRET_WORD, Program, StartedRank
from plancompiler.engines.line_reader import LAST_WORDS_SECONDS, LineReader
from plancompiler.executor.process_status import StoppedProcesses
from plancompiler.limits import time_limits


class LocalRank(StartedRank):
    """One process, in a session of its own, so that Ctrl-C in a terminal does not reach it."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        guard: Guard,
        say: Callable[[int, str], None],
        output: int | Callable[[int, str], None] | None,
        holds: bool,
    ) -> None:
        """Without `holds` all lines of its standard error are passed on at once. `output` is where
        its standard output goes: None for this process's, a descriptor, or what takes its lines.
        """
        super().__init__(rank, partial(say, rank))
        self._guard = guard
        take = None if output is None or isinstance(output, int) else partial(output, rank)
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=None if take is None else subprocess.DEVNULL,
            stdout=output if output is None or isinstance(output, int) else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=descriptors,
        )
        guard.add(self.process.pid)
        self._readers = []
        if take is not None:
            self._readers.append(LineReader(self.process.stdout, take, f"stdout of rank {rank}"))
        heard = self.heard if holds else partial(say, rank)
        self._readers.append(LineReader(self.process.stderr, heard, f"stderr of rank {rank}"))
        self._waiter = threading.Thread(target=self._wait, name=f"end of rank {rank}")
        self._waiter.start()

    def _wait(self) -> None:
        code = self.process.wait()
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:  # it has left nobody, and its number may be given again
            self._guard.remove(self.process.pid)
        # What it has started may hold its standard error open: the group ends with it.
        for reader in self._readers:
            reader.join(LAST_WORDS_SECONDS)
        self.has_ended(code)

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
            os.killpg(self.process.pid, signal.SIGCONT)  # a stopped one would not hear it

    def join(self) -> None:
        """Return when all that it said has been read; its group has ended."""
        self._waiter.join()
        for reader in self._readers:
            reader.finish()


class LocalLauncher:
    """Ranks as processes of this host, which never outlive this process."""

    name = "local"
    host = "127.0.0.1"

    def __init__(
        self,
        environment: Mapping[str, str],
        output: int | Callable[[int, str], None] | None = None,
        *,
        holds: bool = True,
    ) -> None:
        """`environment` is that of the ranks; for the others see `LocalRank`."""
        self._holds = holds
        self._environment = environment
        self._output = output
        self._started: list[LocalRank] = []
        self._pipe: tuple[int, int] | None = None
        self._secret: int | None = None
        self._guard: Guard | None = None
        self._watch = StoppedProcesses()

    def start(
        self,
        program: Program,
        ranks: int,
        say: Callable[[str], None],
        stop: threading.Event,  # starting takes no time
    ) -> Sequence[StartedRank]:
        variables = [world_variables(rank, ranks, rank, ranks) for rank in range(ranks)]
        return self.start_some(program, range(ranks), variables, lambda _rank, line: say(line))

    def start_some(
        self,
        program: Program,
        ranks: Sequence[int],
        variables: Sequence[Mapping[str, str]],
        say: Callable[[int, str], None],
    ) -> Sequence[LocalRank]:
        """Start these ranks of a world, each with variables of its own."""
        self._guard = self._guard or Guard(time_limits.GRACE)
        if self._pipe is None:
            self._pipe = os.pipe()
        reading = self._pipe[0]
        if program.secret is not None and self._secret is None:
            self._secret = secret_file(program.secret)
        secret = [] if self._secret is None else [self._secret]
        started = []
        for rank, own in zip(ranks, variables, strict=True):
            environment = {**self._environment, **program.environment, **own, PIPE: str(reading)}
            # One by one: where one cannot be started, those before it are known, and ended.
            each = LocalRank(
                rank,
                [
                    f"/proc/self/fd/{self._secret}" if word == SECRET_WORD else word
                    for word in program.command_of(rank)
                ],
                environment,
                (reading, *secret),
                self._guard,
                say,
                self._output,
                self._holds,
            )
            self._started.append(each)
            started.append(each)
        return started

    def look(self) -> None:
        running = {each.process.pid: each for each in self._started if not each.ended.is_set()}
        status = self._watch.look(running)
        if status is not None:
            running[status.pid].trouble = status.stopped_text

    def close(self, error: str | None = None, *, again: bool = False) -> None:
        if self._guard is not None:
            self._guard.close()
        for each in self._started:
            each.join()
        for descriptor in (*(self._pipe or ()), self._secret):
            if descriptor is not None:
                os.close(descriptor)
        self._started, self._pipe, self._secret, self._guard = [], None, None, None


def secret_file(secret: str) -> int:
    """A file in memory with a secret, which only this user's processes can open by /proc."""
    descriptor = os.memfd_create("plancompiler-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, f"{secret}\n".encode())
    return descriptor
