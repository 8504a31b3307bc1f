"""Processes that are killed, stopped, interrupted or asked to end at random moments.

Three worlds in turn: a cluster (master, two workers and `submit`), ranks as processes (`run
--backend processes`, `pc.run`), and eager programs (`launch`). After each signal the others must
end in time with an error that names the first cause, nothing may be left, and the next run works.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from benchmarks.campaign.case import Case, Result, unforeseen_lines
from benchmarks.campaign.sandbox import PROGRAMS, Child, Sandbox, until

COUNT = 600
WORLDS = ("cluster", "processes", "launch")
SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "interrupted": signal.SIGINT,
    "asked to end": signal.SIGTERM,
}
CODES = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}
"""With which a program of ours ends by a signal."""

NAMED_SECONDS = 5.0
"""Within which a rank that died, or stands still on this host, is named."""
SILENT_SECONDS = 10.0
"""Within which a master that ended or stands still is noticed, its first answer awaited."""
GONE_SECONDS = 10.0
"""Within which everything that was started is gone."""
SLACK_SECONDS = 10.0
"""What goes beyond a limit by more than this hangs."""
START_SECONDS = 60.0
STEPS_FOREVER = 10**6
STEPS_AGAIN = 20
JOB = PROGRAMS / "regression.py"
EAGER = PROGRAMS / "eager_regression.py"
SESSION = PROGRAMS / "session.py"
RANKS = 2
INTERPRETER_STARTS = "Fatal Python error: init_"
"""What Python says of an interrupt before it runs a first line of anybody's."""
ERROR = re.compile(r"\[E\d{3} \w+\]")


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where there is none."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def is_below(pid: int, others: set[int]) -> bool:
    """Whether a process or one of those that started it is one of the others."""
    while pid > 1:
        if pid in others:
            return True
        pid = parent_of(pid)
    return False


class World:
    """What the three kinds of runs have in common."""

    name = ""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.reference: str | None = None
        """What a run that nobody disturbed printed."""

    def run(self, case: Case) -> Result:
        """One case; leaves the world such that the next one can begin."""
        raise NotImplementedError

    def expect_error(
        self,
        result: Result,
        child: Child,
        begin: float,
        limit: float,
        names: str,
        of_a_script: bool = False,
    ) -> None:
        """A program must end within a limit from `begin` on, by an error that names the cause."""
        code = child.wait(max(0.0, begin + limit + SLACK_SECONDS - time.monotonic()))
        if code is None:
            result.problems.append(
                f"{child.name} still runs {limit + SLACK_SECONDS:.0f} s later; it said last: "
                f"{child.last_line}"
            )
            return
        assert child.ended_at is not None
        result.seconds = max(result.seconds, child.ended_at - begin)
        result.require(code == 1, f"{child.name} ended with {code}: {child.last_line}")
        result.require(
            ERROR.search(child.last_line), f"{child.name} shows no error at its end: {child.err}"
        )
        result.require(
            re.search(names, child.last_line),
            f"{child.name} does not name the cause ({names}): {child.last_line}",
        )
        self.expect_no_surprise(result, child, of_a_script)

    def expect_end(self, result: Result, child: Child, begin: float, number: int) -> None:
        """A program that got a signal must end by it."""
        code = child.wait(max(0.0, begin + GONE_SECONDS + SLACK_SECONDS - time.monotonic()))
        if code is None:
            result.problems.append(f"{child.name} does not end by signal {number}")
            return
        assert child.ended_at is not None
        result.seconds = max(result.seconds, child.ended_at - begin)
        expected = CODES[signal.Signals(number)]
        # By its default action where it has not begun to listen, and before its first line of ours.
        result.require(
            code in (expected, -number) or INTERPRETER_STARTS in child.err,
            f"{child.name} ended with {code}: {child.last_line}",
        )
        self.expect_no_surprise(result, child, code == -signal.SIGINT)

    @staticmethod
    def expect_no_surprise(result: Result, child: Child, of_a_script: bool = False) -> None:
        """No traceback, and nothing else that was not foreseen."""
        if INTERPRETER_STARTS in child.err:
            return
        for line in unforeseen_lines(child.err, of_a_script):
            result.problems.append(f"{child.name} says: {line}")

    def expect_nothing_left(self, result: Result, alive: set[int], begin: float) -> None:
        """Nothing but living programs and what they started, ten seconds after the signal."""

        def left() -> list[str]:
            below = {pid for pid in self.sandbox.processes() if is_below(pid, alive)}
            return self.sandbox.left(but=below)

        until(
            lambda: not left(),
            max(0.5, begin + GONE_SECONDS + SLACK_SECONDS - time.monotonic()),
        )
        result.problems += [f"left behind: {each}" for each in left()]

    def expect_same(self, result: Result, child: Child, pattern: str) -> None:
        """A run after the trouble must end well, with the numbers of one that was not disturbed."""
        code = child.wait(START_SECONDS)
        result.require(code == 0, f"the next run ended with {code}: {child.last_line}")
        if code == 0:
            numbers = re.search(pattern, child.out)
            text = numbers[0] if numbers else child.out
            self.reference = self.reference or text
            result.require(
                text == self.reference,
                f"the next run gave {text!r} and an earlier one {self.reference!r}",
            )


