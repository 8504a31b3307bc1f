"""Damaged inputs of every format that is read: a value or an error of ours, soon, in little memory.

A case is 100 inputs of one format; `tests.damaged_formats` makes those of files and messages, and
the words of command lines are damaged here.
"""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from click.testing import CliRunner

from benchmarks.campaign.case import Case, Result, unforeseen_lines
from benchmarks.campaign.sandbox import PROGRAMS
from plancompiler.cli.program import cli
from plancompiler.errors import PlanCompilerError
from tests.damage import Format, attempt, bounded_memory, damaged_bytes
from tests.damaged_formats import formats

COUNT = 500
INPUTS = 100
"""Of a case."""
MEMORY = 768 << 20
"""Bytes that a reader may take."""
SECONDS = 10.0
"""Within which one input is read."""
JOB = str(PROGRAMS / "regression.py")
COMMANDS = (
    ("compile", JOB, "--ranks", "2", "--mode", "naive", "--zero", "1", "-D", "width=4"),
    ("compile", JOB, "--microbatches", "2", "--schedule", "gpipe", "--precision", "float16"),
    ("run", JOB, "--ranks", "2", "--steps", "1", "--no-cache", "--deadline", "20"),
    ("run", JOB, "--recompute", "auto", "--fuse-bytes", "1000", "--pass", "cse", "--steps", "1"),
    ("inspect", "plans", "--rank", "1", "--format", "json"),
    ("submit", JOB, "--master", "127.0.0.1:1", "--timeout", "0.1", "--steps", "2"),
    ("worker", "--master", "127.0.0.1:1", "--timeout", "0.1", "--rank", "0", "--listen", "[::1]:0"),
    ("ops", "--json"),
)
WORDS = ("", "-", "--", "-1", "1e999", "nan", "9" * 30, "é", "../..", "a=b=c", "0x10", "-D")


class Damage:
    """Runs cases."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        self._formats = {each.name: each for each in formats(self._folder)}
        words = Format("command line", _damaged_words, _use_words)
        self._formats[words.name] = words

    def run(self, case: Case) -> Result:
        """A hundred inputs of one format."""
        name = list(self._formats)[case.index % len(self._formats)]
        first = (case.seed << 32) + case.index * INPUTS
        result = Result(case, name, f"{name}, inputs {first} to {first + INPUTS - 1}")
        tried = self._formats[name]
        # The words of a command may ask for threads, which take address space and no memory.
        limit = bounded_memory(MEMORY) if name != "command line" else contextlib.nullcontext()
        counts = Counter[str]()
        begin = time.monotonic()
        with limit:
            for number in range(first, first + INPUTS):
                outcome = attempt(tried, number)
                counts["accepted" if outcome.error is None else "refused"] += 1
                result.seconds = max(result.seconds, outcome.seconds)
                if outcome.is_defect:
                    result.problems.append(f"input {number}: {outcome.error!r}")
                if outcome.seconds > SECONDS:
                    result.problems.append(f"input {number} took {outcome.seconds:.0f} s")
        result.ending = "all refused or harmless"
        result.what += f": {dict(counts)}, {time.monotonic() - begin:.1f} s"
        return result

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _damaged_words(choices: random.Random) -> list[str]:
    words = list(choices.choice(COMMANDS))
    for _ in range(choices.randint(1, 3)):
        at = choices.randrange(len(words))
        match choices.randrange(5):
            case 0:
                words[at] = choices.choice(WORDS)
            case 1 if len(words) > 1:
                del words[at]
            case 2:
                words.insert(at, choices.choice(words))
            case 3:
                words.insert(at, choices.choice(WORDS))
            case _:
                damaged = damaged_bytes(words[at].encode(), choices).replace(b"\0", b"")
                words[at] = damaged.decode(errors="replace")[:200]  # words end at a zero byte
    # Nothing that serves, and no more than a few ranks: threads are not what is tried here.
    refused = ("master", "launch", "cache")
    return words if words and words[0] not in refused else ["ops"]


def _use_words(words: list[str]) -> None:
    for name, value in pairwise(words):
        if name in ("--ranks", "--steps", "--timeout", "-D") and _is_large(value):
            return
    if "--master" in words and "--timeout" not in words:
        words = [*words, "--timeout", "0.1"]  # by default it waits for as long as a case may take
    done = CliRunner().invoke(cli, words)
    if done.exit_code not in (0, 1, 2):
        raise AssertionError(f"exit code {done.exit_code} of {words}")
    for line in unforeseen_lines(done.stderr):
        raise AssertionError(f"{words}: {line}")
    if done.exit_code:
        raise PlanCompilerError(done.stderr[-200:])


def _is_large(value: str) -> bool:
    """Whether a number asks for more than a few ranks, steps or seconds."""
    with contextlib.suppress(ValueError):
        return not float(value.rpartition("=")[2]) <= 8
    return False


@contextlib.contextmanager
def opened() -> Iterator[Damage]:
    """Runs cases. What is said of each damaged entry of the cache is not shown."""
    damage = Damage()
    logger = logging.getLogger("plancompiler")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield damage
    finally:
        logger.setLevel(before)
        damage.close()
