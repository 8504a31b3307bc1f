"""A folder and an environment of its own, in which all that a case starts can be found again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

MARK = "PLANCOMPILER_CAMPAIGN"
"""A variable whose value marks every process of a sandbox; children inherit it."""
PROGRAM = ("-m", "plancompiler")
PROGRAMS = Path(__file__).resolve().parent / "programs"
ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.02
END_SECONDS = 10.0


def until(holds: Callable[[], object], seconds: float) -> bool:
    """Wait for something to hold, so many seconds at most; whether it does."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return bool(holds())
        time.sleep(POLL_SECONDS)  # what is waited for is any condition, which nobody announces
    return True


class Child:
    """A program that a sandbox started, and what it has said so far."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], cwd: Path
    ) -> None:
        self.name = name
        self.began = time.monotonic()
        self.ended_at: float | None = None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            cwd=cwd,
        )
        self.pid = self._process.pid
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self._process.stdout), ("err", self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str] | None) -> None:
        assert stream is not None
        for line in stream:
            with self._changed:
                self._lines[name].append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return "".join(self._lines["out"])

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return "".join(self._lines["err"])

    @property
    def last_line(self) -> str:
        """The last line of standard error, or nothing."""
        lines = self._lines["err"]
        return lines[-1].strip() if lines else ""

    def says(self, words: str, seconds: float) -> bool:
        """Wait for words on standard output or error; False where it ends or time is up."""
        end = time.monotonic() + seconds
        with self._changed:
            while not any(words in line for lines in self._lines.values() for line in lines):
                left = end - time.monotonic()
                if left <= 0 or (self.code is not None and not self._is_heard()):
                    return False
                self._changed.wait(min(left, 0.1))
        return True

    def _is_heard(self) -> bool:
        return any(reader.is_alive() for reader in self._readers)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        code = self._process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return code

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; its exit code, or None where time is up."""
        until(lambda: self.code is not None, seconds)
        if self.code is not None:
            # What it said before its end; a grandchild that holds the pipe open is not waited for.
            for reader in self._readers:
                reader.join(1.0)
        return self.code

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.code is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Ask it to end, then make it."""
        for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
            self.send(signal.SIGCONT)
            self.send(number)
            if self.wait(seconds) is not None:
                break

    def close(self) -> None:
        """Let go of its pipes, when nobody writes to them any more."""
        for reader in self._readers:
            reader.join(END_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError, ValueError):
                stream.close()


class Sandbox:
    """Programs in one environment: a folder for temporary files, sockets, caches and tokens.

    Whatever one of them starts carries the sandbox's mark, and whatever one of them leaves lies
    below the folder. Leaving the sandbox ends its processes, by their ids.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        self.mark = secrets.token_hex(8)
        self.temporary = self.folder / "tmp"
        self.work = self.folder / "work"
        runtime = self.folder / "runtime"
        for each in (self.temporary, self.work, runtime):
            each.mkdir(mode=0o700)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(runtime),
            "PLANCOMPILER_CACHE": str(self.folder / "cache"),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.children: list[Child] = []
        self.token_file = self.folder / "token"
        """For programs that reach their master at another address than its own."""
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_hex(32) + "\n")

    def start(self, name: str, *words: object, **environment: str) -> Child:
        """Start Python with these words."""
        child = Child(
            name,
            [sys.executable, *map(str, words)],
            {**self.environment, **environment},
            self.work,
        )
        self.children.append(child)
        return child

    def program(self, name: str, *words: object, **environment: str) -> Child:
        """Start `plancompiler` with these words."""
        return self.start(name, *PROGRAM, *words, **environment)

    def processes(self) -> dict[int, str]:
        """Live processes with the sandbox's mark: command lines by process id."""
        wanted = f"{MARK}={self.mark}".encode()
        processes = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX":
                        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                        processes[int(folder.name)] = line.decode(errors="replace").strip()
        return processes

    def left(self, but: set[int] | None = None) -> list[str]:
        """Processes and temporary files that are still there, some processes not counted."""
        expected = but or set()
        left = [
            f"process {pid}: {line}"
            for pid, line in self.processes().items()
            if pid not in expected
        ]
        return left + [f"file {path.name}" for path in sorted(self.temporary.iterdir())]

    def clear(self) -> None:
        """End all children and whatever else carries the mark; forget them."""
        for child in self.children:
            child.end()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.processes(), END_SECONDS)
        for child in self.children:
            child.close()
        self.children.clear()
        for path in self.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