# --- a cluster ------------------------------------------------------------------------------------


class Cluster(World):
    """A master, two workers, and a client."""

    name = "cluster"
    MOMENTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "worker": ("starting", "compiling", "checking", "preparing", "running", "step 1/", "step"),
        "master": ("starting", "compiling", "checking", "preparing", "running", "step 1/", "step"),
        "client": ("starting", "queued", "compiling", "preparing", "running", "step 1/", "step"),
    }

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self.master: Child | None = None
        self.address = ""
        self.workers: dict[int, Child] = {}

    def prepare(self, but: int | None = None) -> None:
        """Start what is missing: a master on the address of the one before it, and workers."""
        if self.master is None or self.master.code is not None:
            for worker in self.workers.values():
                worker.end()
            self.workers.clear()
            listen = self.address or "127.0.0.1:0"
            words = ("master", "--listen", listen, "--ranks", RANKS, "--json")
            self.master = self.sandbox.program("the master", *words)
            if not self.master.says('"address"', START_SECONDS):
                raise RuntimeError(f"no master starts at {listen}: {self.master.err}")
            self.address = re.findall(r'"address": "([^"]+)"', self.master.out)[0]
        for rank in range(RANKS):
            if rank != but:
                self.start_worker(rank)

    def start_worker(self, rank: int) -> Child:
        """The worker of a rank, started if there is none."""
        worker = self.workers.get(rank)
        if worker is None or worker.code is not None:
            words = ("worker", "--master", self.address, "--rank", rank)
            worker = self.sandbox.program(f"worker {rank}", *words)
            self.workers[rank] = worker
        return worker

    def submit(self, name: str, steps: int, *options: object) -> Child:
        """A client."""
        words = ("submit", JOB, "--master", self.address, "--steps", steps)
        return self.sandbox.program(name, *words, *options)

    def run(self, case: Case) -> Result:
        choices = case.choices
        victim = choices.choice(("worker", "worker", "master", "client"))
        how = choices.choice(tuple(SIGNALS))
        moment = choices.choice(self.MOMENTS[victim])
        rank = choices.randrange(RANKS)
        saving = choices.random() < 0.3
        delay = choices.uniform(0.0, 1.5 if moment in ("starting", "step") else 0.03)
        goes_on = choices.random() < 0.5
        who = f"worker {rank}" if victim == "worker" else f"the {victim}"
        result = Result(
            case,
            f"cluster: {victim} {how}",
            f"{who} {how} at {moment!r} + {delay:.3f} s{', saving' if saving else ''}",
        )
        self.prepare(but=rank if victim == "worker" and moment == "starting" else None)
        assert self.master is not None
        options = ("--save", f"save-{case.index}", "--save-every", 50) if saving else ()
        client = self.submit("the client", STEPS_FOREVER, *options)
        if victim == "worker":
            target = self.start_worker(rank)
        else:
            target = self.master if victim == "master" else client
        heard = moment == "starting" or client.says(
            "step 1/" if moment == "step" else f"{moment}" if "/" in moment else f"{moment} after",
            START_SECONDS,
        )
        result.require(heard, f"the client never said {moment!r}: {client.err}")
        time.sleep(delay)  # the case: at any time after that
        begin = time.monotonic()
        target.send(SIGNALS[how])
        if victim == "worker":
            self._after_worker(result, rank, target, client, how, begin, goes_on)
        elif victim == "master":
            self._after_master(result, client, how, begin, goes_on)
        else:
            self._after_client(result, client, how, begin, goes_on)
        alive = {self.master.pid, *(worker.pid for worker in self.workers.values())}
        self.expect_nothing_left(result, alive, begin)
        self._again(result)
        for child in (client, target):
            child.end()
        if result.problems:  # the next case begins anew
            self.sandbox.clear()
            self.master = None
            self.workers.clear()
        return result

    def _after_worker(
        self,
        result: Result,
        rank: int,
        worker: Child,
        client: Child,
        how: str,
        begin: float,
        goes_on: bool,
    ) -> None:
        number = SIGNALS[how]
        if number != signal.SIGSTOP:
            self.expect_end(result, worker, begin, number)
        # A job that has not begun waits for its workers, and its client says for whom.
        waits = not until(
            lambda: client.code is not None, NAMED_SECONDS if "starting" in result.what else 0.0
        )
        if "starting" in result.what and waits and "compiling after" not in client.err:
            result.ending = "the client says which rank is missing"
            result.require(
                client.says(f"rank {rank}", SLACK_SECONDS)
                or re.search(rf"rank\w* .*\b{rank}\b", client.err),
                f"the client does not say that rank {rank} is missing: {client.err}",
            )
            client.send(signal.SIGINT)
            client.wait(GONE_SECONDS)
        else:
            result.ending = "an error names the rank"
            self.expect_error(result, client, begin, NAMED_SECONDS, rf"\brank {rank}\b")
        if number == signal.SIGSTOP and goes_on:
            worker.send(signal.SIGCONT)
            resumed = time.monotonic()
            # Where the others named it before the master had lost it, it goes on serving.
            if until(lambda: worker.code is not None, NAMED_SECONDS):
                self.expect_error(result, worker, resumed, GONE_SECONDS, "master|rank")
            else:
                worker.send(signal.SIGTERM)
                code = worker.wait(GONE_SECONDS + SLACK_SECONDS)
                result.require(code in (1, 143), f"worker {rank} ended with {code}: {worker.err}")
        elif number == signal.SIGSTOP:
            worker.send(signal.SIGKILL)
            worker.wait(GONE_SECONDS)

    def _after_master(
        self, result: Result, client: Child, how: str, begin: float, goes_on: bool
    ) -> None:
        assert self.master is not None
        number = SIGNALS[how]
        result.ending = "errors name the master"
        if number != signal.SIGSTOP:
            self.expect_end(result, self.master, begin, number)
        for child in (client, *self.workers.values()):
            self.expect_error(result, child, begin, SILENT_SECONDS, "master")
        if number == signal.SIGSTOP:
            self.master.send(signal.SIGCONT if goes_on else signal.SIGKILL)
            until(lambda: self.master is not None and self.master.code is not None, 0.2)
            self.expect_no_surprise(result, self.master)

    def _after_client(
        self, result: Result, client: Child, how: str, begin: float, goes_on: bool
    ) -> None:
        number = SIGNALS[how]
        if number == signal.SIGSTOP:
            time.sleep(1.0)  # the case: the process is stopped for so long
            if goes_on:
                client.send(signal.SIGCONT)
                begin = time.monotonic()
                client.send(signal.SIGINT)
                self.expect_end(result, client, begin, signal.SIGINT)
                result.ending = "goes on, and is interrupted"
                return
            number = signal.SIGKILL
            client.send(number)
        self.expect_end(result, client, begin, number)
        result.ending = "others are served"

    def _again(self, result: Result) -> None:
        """Master and workers that were not hit still serve, and the next job gives its numbers."""
        if "client" in result.group:
            assert self.master is not None
            for child in (self.master, *self.workers.values()):
                result.require(child.code is None, f"{child.name} ended: {child.last_line}")
                self.expect_no_surprise(result, child)
        try:
            self.prepare()
        except RuntimeError as error:
            result.problems.append(str(error))
            return
        if "client killed" in result.group or "client stopped" in result.group:
            # A job goes on without its client; whoever comes next may cancel it.
            self._cancel_jobs(result)
        again = self.submit("the next client", STEPS_AGAIN)
        self.expect_same(result, again, r"loss +.*")

    def _cancel_jobs(self, result: Result) -> None:
        child = self.sandbox.start("cancelling", PROGRAMS / "cancel_all.py", self.address)
        code = child.wait(START_SECONDS)
        result.require(code == 0, f"jobs cannot be cancelled: {child.err}")


