"""What a rank's communicators did last: a ring of records, and its dump as a file.

Every collective leaves a record when it is called, which says how far it came. When ranks wait for
each other in vain, the records of all of them, side by side, tell which one called what.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from plancompiler.errors import TransportError
from plancompiler.executor.memory import Array
from plancompiler.ir import SourceLine
from plancompiler.ir.source import user_line
from plancompiler.ir.whole_file import write_whole

DIRECTORY = "PLANCOMPILER_FLIGHT_RECORDER"
"""The variable that names the folder in which a rank leaves its records when it fails."""
RECORDS = 1024
"""Records that a rank keeps: of its latest operations."""

CALLED, ENTERED, LAUNCHED, DONE, FAILED = "called", "entered", "launched", "done", "failed"
"""States: waits for its turn on a communicator stream; waits for other members; all members have
asked their devices for it; over."""


class CommRecord:
    """One operation of this rank on one group."""

    __slots__ = (
        "begin",
        "call",
        "count",
        "dtype",
        "end",
        "error",
        "group",
        "nbytes",
        "op",
        "sequence",
        "source",
        "state",
        "stream",
    )

    def __init__(
        self,
        op: str,
        call: str,
        arrays: Sequence[Array],
        group: tuple[int, ...],
        stream: str,
    ) -> None:
        self.op = op
        """What it is: `all_reduce`."""
        self.call = call
        """The same with what all members must say alike: `all_reduce max`."""
        count = nbytes = 0
        dtype = None
        for array in arrays:
            count += array.size
            nbytes += array.nbytes
            dtype = array.dtype
        self.dtype = dtype
        """Of this rank's input; None where it gives nothing."""
        self.count = count
        """Elements of this rank's input."""
        self.nbytes = nbytes
        """Bytes of this rank's input."""
        self.group = group
        """Ranks of the group, in its order."""
        self.stream = stream
        """The communicator stream that runs it; empty for the compute stream."""
        self.sequence = -1
        """How many operations the group had run before; -1 until it begins."""
        self.source: SourceLine = user_line()
        """The user's line that led to it."""
        self.state = CALLED
        self.begin = 0.0
        """When it began, in seconds of the clock that counts since 1970."""
        self.end = 0.0
        self.error = ""

    def __str__(self) -> str:
        return (
            f"{self.call} of {self.nbytes} bytes "
            f"(operation {self.sequence} of ranks {list(self.group)})"
        )


class FlightRecorder:
    """The latest operations of one rank, oldest first."""

    def __init__(self, rank: int, size: int = RECORDS) -> None:
        self.rank = rank
        self.observers: list[Callable[[CommRecord], None]] = []
        """Called with each operation when it is called for."""
        self._records: deque[CommRecord] = deque(maxlen=size)

    def add(self, record: CommRecord) -> None:
        """Keep a record, in place of the oldest where there are too many."""
        self._records.append(record)
        for observer in self.observers:
            observer(record)

    def records(self) -> tuple[CommRecord, ...]:
        """The records that are kept."""
        return tuple(self._records)

    def dump(self, path: Path | str) -> None:
        """Write the records as one JSON object. TransportError where the file cannot be written.

        `{"rank": r, "operations": [{"sequence", "group", "stream", "op", "call", "dtype", "count",
        "bytes", "state", "source", "begin", "end", "error"}, ...]}`, the oldest first. `begin` and
        `end` are seconds since 1970, null for what has not come so far.
        """
        operations = [
            {
                "sequence": record.sequence,
                "group": list(record.group),
                "stream": record.stream,
                "op": record.op,
                "call": record.call,
                "dtype": None if record.dtype is None else record.dtype.name,
                "count": record.count,
                "bytes": record.nbytes,
                "state": record.state,
                "source": str(record.source),
                "begin": record.begin or None,
                "end": record.end or None,
                "error": record.error or None,
            }
            for record in self.records()
        ]
        text = json.dumps({"rank": self.rank, "operations": operations}, indent=1)
        target = Path(path)
        try:
            write_whole(target, ((text + "\n").encode(),))
        except OSError as error:
            raise TransportError(
                "the flight recorder cannot be written",
                rank=self.rank,
                got=f"{target}: {error.strerror or error}",
            ) from None

    def dump_on_failure(self) -> None:
        """Write `rank-R.json` to the folder that the environment names, if it names one."""
        directory = os.environ.get(DIRECTORY)
        if not directory:
            return
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.dump(folder / f"rank-{self.rank}.json")
        except (OSError, TransportError):
            # The failure itself is what the user must see, not that it could not be recorded.
            return


def now() -> float:
    """Seconds since 1970."""
    return time.time()