# --- ranks as processes, and eager programs -------------------------------------------------------


class OneProgram(World):
    """A program that starts its ranks itself."""

    def start(self, choices: random.Random, steps: int) -> tuple[Child, bool]:
        """The program, and whether it is a script of a user's own."""
        raise NotImplementedError

    def rank_of(self, pid: int) -> int | None:
        """Which rank a process is, if it is one."""
        raise NotImplementedError

    def find_rank(self, parent: Child, rank: int) -> int | None:
        """The process of a rank, when it has been started."""
        pids: list[int] = []

        def look() -> bool:
            pids[:] = [
                pid
                for pid in self.sandbox.processes()
                if parent_of(pid) == parent.pid and self.rank_of(pid) == rank
            ]
            return bool(pids) or parent.code is not None

        until(look, START_SECONDS)
        return pids[0] if pids else None

    def run(self, case: Case) -> Result:
        choices = case.choices
        victim = choices.choice(("rank", "rank", "parent"))
        how = choices.choice(tuple(SIGNALS))
        moment = choices.choice(("starting", "step 1/"))
        rank = choices.randrange(RANKS)
        delay = choices.uniform(0.0, 1.5 if moment == "starting" else 0.5)
        stop_seconds = choices.choice((1.0, SILENT_SECONDS + 5.0))
        who = f"rank {rank}" if victim == "rank" else "the parent"
        result = Result(
            case,
            f"{self.name}: {victim} {how}",
            f"{who} {how} at {moment!r} + {delay:.3f} s",
        )
        parent, of_a_script = self.start(choices, STEPS_FOREVER)
        if moment != "starting":
            result.require(parent.says(moment, START_SECONDS), f"no first step: {parent.err}")
        pid: int | None = parent.pid
        if victim == "rank":
            pid = self.find_rank(parent, rank)
            result.require(pid is not None, f"rank {rank} is never started: {parent.err}")
        time.sleep(delay)  # the case: at any time after that
        begin = time.monotonic()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[how])
        if victim == "rank":
            result.ending = "an error names the rank"
            self.expect_error(
                result, parent, begin, NAMED_SECONDS, rf"\brank {rank}\b", of_a_script
            )
        elif how == "stopped":
            result.what += f", for {stop_seconds:.0f} s"
            time.sleep(stop_seconds)  # the case
            parent.send(signal.SIGCONT)
            begin = time.monotonic()
            self._after_pause(result, parent, begin, of_a_script)
        else:
            result.ending = "ends by the signal"
            self.expect_end(result, parent, begin, SIGNALS[how])
        self.expect_nothing_left(result, set(), begin)
        parent.end()
        again, _ = self.start(choices, STEPS_AGAIN)
        self.expect_same(result, again, r"loss +.* last|done .*")
        self.sandbox.clear()
        return result

    def _after_pause(self, result: Result, parent: Child, begin: float, of_a_script: bool) -> None:
        """It goes on, or says why not; then it is interrupted."""
        until(lambda: parent.code is not None, 1.0)
        if parent.code is None:
            parent.send(signal.SIGINT)
            begin = time.monotonic()
            code = parent.wait(GONE_SECONDS + SLACK_SECONDS)
            if code in (130, -signal.SIGINT):
                result.ending = "goes on, and is interrupted"
                result.seconds = (parent.ended_at or begin) - begin
                self.expect_no_surprise(result, parent, of_a_script)
                return
        result.ending = "says that ranks were lost meanwhile"
        self.expect_error(result, parent, begin, GONE_SECONDS, "rank|master", of_a_script)


class Processes(OneProgram):
    """`run --backend processes`, or a script that calls `pc.run`."""

    name = "processes"

    def start(self, choices: random.Random, steps: int) -> tuple[Child, bool]:
        if steps == STEPS_FOREVER and choices.random() < 0.4:
            return self.sandbox.start("the script", SESSION, steps), True
        words: tuple[object, ...] = ("run", JOB, "--backend", "processes", "--steps", steps)
        if steps == STEPS_FOREVER and choices.random() < 0.3:
            words += ("--trace", "timeline.json")
        return self.sandbox.program("run", *words), False

    def rank_of(self, pid: int) -> int | None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return int(words[words.index(b"--rank") + 1])
        return None


class Launch(OneProgram):
    """`launch`: a script per rank."""

    name = "launch"

    def start(self, choices: random.Random, steps: int) -> tuple[Child, bool]:
        return self.sandbox.program("launch", "launch", "-n", RANKS, EAGER, steps), True

    def rank_of(self, pid: int) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            (variable,) = (each for each in environment if each.startswith(b"PLANCOMPILER_RANK="))
            return int(variable.partition(b"=")[2])
        return None


class Kills:
    """Cases in three worlds in turn."""

    def __init__(self) -> None:
        self._worlds: dict[str, World] = {}
        self._sandboxes = contextlib.ExitStack()

    def run(self, case: Case) -> Result:
        """One case; the world is that of its index."""
        name = WORLDS[case.index % len(WORLDS)]
        if name not in self._worlds:
            maker = {"cluster": Cluster, "processes": Processes, "launch": Launch}[name]
            self._worlds[name] = maker(self._sandboxes.enter_context(Sandbox()))
        return self._worlds[name].run(case)

    def close(self) -> None:
        """End everything."""
        self._sandboxes.close()


@contextlib.contextmanager
def opened() -> Iterator[Kills]:
    """Runs cases."""
    kills = Kills()
    try:
        yield kills
    finally:
        kills.close()
